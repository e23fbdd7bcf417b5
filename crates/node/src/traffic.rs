//! Requests as they are answered: one update of a few atomic counters each, and no lock.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::status::{Histogram, HttpStatus, OperationStatus, ServerStatus};

/// What a client asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// How much of a chain is here.
    Lookup,
    /// Leases on blocks: a load.
    View,
    /// Leases given back.
    Release,
    /// Slabs to fill.
    Reserve,
    /// Slabs that are full: a save.
    Seal,
    /// Questions that move nothing: contains, locate, explain, statistics.
    Query,
    /// Pins, hints, prefetches and deletions.
    Advise,
    /// Connecting, namespaces, flushes and what an administrator does.
    Control,
}

impl Operation {
    /// Every operation.
    pub const ALL: [Self; 8] = [
        Self::Lookup,
        Self::View,
        Self::Release,
        Self::Reserve,
        Self::Seal,
        Self::Query,
        Self::Advise,
        Self::Control,
    ];

    /// Its name in metrics, spans and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lookup => "lookup",
            Self::View => "view",
            Self::Release => "release",
            Self::Reserve => "reserve",
            Self::Seal => "seal",
            Self::Query => "query",
            Self::Advise => "advise",
            Self::Control => "control",
        }
    }

    /// Whether its blocks and bytes are worth a histogram.
    fn carries_blocks(self) -> bool {
        matches!(self, Self::Lookup | Self::View | Self::Reserve | Self::Seal)
    }
}

/// One request that was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answered {
    /// What it asked for.
    pub operation: Operation,
    /// From its arrival to its answer.
    pub duration: Duration,
    /// Blocks in it.
    pub blocks: u64,
    /// Of these, found.
    pub hit_blocks: u64,
    /// Bytes of the blocks that it moved or leased.
    pub bytes: u64,
    /// Whether it failed as a whole.
    pub failed: bool,
}

/// What a node answered since it started.
#[derive(Debug)]
pub struct Traffic {
    operations: [Counted; Operation::ALL.len()],
    lookup_hit_blocks: Buckets,
    lookup_hit_percent: Buckets,
    pub(crate) http: HttpCounters,
}

/// What the HTTP server counts.
#[derive(Debug, Default)]
pub(crate) struct HttpCounters {
    pub(crate) connections: AtomicU64,
    pub(crate) requests: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) turned_away: AtomicU64,
    pub(crate) handshake_failures: AtomicU64,
}

#[derive(Debug)]
struct Counted {
    failures: AtomicU64,
    duration_us: Buckets,
    blocks: Buckets,
    bytes: Buckets,
    bytes_per_second: Buckets,
}

/// Microseconds: 1 to 2^24 (17 s) in steps of two.
const DURATION_US: Scale = Scale { first: 1, step_bits: 1, count: 25 };
/// Blocks: 1 to 4096 in steps of four.
const BLOCKS: Scale = Scale { first: 1, step_bits: 2, count: 7 };
/// Bytes: 4 KiB to 16 GiB in steps of four.
const BYTES: Scale = Scale { first: 4096, step_bits: 2, count: 12 };
/// Bytes a second: 1 MiB/s to 1 TiB/s in steps of four.
const SPEED: Scale = Scale { first: 1 << 20, step_bits: 2, count: 11 };
/// Percent, in tens.
const PERCENT_COUNT: usize = 11;

impl Default for Traffic {
    fn default() -> Self {
        let counted = || Counted {
            failures: AtomicU64::new(0),
            duration_us: Buckets::of(DURATION_US.bounds()),
            blocks: Buckets::of(BLOCKS.bounds()),
            bytes: Buckets::of(BYTES.bounds()),
            bytes_per_second: Buckets::of(SPEED.bounds()),
        };
        Self {
            operations: std::array::from_fn(|_| counted()),
            lookup_hit_blocks: Buckets::of([0].into_iter().chain(BLOCKS.bounds())),
            lookup_hit_percent: Buckets::of((0..PERCENT_COUNT as u64).map(|tens| tens * 10)),
            http: HttpCounters::default(),
        }
    }
}

impl Traffic {
    /// Counts a request.
    pub fn record(&self, answered: &Answered) {
        let counted = &self.operations[answered.operation as usize];
        if answered.failed {
            counted.failures.fetch_add(1, Relaxed);
        }
        let duration_us = u64::try_from(answered.duration.as_micros()).unwrap_or(u64::MAX);
        counted.duration_us.add(duration_us);
        if answered.operation.carries_blocks() {
            counted.blocks.add(answered.blocks);
        }
        if answered.bytes > 0 {
            counted.bytes.add(answered.bytes);
            let per_second =
                u128::from(answered.bytes) * 1_000_000 / u128::from(duration_us.max(1));
            counted.bytes_per_second.add(u64::try_from(per_second).unwrap_or(u64::MAX));
        }
        if answered.operation == Operation::Lookup && answered.blocks > 0 {
            self.lookup_hit_blocks.add(answered.hit_blocks);
            self.lookup_hit_percent.add(answered.hit_blocks * 100 / answered.blocks);
        }
    }

    /// What was counted.
    pub fn status(&self) -> ServerStatus {
        let operations = Operation::ALL.iter().zip(&self.operations);
        let operations = operations.map(|(operation, counted)| OperationStatus {
            operation: operation.name().to_owned(),
            failures: counted.failures.load(Relaxed),
            duration_s: counted.duration_us.histogram(1e6),
            blocks: counted.blocks.histogram(1.0),
            bytes: counted.bytes.histogram(1.0),
            bytes_per_second: counted.bytes_per_second.histogram(1.0),
        });
        ServerStatus {
            operations: operations.collect(),
            lookup_hit_blocks: self.lookup_hit_blocks.histogram(1.0),
            lookup_hit_ratio: self.lookup_hit_percent.histogram(100.0),
            http: HttpStatus {
                connections: self.http.connections.load(Relaxed),
                requests: self.http.requests.load(Relaxed),
                refused: self.http.refused.load(Relaxed),
                turned_away: self.http.turned_away.load(Relaxed),
                handshake_failures: self.http.handshake_failures.load(Relaxed),
            },
        }
    }
}

/// Bounds that grow by a power of two.
struct Scale {
    first: u64,
    step_bits: u32,
    count: u32,
}

impl Scale {
    fn bounds(&self) -> impl Iterator<Item = u64> {
        let (first, step_bits) = (self.first, self.step_bits);
        (0..self.count).map(move |at| first << (at * step_bits))
    }
}

#[derive(Debug)]
struct Buckets {
    bounds: Box<[u64]>,
    counts: Box<[AtomicU64]>,
    sum: AtomicU64,
}

impl Buckets {
    fn of(bounds: impl Iterator<Item = u64>) -> Self {
        let bounds: Box<[u64]> = bounds.collect();
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds, counts, sum: AtomicU64::new(0) }
    }

    /// Relaxed: each is a figure of its own, and nothing is read because of it.
    fn add(&self, value: u64) {
        let at = self.bounds.partition_point(|bound| *bound < value);
        self.counts[at].fetch_add(1, Relaxed);
        self.sum.fetch_add(value, Relaxed);
    }

    /// Divides by how many of what was counted make one of what is told, so that bounds stay round.
    #[expect(clippy::cast_precision_loss, reason = "a bound or a sum for people")]
    fn histogram(&self, divisor: f64) -> Histogram {
        Histogram {
            bounds: self.bounds.iter().map(|bound| *bound as f64 / divisor).collect(),
            counts: self.counts.iter().map(|count| count.load(Relaxed)).collect(),
            sum: self.sum.load(Relaxed) as f64 / divisor,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(operation: Operation, blocks: u64, hit_blocks: u64) -> Answered {
        let duration = Duration::from_micros(100);
        Answered { operation, duration, blocks, hit_blocks, bytes: 0, failed: false }
    }

    #[test]
    fn a_lookup_is_told_by_its_time_its_blocks_and_its_hits() {
        let traffic = Traffic::default();
        traffic.record(&answered(Operation::Lookup, 10, 7));
        traffic.record(&answered(Operation::Lookup, 10, 0));
        let status = traffic.status();
        let lookup = &status.operations[Operation::Lookup as usize];
        assert_eq!(lookup.operation, "lookup");
        assert_eq!(lookup.duration_s.count(), 2);
        assert_eq!(lookup.duration_s.quantile(0.5), Some(128e-6), "the bound above 100 us");
        assert_eq!((lookup.blocks.count(), lookup.blocks.mean()), (2, Some(10.0)));
        assert_eq!(lookup.bytes.count(), 0, "a lookup moves nothing");
        assert_eq!(status.lookup_hit_blocks.sum.to_bits(), 7f64.to_bits());
        assert_eq!(status.lookup_hit_ratio.quantile(0.5), Some(0.0));
        assert_eq!(status.lookup_hit_ratio.quantile(1.0), Some(0.7));
    }

    #[test]
    fn a_load_is_told_by_its_bytes_and_its_speed() {
        let traffic = Traffic::default();
        let mut load = answered(Operation::View, 2, 2);
        load.bytes = 4 << 20;
        traffic.record(&load);
        load.failed = true;
        traffic.record(&load);
        let status = traffic.status();
        let view = &status.operations[Operation::View as usize];
        assert_eq!(view.failures, 1);
        assert_eq!(view.bytes.quantile(1.0), Some(f64::from(4 << 20)));
        // 4 MiB in 100 us are 42 GB/s, above 16 GiB/s and below 64 GiB/s.
        assert_eq!(view.bytes_per_second.quantile(1.0), Some(36f64.exp2()));
    }

    #[test]
    fn the_longest_request_is_counted_too() {
        let traffic = Traffic::default();
        let mut request = answered(Operation::Control, 0, 0);
        request.duration = Duration::MAX;
        traffic.record(&request);
        let control = &traffic.status().operations[Operation::Control as usize];
        assert_eq!(control.duration_s.quantile(1.0), Some(f64::INFINITY));
    }

    #[test]
    fn operations_stand_where_their_number_says() {
        for (at, operation) in Operation::ALL.into_iter().enumerate() {
            assert_eq!(operation as usize, at, "{}", operation.name());
        }
    }
}
