//! The rows of the memory tier of a GPU: owners of the pool, lengths, numbers, ways and targets.

use super::rows::sizes;
use crate::{GIB, Target, size_name};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// The target of batches in the memory of one GPU, in bytes a second. Bytes count once, though they
/// are read and written.
const SAME_GPU: f64 = 1.6e12;
/// It holds for batches of at least this many bytes, of blocks of at least [`LONG`].
const BATCH_BYTES: usize = 32 * MIB;
const LONG: usize = 64 * KIB;
/// The target of one block of [`ALONE`], in microseconds.
const ALONE_US: f64 = 20.0;
const ALONE: usize = 2 * MIB;

/// Whose memory the pool is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// The GPU that the pages are on.
    SameGpu,
    /// Another GPU.
    Peer,
}

impl Owner {
    pub(super) const ALL: [Self; 2] = [Self::SameGpu, Self::Peer];

    /// The start of the names of its rows.
    pub(super) fn prefix(self) -> &'static str {
        match self {
            Self::SameGpu => "hbm/",
            Self::Peer => "hbm-peer/",
        }
    }

    /// Its plain copies of this length. Within one GPU, both directions are one.
    pub(super) fn plain(self, size: &str) -> Vec<(Move, String)> {
        match self {
            Self::SameGpu => vec![(Move::Put, format!("plain/on-device/{size}"))],
            Self::Peer => vec![
                (Move::Put, format!("plain/to-peer/{size}")),
                (Move::Get, format!("plain/from-peer/{size}")),
            ],
        }
    }
}

/// Where blocks go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Move {
    /// From pages to the pool.
    Put,
    /// From the pool to pages.
    Get,
}

impl Move {
    fn name(self) -> &'static str {
        match self {
            Self::Put => "put",
            Self::Get => "get",
        }
    }
}

/// What makes the copies of a submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HbmWay {
    /// The driver, by batched copies where it has them.
    Direct,
    /// The driver, by one call for each.
    Single,
    /// Our kernel.
    Mapped,
}

impl HbmWay {
    pub(super) const ALL: [Self; 3] = [Self::Direct, Self::Single, Self::Mapped];

    fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Single => "single",
            Self::Mapped => "mapped",
        }
    }
}

/// Blocks that several ways copy.
#[derive(Debug, Clone, Copy)]
pub(super) struct HbmShape {
    owner: Owner,
    pub(super) direction: Move,
    pub(super) bytes: usize,
    pub(super) count: usize,
}

impl HbmShape {
    /// The name of its row by a way.
    pub(super) fn name(self, way: HbmWay) -> String {
        let (prefix, direction) = (self.owner.prefix(), self.direction.name());
        let (size, way) = (size_name(self.bytes), way.name());
        format!("{prefix}{direction}/{size}/x{}/{way}", self.count)
    }

    /// Whether the time of one block counts.
    pub(super) fn is_latency(self) -> bool {
        self.count == 1
    }

    /// The value of its row by the time of a submission: microseconds, or GiB/s.
    pub(super) fn value(self, seconds: f64) -> f64 {
        if self.is_latency() {
            return seconds * 1e6;
        }
        (self.bytes * self.count) as f64 / seconds.max(1e-9) / GIB
    }

    /// Whether no other value is better.
    pub(super) fn is_best(self, value: f64, all: &[f64]) -> bool {
        let is_worse =
            |other: &f64| if self.is_latency() { *other < value } else { *other > value };
        !all.iter().any(is_worse)
    }

    /// The target is that of the best way: which one that is depends on the driver.
    pub(super) fn target(self, is_best: bool) -> Target {
        let is_batch = self.bytes >= LONG && self.bytes * self.count >= BATCH_BYTES;
        match self.owner {
            Owner::SameGpu if is_best && self.is_latency() => Target::AtMost(ALONE_US),
            Owner::SameGpu if is_best && is_batch => Target::AtLeast(SAME_GPU / GIB),
            Owner::SameGpu | Owner::Peer => Target::None,
        }
    }
}

/// All shapes of an owner whose blocks fit into `total_max` bytes, and one block alone.
pub(super) fn hbm_shapes(owner: Owner, total_max: usize) -> impl Iterator<Item = HbmShape> {
    let both = move |(bytes, count)| {
        let shape = move |direction| HbmShape { owner, direction, bytes, count };
        [Move::Put, Move::Get].map(shape)
    };
    let alone = HbmShape { owner, direction: Move::Get, bytes: ALONE, count: 1 };
    sizes(total_max).flat_map(both).chain([alone])
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn rows_are_bounded_and_have_unique_names() {
        for total_max in [4 * MIB, 256 * MIB] {
            let of_owner = |owner| hbm_shapes(owner, total_max);
            let all: Vec<HbmShape> = Owner::ALL.into_iter().flat_map(of_owner).collect();
            let of_shape = |shape: &HbmShape| HbmWay::ALL.map(|way| shape.name(way));
            let names: BTreeSet<String> = all.iter().flat_map(of_shape).collect();
            assert_eq!(names.len(), all.len() * HbmWay::ALL.len());
            assert!(all.iter().all(|it| it.bytes * it.count <= total_max));
            assert!(names.contains("hbm/get/2MiB/x1/mapped"), "{names:?}");
            assert!(names.contains("hbm-peer/put/64KiB/x16/single"), "{names:?}");
        }
    }

    #[test]
    fn targets_are_those_of_the_best_way_within_one_gpu() {
        let shape = |owner, bytes, count| HbmShape { owner, direction: Move::Get, bytes, count };
        let batch = shape(Owner::SameGpu, 2 * MIB, 16);
        let Target::AtLeast(least) = batch.target(true) else { panic!("{:?}", batch.target(true)) };
        assert!((least - 1490.1).abs() < 0.1, "1.6 TB/s in GiB/s: {least}");
        assert_eq!(batch.target(false), Target::None);
        assert_eq!(shape(Owner::Peer, 2 * MIB, 16).target(true), Target::None);
        assert_eq!(shape(Owner::SameGpu, 64 * KIB, 128).target(true), Target::None);
        assert_eq!(shape(Owner::SameGpu, 16 * KIB, 8192).target(true), Target::None);
        let alone = shape(Owner::SameGpu, 2 * MIB, 1);
        assert_eq!(alone.target(true), Target::AtMost(20.0));
        assert!(alone.is_best(3.0, &[3.0, 4.0]) && !alone.is_best(4.0, &[3.0, 4.0]));
        assert!(batch.is_best(4.0, &[3.0, 4.0]) && !batch.is_best(3.0, &[3.0, 4.0]));
        assert!((alone.value(2e-5) - 20.0).abs() < 1e-9);
        assert!((batch.value(1.0) - 1.0 / 32.0).abs() < 1e-9);
    }
}
