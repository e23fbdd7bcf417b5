//! Statistics of a store. Counters are exact: hits, misses and failures add up to gets.

use cascade_memory::PoolStats;
use serde::{Deserialize, Serialize};

use crate::names::{by_tier, tier_name};
use crate::tier::TierStats;
use crate::{PutOutcome, StageHealth, TierName};

/// Counters since the store was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StoreCounters {
    /// Chain lookups.
    pub requests: u64,
    /// Blocks requested by chain lookups.
    pub blocks_requested: u64,
    /// Leading blocks matched by chain lookups.
    pub blocks_matched: u64,
    /// Blocks requested by get or view without a preceding lookup.
    pub direct_requested: u64,
    /// Blocks of `direct_requested` that were in a tier with a closed read circuit.
    pub direct_matched: u64,
    /// Blocks requested by get and view.
    pub gets: u64,
    /// Gets that found the block.
    pub hits: u64,
    /// Gets that did not find the block.
    pub misses: u64,
    /// Misses of blocks that only stages with an open read circuit have (part of `misses`).
    pub shed_gets: u64,
    /// Gets that failed: deadline, back-pressure, or failure of a tier.
    pub get_failures: u64,
    /// Bytes returned by get and view.
    pub bytes_read: u64,
    /// Blocks passed to put.
    pub puts: u64,
    /// Puts that stored the block.
    pub stored: u64,
    /// Puts of bytes that were already present under another key.
    pub deduplicated: u64,
    /// Puts of a key that was already present with the same bytes.
    pub present: u64,
    /// Puts that were refused because the key is present with other bytes.
    pub conflicts: u64,
    /// Puts that were declined.
    pub declined: u64,
    /// Puts that failed.
    pub put_failures: u64,
    /// Bytes copied or sealed into the first tier.
    pub bytes_written: u64,
    /// Blocks evicted from DRAM.
    pub evicted_blocks: u64,
    /// Bytes of the evicted blocks.
    pub evicted_bytes: u64,
    /// Evicted blocks that no other tier had, and that no source has given.
    pub lost_blocks: u64,
    /// Blocks written to a lower stage.
    pub demoted_blocks: u64,
    /// Bytes of the demoted blocks.
    pub demoted_bytes: u64,
    /// Blocks copied to DRAM from a lower stage.
    pub promoted_blocks: u64,
    /// Bytes of the promoted blocks.
    pub promoted_bytes: u64,
    /// Blocks that a lower stage failed to store.
    pub demote_failures: u64,
    /// Blocks that were not queued for a lower stage because its write circuit was open.
    pub shed_puts: u64,
    /// Blocks that a lower stage can never store, such as empty ones.
    pub demote_declines: u64,
    /// Key additions and removals that a lower stage failed to record.
    pub name_failures: u64,
    /// Blocks that a lower stage dropped to make room.
    pub reclaimed_blocks: u64,
    /// Blocks that failed their check and count as misses.
    pub damaged_blocks: u64,
    /// Blocks promoted by prefetch.
    pub prefetched_blocks: u64,
    /// Prefetched blocks that were read before their eviction.
    pub prefetched_used: u64,
}

impl StoreCounters {
    /// Blocks requested, the denominator of the hit rate: by chain lookups, and by get and view
    /// without a lookup. A block that a lookup matches and a get then loads counts once.
    pub fn requested(&self) -> u64 {
        self.blocks_requested + self.direct_requested
    }

    /// Blocks matched, the numerator of the hit rate.
    pub fn matched(&self) -> u64 {
        self.blocks_matched + self.direct_matched
    }

    /// Counts the outcome of one block's put.
    pub fn count_put(&mut self, outcome: &PutOutcome) {
        self.puts += 1;
        *match outcome {
            PutOutcome::Stored => &mut self.stored,
            PutOutcome::Deduplicated => &mut self.deduplicated,
            PutOutcome::Present => &mut self.present,
            PutOutcome::Conflict => &mut self.conflicts,
            PutOutcome::Declined(_) => &mut self.declined,
            PutOutcome::Failed(_) => &mut self.put_failures,
        } += 1;
    }
}

/// Hits of one tier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierHits {
    /// The tier.
    #[serde(deserialize_with = "tier_name")]
    pub tier: TierName,
    /// Blocks served from this tier.
    pub blocks: u64,
    /// Bytes of these blocks.
    pub bytes: u64,
    /// Requested blocks matched in this tier. The sum over all tiers is [`StoreCounters::matched`].
    pub matched_blocks: u64,
}

/// Statistics of a source, since the store was opened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceStats {
    /// Blocks that the source said it has, each time it was asked.
    pub located_blocks: u64,
    /// Blocks fetched from it, verified by their checksums.
    pub fetched_blocks: u64,
    /// Bytes of these blocks.
    pub fetched_bytes: u64,
    /// Blocks that it had no more when they were fetched.
    pub stale_blocks: u64,
    /// Blocks whose bytes did not have the length or the checksum that it had stated.
    pub damaged_blocks: u64,
    /// Blocks that it failed to deliver: deadline, open circuit, or another failure.
    pub failed_blocks: u64,
    /// Its health. The circuit for reads counts; the one for writes is always closed.
    pub health: StageHealth,
}

/// How long the store's lock was held, over holds for many keys.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct HoldTimes {
    /// Numbers of holds up to each of [`HoldTimes::BOUNDS_US`], and of longer ones.
    pub counts: Vec<u64>,
    /// The sum of their times, in nanoseconds.
    pub sum_ns: u64,
}

impl HoldTimes {
    /// Upper bounds of the classes, in microseconds.
    pub const BOUNDS_US: [u64; 10] =
        [50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 100_000, 1_000_000];
}

/// Statistics of a store at one time.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StoreStats {
    /// Counters since the store was opened.
    pub counters: StoreCounters,
    /// Hits by tier, fast to slow, then by source. The sum is `counters.hits`.
    pub hits_by_tier: Vec<TierHits>,
    /// Keys of blocks in any tier.
    pub keys: u64,
    /// Distinct contents in any tier.
    pub contents: u64,
    /// Bytes of the distinct contents, each counted once.
    pub content_bytes: u64,
    /// Blocks resident in DRAM.
    pub dram_blocks: u64,
    /// Bytes of the contents resident in DRAM.
    pub dram_bytes: u64,
    /// Protected blocks resident in DRAM.
    pub protected_blocks: u64,
    /// Blocks since the start without protection, because the quota was full.
    pub protection_refused: u64,
    /// Memory of the catalog, the eviction policy and the slabs' states.
    pub catalog_bytes: u64,
    /// Bytes waiting to be written to lower stages.
    pub pending_bytes: u64,
    /// How long the store's lock was held for many keys at once.
    pub lock_holds: HoldTimes,
    /// Statistics of the memory pool.
    pub pool: PoolStats,
    /// Statistics of the lower stages, fast to slow.
    #[serde(deserialize_with = "by_tier")]
    pub stages: Vec<(TierName, TierStats)>,
    /// Distinct contents in each lower stage, in the same order.
    pub stage_blocks: Vec<u64>,
    /// Health of the lower stages, in the same order.
    #[serde(deserialize_with = "by_tier")]
    pub health: Vec<(TierName, StageHealth)>,
    /// Statistics of the sources, in the order of preference.
    #[serde(deserialize_with = "by_tier")]
    pub sources: Vec<(TierName, SourceStats)>,
    /// Estimated hit rates of other sizes of each bounded tier, by tier and size.
    pub shadows: Vec<ShadowFigure>,
    /// Memory of the shadow caches, the eviction history and the hot prefixes.
    pub insight_bytes: u64,
    /// Statistics of the warm restart, if the pool is named.
    pub warm: Option<WarmStats>,
    /// Notes for the operator, such as a tier of the pipeline that was left out.
    pub notes: Vec<String>,
}

/// How many blocks of an earlier run were recovered, and how full the ledger is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct WarmStats {
    /// Keys that were in DRAM when the previous process ended and are in DRAM again.
    pub recovered_blocks: u64,
    /// Bytes of their contents, each counted once.
    pub recovered_bytes: u64,
    /// Records that were damaged, contradicted each other or described memory outside the pool.
    pub rejected_records: u64,
    /// Time to recover the blocks, without the allocation of the pool.
    pub recover_ms: u64,
    /// How often a store has opened these files, including this time.
    pub runs: u64,
    /// Places for keys in the ledger. One in more than two lower tiers takes two.
    pub ledger_capacity: u64,
    /// Places in use.
    pub ledger_records: u64,
    /// Keys stored in DRAM while the ledger was full: a restart does not recover them.
    pub ledger_full_drops: u64,
    /// Pieces of memory that processes of an earlier run may still access.
    pub held_by_earlier: u64,
}

/// Results of one shadow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShadowFigure {
    /// The tier. Hits count from the start of a request, in this tier and those above it.
    #[serde(deserialize_with = "crate::names::tier_name")]
    pub tier: TierName,
    /// The shadow's size in percent of the tier's: 100 is the calibration.
    pub capacity_percent: u64,
    /// The tier size that the shadow models.
    pub capacity_bytes: u64,
    /// One block in this many is sampled.
    pub sampled_one_in: u64,
    /// Over the last 15 to 30 minutes of requests.
    pub recent: ShadowRates,
    /// Since the store was opened.
    pub since_start: ShadowRates,
}

/// Block counts of chain lookups, measured and predicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ShadowRates {
    /// Blocks requested.
    pub blocks_requested: u64,
    /// Blocks matched in the tier as it is, without a gap from the start of their request.
    pub blocks_matched: u64,
    /// Blocks matched by the shadow alone.
    pub blocks_simulated: u64,
    /// Blocks predicted to match at the shadow's size: `blocks_matched`, plus the misses that this
    /// shadow saves against the one at 100 %.
    pub blocks_predicted: u64,
}

impl ShadowRates {
    /// The measured hit rate.
    pub fn hit_rate(&self) -> f64 {
        self.rate(self.blocks_matched)
    }

    /// The hit rate predicted for the shadow's size.
    pub fn predicted_hit_rate(&self) -> f64 {
        self.rate(self.blocks_predicted)
    }

    /// The hit rate of the shadow alone. At 100 %, its distance to the measured rate is its error.
    pub fn simulated_hit_rate(&self) -> f64 {
        self.rate(self.blocks_simulated)
    }

    #[expect(clippy::cast_precision_loss, reason = "counts of blocks stay far below 2^52")]
    fn rate(&self, blocks: u64) -> f64 {
        if self.blocks_requested == 0 {
            return 0.0;
        }
        blocks as f64 / self.blocks_requested as f64
    }
}
