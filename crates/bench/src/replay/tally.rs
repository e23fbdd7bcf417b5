//! What one worker of a replay saw; the workers' tallies add up to the run's.

use std::collections::BTreeMap;
use std::time::Duration;

use cascade_block::{BlockKey, with_causes};
use cascade_store::{PutOutcome, TierName};

use crate::latency::Latencies;
use crate::payload::WrongByte;

/// Wrong blocks that are described one by one; more are only counted.
const WRONG_EXAMPLES_MAX: usize = 10;

/// Counts and times of some requests.
#[derive(Debug, Default)]
pub struct Tally {
    /// Per request: when it arrived and what it got.
    pub requests: Vec<RequestRecord>,
    /// Blocks asked for.
    pub blocks_requested: u64,
    /// Leading blocks that were there, by the tier that gave them.
    pub hits_by_tier: BTreeMap<TierName, u64>,
    /// Time of lookups, one a request.
    pub lookup: Latencies,
    /// Time to have a batch of hits in memory, by the slowest tier in it.
    pub read_by_tier: BTreeMap<TierName, TierReads>,
    /// Time of puts, one a batch.
    pub put: Latencies,
    /// Time in calls of the store.
    pub time: StoreTime,
    /// Time spent on payload: writing it before puts and checking it after reads.
    pub checking: Duration,
    /// Payload bytes that the store gave.
    pub bytes_read: u64,
    /// Payload bytes that the store took.
    pub bytes_written: u64,
    /// What became of blocks that were put.
    pub puts: BTreeMap<&'static str, u64>,
    /// Blocks whose bytes were not what had been stored.
    pub wrong_blocks: u64,
    /// The first of them.
    pub wrong_examples: Vec<WrongBlock>,
    /// Failures of the store by message.
    pub failures: BTreeMap<String, u64>,
}

/// Reads whose slowest tier was the same.
#[derive(Debug, Default)]
pub struct TierReads {
    /// One a batch.
    pub latencies: Latencies,
    /// Payload bytes, those of faster tiers in the same batch included.
    pub bytes: u64,
    /// All batches together.
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
    /// Its place in the trace.
    pub index: usize,
    /// When it arrived, since the trace began.
    pub at: Duration,
    /// Blocks it asked for.
    pub blocks: u64,
    /// Leading blocks that were there, by tier.
    pub hits: Vec<(TierName, u64)>,
}

/// A block that came back with other bytes than it had.
#[derive(Debug, Clone)]
pub struct WrongBlock {
    /// Its key.
    pub key: BlockKey,
    /// The tier that gave it.
    pub tier: TierName,
    /// The first byte that differs.
    pub first: WrongByte,
}

impl Tally {
    /// Counts hits of one tier.
    pub fn count_hits(&mut self, hits: &[(TierName, u64)]) {
        for (tier, count) in hits {
            *self.hits_by_tier.entry(tier).or_default() += count;
        }
    }

    /// Records how long a batch of hits took, for its slowest tier.
    pub fn count_read(&mut self, slowest: TierName, bytes: u64, took: Duration) {
        let reads = self.read_by_tier.entry(slowest).or_default();
        reads.latencies.record(took);
        reads.bytes += bytes;
        reads.time += took;
    }

    /// Counts a wrong block and keeps the first few.
    pub fn count_wrong(&mut self, wrong: WrongBlock) {
        self.wrong_blocks += 1;
        if self.wrong_examples.len() < WRONG_EXAMPLES_MAX {
            self.wrong_examples.push(wrong);
        }
    }

    /// Counts what became of a block that was put.
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

    /// Counts a failure by its message and the causes of it.
    pub fn count_failure(&mut self, error: &dyn std::error::Error) {
        *self.failures.entry(with_causes(error)).or_default() += 1;
    }

    /// Hits of all tiers.
    pub fn blocks_hit(&self) -> u64 {
        self.hits_by_tier.values().sum()
    }

    /// Adds another worker's tally to this one.
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

    /// A full disk was once reported as "failed to write" alone, which tells nobody what to do.
    #[test]
    fn a_failure_is_told_with_its_causes() {
        let source = Arc::new(io::Error::from(io::ErrorKind::StorageFull));
        let error = StoreError::Tier { tier: "files", operation: "write", source };
        let mut tally = Tally::default();
        tally.count_failure(&error);
        tally.count_failure(&error);
        let [(text, 2)] = tally.failures.iter().map(|(t, n)| (t, *n)).collect::<Vec<_>>()[..]
        else {
            panic!("{:?}", tally.failures)
        };
        assert_eq!(text, "tier files failed to write: no storage space");
    }
}
