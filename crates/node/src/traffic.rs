//! Counts requests. Each request updates a few atomic counters and takes no lock.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::status::{Histogram, HttpStatus, OperationStatus, ServerStatus};

/// The kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// A lookup of a chain.
    Lookup,
    /// Leases on blocks, to load them.
    View,
    /// Release of leases.
    Release,
    /// Reservation of slabs, to save blocks.
    Reserve,
    /// Publication of filled slabs: the end of a save.
    Seal,
    /// Queries: contains, locate, explain and statistics.
    Query,
    /// Pins, hints, prefetches and deletions.
    Advise,
    /// Connection setup, namespaces, flushes and administration.
    Control,
}

impl Operation {
    /// All operations.
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

    /// The name in metrics, spans and JSON.
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

    /// Whether there is a histogram of its blocks.
    fn has_block_histogram(self) -> bool {
        matches!(self, Self::Lookup | Self::View | Self::Reserve | Self::Seal)
    }
}

/// The figures of one completed request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompletedRequest {
    /// The kind of request.
    pub operation: Operation,
    /// Time from the request to the response.
    pub duration: Duration,
    /// Blocks in the request.
    pub blocks: u64,
    /// Of these, found.
    pub hit_blocks: u64,
    /// Bytes of the blocks that it copied or leased.
    pub bytes: u64,
    /// Whether the request failed as a whole.
    pub failed: bool,
}

/// Counters of all requests since the start of the node.
#[derive(Debug)]
pub struct Traffic {
    operations: [OperationCounters; Operation::ALL.len()],
    lookup_hit_blocks: Buckets,
    lookup_hit_percent: Buckets,
    pub(crate) http: HttpCounters,
}

/// Counters of the HTTP server.
#[derive(Debug, Default)]
pub(crate) struct HttpCounters {
    pub(crate) connections: AtomicU64,
    pub(crate) requests: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) turned_away: AtomicU64,
    pub(crate) handshake_failures: AtomicU64,
}

#[derive(Debug)]
struct OperationCounters {
    failures: AtomicU64,
    duration_us: Buckets,
    blocks: Buckets,
    bytes: Buckets,
    bytes_per_second: Buckets,
}

/// Bounds in microseconds: powers of two from 1 to 2^24 (17 s).
const DURATION_US: Scale = Scale { first: 1, step_bits: 1, count: 25 };
/// Bounds in blocks: powers of four from 1 to 4096.
const BLOCKS: Scale = Scale { first: 1, step_bits: 2, count: 7 };
/// Bounds in bytes: 4 KiB to 16 GiB, each four times the one before.
const BYTES: Scale = Scale { first: 4096, step_bits: 2, count: 12 };
/// Bounds in bytes per second: 1 MiB/s to 1 TiB/s, each four times the one before.
const SPEED: Scale = Scale { first: 1 << 20, step_bits: 2, count: 11 };
/// Bounds in percent: 0, 10, ..., 100.
const PERCENT_COUNT: usize = 11;

impl Default for Traffic {
    fn default() -> Self {
        let counters = || OperationCounters {
            failures: AtomicU64::new(0),
            duration_us: Buckets::of(DURATION_US.bounds()),
            blocks: Buckets::of(BLOCKS.bounds()),
            bytes: Buckets::of(BYTES.bounds()),
            bytes_per_second: Buckets::of(SPEED.bounds()),
        };
        Self {
            operations: std::array::from_fn(|_| counters()),
            lookup_hit_blocks: Buckets::of([0].into_iter().chain(BLOCKS.bounds())),
            lookup_hit_percent: Buckets::of((0..PERCENT_COUNT as u64).map(|tens| tens * 10)),
            http: HttpCounters::default(),
        }
    }
}

impl Traffic {
    /// Counts a request.
    pub fn record(&self, request: &CompletedRequest) {
        let counters = &self.operations[request.operation as usize];
        if request.failed {
            counters.failures.fetch_add(1, Relaxed);
        }
        let duration_us = u64::try_from(request.duration.as_micros()).unwrap_or(u64::MAX);
        counters.duration_us.add(duration_us);
        if request.operation.has_block_histogram() {
            counters.blocks.add(request.blocks);
        }
        if request.bytes > 0 {
            counters.bytes.add(request.bytes);
            let per_second = u128::from(request.bytes) * 1_000_000 / u128::from(duration_us.max(1));
            counters.bytes_per_second.add(u64::try_from(per_second).unwrap_or(u64::MAX));
        }
        if request.operation == Operation::Lookup && request.blocks > 0 {
            self.lookup_hit_blocks.add(request.hit_blocks);
            self.lookup_hit_percent.add(request.hit_blocks * 100 / request.blocks);
        }
    }

    /// The present values of all counters.
    pub fn status(&self) -> ServerStatus {
        let operations = Operation::ALL.iter().zip(&self.operations);
        let operations = operations.map(|(operation, counters)| OperationStatus {
            operation: operation.name().to_owned(),
            failures: counters.failures.load(Relaxed),
            duration_s: counters.duration_us.histogram(1e6),
            blocks: counters.blocks.histogram(1.0),
            bytes: counters.bytes.histogram(1.0),
            bytes_per_second: counters.bytes_per_second.histogram(1.0),
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

/// Bounds of a histogram, each larger than the one before by the same power of two.
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

/// A histogram of atomic counters.
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

    /// Relaxed ordering is enough: no other memory is published through these counters. A status
    /// that is taken meanwhile may contain the count without the sum.
    fn add(&self, value: u64) {
        let at = self.bounds.partition_point(|bound| *bound < value);
        self.counts[at].fetch_add(1, Relaxed);
        self.sum.fetch_add(value, Relaxed);
    }

    /// The histogram in a unit that is `divisor` times the counted one, such as seconds for
    /// microseconds. Converting only here keeps the counters integers.
    #[expect(clippy::cast_precision_loss, reason = "bounds and a sum for display")]
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

    fn request(operation: Operation, blocks: u64, hit_blocks: u64) -> CompletedRequest {
        let duration = Duration::from_micros(100);
        CompletedRequest { operation, duration, blocks, hit_blocks, bytes: 0, failed: false }
    }

    #[test]
    fn a_lookup_is_counted_with_its_duration_blocks_and_hits() {
        let traffic = Traffic::default();
        traffic.record(&request(Operation::Lookup, 10, 7));
        traffic.record(&request(Operation::Lookup, 10, 0));
        let status = traffic.status();
        let lookup = &status.operations[Operation::Lookup as usize];
        assert_eq!(lookup.operation, "lookup");
        assert_eq!(lookup.duration_s.count(), 2);
        assert_eq!(lookup.duration_s.quantile(0.5), Some(128e-6), "the bound above 100 us");
        assert_eq!((lookup.blocks.count(), lookup.blocks.mean()), (2, Some(10.0)));
        assert_eq!(lookup.bytes.count(), 0, "a lookup copies no blocks");
        assert_eq!(status.lookup_hit_blocks.sum.to_bits(), 7f64.to_bits());
        assert_eq!(status.lookup_hit_ratio.quantile(0.5), Some(0.0));
        assert_eq!(status.lookup_hit_ratio.quantile(1.0), Some(0.7));
    }

    #[test]
    fn a_load_is_counted_with_its_bytes_and_throughput() {
        let traffic = Traffic::default();
        let mut load = request(Operation::View, 2, 2);
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
    fn a_duration_above_the_last_bound_is_counted() {
        let traffic = Traffic::default();
        let mut request = request(Operation::Control, 0, 0);
        request.duration = Duration::MAX;
        traffic.record(&request);
        let control = &traffic.status().operations[Operation::Control as usize];
        assert_eq!(control.duration_s.quantile(1.0), Some(f64::INFINITY));
    }

    #[test]
    fn the_discriminant_of_an_operation_is_its_index() {
        for (at, operation) in Operation::ALL.into_iter().enumerate() {
            assert_eq!(operation as usize, at, "{}", operation.name());
        }
    }
}
