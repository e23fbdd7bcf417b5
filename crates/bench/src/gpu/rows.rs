//! The rows of copies: their directions, lengths, numbers, ways and targets.

use cascade_device::{Call, Direction};

use super::work::Form;
use crate::{GIB, Target, size_name};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Lengths of fragments.
const FRAGMENTS: [usize; 5] = [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 2 * MIB];
/// Numbers of fragments of one submission. Engines copy between a few and all layers of a prompt.
const COUNTS: [usize; 5] = [16, 128, 1024, 8192, 65_536];

/// From this number of fragments on, what each call costs does not matter.
const MANY: usize = 1024;
/// The target of long copies both ways at once, in bytes a second.
const BOTH_WAYS: f64 = 83e9;

/// What makes the copies of a submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Way {
    /// The driver by batched copies, without a plan.
    Batch,
    /// The driver by one call for each, without a plan.
    Single,
    /// A plan with the driver's copies alone.
    Direct,
    /// A plan with copies through a buffer on the device, and a kernel.
    Staged,
    /// A plan with a kernel on mapped memory alone.
    Mapped,
    /// A plan by the table of costs of this machine.
    Chosen,
}

impl Way {
    pub(super) const ALL: [Self; 6] =
        [Self::Batch, Self::Single, Self::Direct, Self::Staged, Self::Mapped, Self::Chosen];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Batch => "batch",
            Self::Single => "single",
            Self::Direct => "direct",
            Self::Staged => "staged",
            Self::Mapped => "mapped",
            Self::Chosen => "chosen",
        }
    }

    pub(super) fn form(self) -> Form {
        if self.is_planned() { Form::Transfer } else { Form::Copies }
    }

    pub(super) fn is_planned(self) -> bool {
        !matches!(self, Self::Batch | Self::Single)
    }

    pub(super) fn has_kernel(self) -> bool {
        matches!(self, Self::Staged | Self::Mapped | Self::Chosen)
    }

    /// Whether the targets of long fragments are its own.
    fn is_for_long(self) -> bool {
        matches!(self, Self::Batch | Self::Direct | Self::Chosen)
    }
}

/// The way of a call in a plan.
pub(super) fn name_of_call(call: &Call) -> Option<&'static str> {
    match call {
        Call::Direct(_) => Some(Way::Direct.name()),
        Call::Staged(_) => Some(Way::Staged.name()),
        Call::Mapped(_) => Some(Way::Mapped.name()),
        Call::Unregistered(_) => None,
    }
}

/// Which directions are copied at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Traffic {
    One(Direction),
    Both,
}

const TRAFFIC: [Traffic; 3] =
    [Traffic::One(Direction::ToDevice), Traffic::One(Direction::ToHost), Traffic::Both];

impl Traffic {
    fn name(self) -> &'static str {
        match self {
            Self::One(Direction::ToDevice) => "to-device",
            Self::One(Direction::ToHost) => "to-host",
            Self::Both => "both",
        }
    }
}

/// Fragments that several ways copy.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    traffic: Traffic,
    pub(super) bytes: usize,
    pub(super) count: usize,
}

impl Shape {
    /// The name of its row by a way.
    pub(super) fn name(self, way: Way) -> String {
        let (traffic, size, way) = (self.traffic.name(), size_name(self.bytes), way.name());
        format!("{traffic}/{size}/x{}/{way}", self.count)
    }

    pub(super) fn directions(self) -> Vec<Direction> {
        match self.traffic {
            Traffic::One(direction) => vec![direction],
            Traffic::Both => vec![Direction::ToDevice, Direction::ToHost],
        }
    }

    pub(super) fn is_both(self) -> bool {
        self.traffic == Traffic::Both
    }

    /// Its limit by those of the two directions.
    pub(super) fn limit(self, to_device: f64, to_host: f64) -> f64 {
        match self.traffic {
            Traffic::One(Direction::ToDevice) => to_device,
            Traffic::One(Direction::ToHost) => to_host,
            Traffic::Both => to_device + to_host,
        }
    }

    /// Long fragments should reach the limit nearly by the driver's copies. Of short ones the best
    /// way counts.
    pub(super) fn target(self, way: Way, is_best: bool) -> Target {
        let (is_many, is_for_long) = (self.count >= MANY, way.is_for_long());
        match (self.traffic, self.bytes) {
            (Traffic::Both, bytes) if bytes >= 2 * MIB && is_for_long => {
                Target::AtLeast(BOTH_WAYS / GIB)
            }
            (Traffic::Both, _) => Target::None,
            (_, bytes) if bytes >= 2 * MIB && is_for_long => Target::ShareAtLeast(0.95),
            (_, bytes) if bytes >= 64 * KIB && is_many && is_for_long => Target::ShareAtLeast(0.88),
            (_, bytes) if bytes == 16 * KIB && is_many && is_best => Target::ShareAtLeast(0.85),
            _ => Target::None,
        }
    }
}

/// Lengths and numbers of fragments that fit into `total_max` bytes. If no number of [`COUNTS`]
/// fits, the largest one that does.
pub(super) fn sizes(total_max: usize) -> impl Iterator<Item = (usize, usize)> {
    FRAGMENTS.iter().flat_map(move |&bytes| {
        let fitting = COUNTS.iter().copied().filter(|count| count * bytes <= total_max);
        let fitting: Vec<usize> = fitting.collect();
        let counts = if fitting.is_empty() { vec![total_max / bytes] } else { fitting };
        counts.into_iter().map(move |count| (bytes, count))
    })
}

/// All shapes whose fragments fit into `total_max` bytes.
pub(super) fn shapes(total_max: usize) -> impl Iterator<Item = Shape> {
    sizes(total_max).flat_map(|(bytes, count)| {
        TRAFFIC.into_iter().map(move |traffic| Shape { traffic, bytes, count })
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn rows_are_bounded_have_unique_names_and_cover_every_length_and_way() {
        for total_max in [4 * MIB, 256 * MIB] {
            let all: Vec<Shape> = shapes(total_max).collect();
            let of_shape = |shape: &Shape| Way::ALL.map(|way| shape.name(way));
            let names: BTreeSet<String> = all.iter().flat_map(of_shape).collect();
            assert_eq!(names.len(), all.len() * Way::ALL.len());
            assert!(all.iter().all(|it| it.bytes * it.count <= total_max && it.count > 1));
            for bytes in FRAGMENTS {
                let of_length = all.iter().filter(|shape| shape.bytes == bytes).count();
                assert!(of_length >= TRAFFIC.len(), "{bytes}");
            }
        }
        assert!(shapes(256 * MIB).any(|shape| shape.count == 65_536));
    }

    #[test]
    fn targets_are_those_of_long_fragments_and_of_the_best_way_for_short_ones() {
        let shape = |traffic, bytes, count| Shape { traffic, bytes, count };
        let one = |bytes, count| shape(Traffic::One(Direction::ToHost), bytes, count);
        let target = |shape: Shape, way| shape.target(way, false);
        assert_eq!(target(one(2 * MIB, 16), Way::Direct), Target::ShareAtLeast(0.95));
        assert_eq!(target(one(64 * KIB, 1024), Way::Batch), Target::ShareAtLeast(0.88));
        assert_eq!(target(one(64 * KIB, 128), Way::Batch), Target::None);
        assert_eq!(target(one(2 * MIB, 16), Way::Mapped), Target::None);
        assert_eq!(target(one(16 * KIB, 1024), Way::Direct), Target::None);
        assert_eq!(one(16 * KIB, 1024).target(Way::Mapped, true), Target::ShareAtLeast(0.85));
        assert_eq!(one(16 * KIB, 128).target(Way::Mapped, true), Target::None);
        let both = target(shape(Traffic::Both, 2 * MIB, 16), Way::Direct);
        let Target::AtLeast(least) = both else { panic!("{both:?}") };
        assert!((least - 77.3).abs() < 0.01, "83 GB/s in GiB/s: {least}");
    }
}
