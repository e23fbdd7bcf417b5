//! Counts and times of a replay. Each worker has its own; they are merged at the end.

use std::collections::BTreeMap;
use std::time::Duration;

use cascade_block::{BlockKey, with_causes};
use cascade_store::{PutOutcome, TierName};

use crate::latency::Latencies;
use crate::payload::WrongByte;

/// Limit of the wrong blocks that are described. The others are only counted.
const WRONG_EXAMPLES_MAX: usize = 10;

/// Counts and times of some requests.
#[derive(Debug, Default)]
pub struct ReplayCounts {
    /// Arrival and outcome of each request.
    pub requests: Vec<RequestRecord>,
    /// Blocks requested.
    pub blocks_requested: u64,
    /// Leading blocks that were hits, by tier.
    pub hits_by_tier: BTreeMap<TierName, u64>,
    /// Latencies of lookups, one per request.
    pub lookup: Latencies,
    /// Reads by the slowest tier of their batch.
    pub read_by_tier: BTreeMap<TierName, TierReads>,
    /// Latencies of puts, one per batch.
    pub put: Latencies,
    /// Time in calls of the store.
    pub time: StoreTime,
    /// Time for payload: filling it before puts and checking it after reads.
    pub checking: Duration,
    /// Payload bytes read from the store.
    pub bytes_read: u64,
    /// Payload bytes that the store accepted.
    pub bytes_written: u64,
    /// Blocks put, by outcome.
    pub puts: BTreeMap<&'static str, u64>,
    /// Number of blocks with wrong bytes.
    pub wrong_blocks: u64,
    /// The first wrong blocks.
    pub wrong_examples: Vec<WrongBlock>,
    /// Failures of the store by message.
    pub failures: BTreeMap<String, u64>,
}

/// Reads of batches with the same slowest tier.
#[derive(Debug, Default)]
pub struct TierReads {
    /// Latencies, one per batch.
    pub latencies: Latencies,
    /// Payload bytes, including those of faster tiers in the same batch.
    pub bytes: u64,
    /// Sum of the latencies.
    pub time: Duration,
}

/// Time inside calls of the store.
#[derive(Debug, Clone, Copy, Default)]
pub struct StoreTime {
    /// Lookups.
    pub lookup: Duration,
    /// Views.
    pub read: Duration,
    /// Puts.
    pub put: Duration,
}

/// One request's outcome.
#[derive(Debug, Clone)]
pub struct RequestRecord {
    /// Its index in the trace.
    pub index: usize,
    /// Arrival time since the start of the trace.
    pub at: Duration,
    /// Blocks requested.
    pub blocks: u64,
    /// Leading blocks that were hits, by tier.
    pub hits: Vec<(TierName, u64)>,
}

/// A block that was read with wrong bytes.
#[derive(Debug, Clone)]
pub struct WrongBlock {
    /// Its key.
    pub key: BlockKey,
    /// The tier that it was read from.
    pub tier: TierName,
    /// The first byte that differs.
    pub first: WrongByte,
}

impl ReplayCounts {
    /// Counts hits by tier.
    pub fn count_hits(&mut self, hits: &[(TierName, u64)]) {
        for (tier, count) in hits {
            *self.hits_by_tier.entry(tier).or_default() += count;
        }
    }

    /// Records the read of a batch for its slowest tier.
    pub fn count_read(&mut self, slowest: TierName, bytes: u64, took: Duration) {
        let reads = self.read_by_tier.entry(slowest).or_default();
        reads.latencies.record(took);
        reads.bytes += bytes;
        reads.time += took;
    }

    /// Counts a wrong block, and keeps it if it is one of the first.
    pub fn count_wrong(&mut self, wrong: WrongBlock) {
        self.wrong_blocks += 1;
        if self.wrong_examples.len() < WRONG_EXAMPLES_MAX {
            self.wrong_examples.push(wrong);
        }
    }

    /// Counts the outcome of a put.
    pub fn count_put(&mut self, outcome: &PutOutcome, bytes: usize) {
        let name = match outcome {
            PutOutcome::Stored => "stored",
            PutOutcome::Deduplicated => "deduplicated",
            PutOutcome::Present => "present",
            PutOutcome::Conflict => "conflict",
            PutOutcome::Declined(_) => "declined",
            PutOutcome::Failed(error) => {
                self.count_failure(error);
                "failed"
            }
        };
        *self.puts.entry(name).or_default() += 1;
        if matches!(outcome, PutOutcome::Stored | PutOutcome::Deduplicated) {
            self.bytes_written += bytes as u64;
        }
    }

    /// Counts a failure by its message, including its causes.
    pub fn count_failure(&mut self, error: &dyn std::error::Error) {
        *self.failures.entry(with_causes(error)).or_default() += 1;
    }

    /// Hits of all tiers.
    pub fn blocks_hit(&self) -> u64 {
        self.hits_by_tier.values().sum()
    }

    /// Adds the counts of another worker.
    pub fn merge(&mut self, other: Self) {
        self.requests.extend(other.requests);
        self.blocks_requested += other.blocks_requested;
        other
            .hits_by_tier
            .iter()
            .for_each(|(tier, n)| *self.hits_by_tier.entry(tier).or_default() += n);
        self.lookup.merge(&other.lookup);
        for (tier, reads) in other.read_by_tier {
            let sum = self.read_by_tier.entry(tier).or_default();
            sum.latencies.merge(&reads.latencies);
            sum.bytes += reads.bytes;
            sum.time += reads.time;
        }
        self.put.merge(&other.put);
        self.time.lookup += other.time.lookup;
        self.time.read += other.time.read;
        self.time.put += other.time.put;
        self.checking += other.checking;
        self.bytes_read += other.bytes_read;
        self.bytes_written += other.bytes_written;
        other.puts.iter().for_each(|(name, n)| *self.puts.entry(name).or_default() += n);
        self.wrong_blocks += other.wrong_blocks;
        let room = WRONG_EXAMPLES_MAX - self.wrong_examples.len();
        self.wrong_examples.extend(other.wrong_examples.into_iter().take(room));
        for (message, count) in other.failures {
            *self.failures.entry(message).or_default() += count;
        }
    }
}

impl std::fmt::Display for WrongBlock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shown =
            |byte: Option<u8>| byte.map_or("nothing".to_owned(), |byte| format!("{byte:#04x}"));
        write!(
            f,
            "block {} from {}: byte {} is {}, should be {}",
            self.key,
            self.tier,
            self.first.offset,
            shown(self.first.found),
            shown(self.first.expected)
        )
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use cascade_store::StoreError;

    use super::*;

    /// A full disk was reported only as "failed to write", without the cause.
    #[test]
    fn a_failure_is_counted_with_its_causes() {
        let source = Arc::new(io::Error::from(io::ErrorKind::StorageFull));
        let error = StoreError::Tier { tier: "files", operation: "write", source };
        let mut counts = ReplayCounts::default();
        counts.count_failure(&error);
        counts.count_failure(&error);
        let [(text, 2)] = counts.failures.iter().map(|(t, n)| (t, *n)).collect::<Vec<_>>()[..]
        else {
            panic!("{:?}", counts.failures)
        };
        assert_eq!(text, "tier files failed to write: no storage space");
    }
}
