//! What a store counts. Counters are exact: hits and misses add up to gets.

use cascade_memory::PoolStats;
use serde::{Deserialize, Serialize};

use crate::names::{by_tier, tier_name};
use crate::outcome::PutOutcome;
use crate::shadow::ShadowFigure;
use crate::stage::StageStats;
use crate::{StageHealth, TierName, WarmStats};

/// Counters since the store was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counters {
    /// Chain lookups.
    pub requests: u64,
    /// Blocks that chain lookups asked for.
    pub blocks_requested: u64,
    /// Leading blocks that chain lookups found.
    pub blocks_matched: u64,
    /// Blocks that get and view asked for without a lookup before.
    pub direct_requested: u64,
    /// Of these, known in a tier that answers.
    pub direct_matched: u64,
    /// Blocks asked for by get and view.
    pub gets: u64,
    /// Of these, found.
    pub hits: u64,
    /// Of these, not found.
    pub misses: u64,
    /// Misses of blocks that only a stage has which is shed (part of `misses`).
    pub shed_gets: u64,
    /// Of these, failed (deadline, busy, a tier's failure).
    pub get_failures: u64,
    /// Bytes handed out by get and view.
    pub bytes_read: u64,
    /// Blocks given to put.
    pub puts: u64,
    /// Of these, stored.
    pub stored: u64,
    /// Of these, known by their content.
    pub deduplicated: u64,
    /// Of these, there already.
    pub present: u64,
    /// Of these, refused because the key names other bytes.
    pub conflicts: u64,
    /// Of these, not taken.
    pub declined: u64,
    /// Of these, failed.
    pub put_failures: u64,
    /// Bytes copied or sealed into the first tier.
    pub bytes_written: u64,
    /// Blocks that left DRAM to make room.
    pub evicted_blocks: u64,
    /// Their bytes.
    pub evicted_bytes: u64,
    /// Evicted blocks that no other tier had.
    pub lost_blocks: u64,
    /// Blocks written to a lower stage.
    pub demoted_blocks: u64,
    /// Their bytes.
    pub demoted_bytes: u64,
    /// Blocks brought up from a lower stage.
    pub promoted_blocks: u64,
    /// Their bytes.
    pub promoted_bytes: u64,
    /// Blocks that a lower stage failed to take.
    pub demote_failures: u64,
    /// Blocks that were not queued for a lower stage because it was shed.
    pub shed_puts: u64,
    /// Blocks that a lower stage never takes, such as empty ones.
    pub demote_declines: u64,
    /// Names that a lower stage could not be told to learn or to forget.
    pub name_failures: u64,
    /// Blocks that a lower stage dropped to make room.
    pub reclaimed_blocks: u64,
    /// Blocks found damaged, answered as misses.
    pub damaged_blocks: u64,
    /// Blocks asked for by prefetch.
    pub prefetched_blocks: u64,
    /// Of these, read before they were evicted again.
    pub prefetched_used: u64,
}

impl Counters {
    /// Blocks requested, the denominator of the hit rate: those of chain lookups, and those that
    /// get and view asked for directly. A block that a lookup matched and a get then loads was
    /// requested once.
    pub fn requested(&self) -> u64 {
        self.blocks_requested + self.direct_requested
    }

    /// Blocks matched, the numerator of the hit rate.
    pub fn matched(&self) -> u64 {
        self.blocks_matched + self.direct_matched
    }

    /// One block's put is over.
    pub(crate) fn count_put(&mut self, outcome: &PutOutcome) {
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

/// One tier's share of the hits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierHits {
    /// The tier.
    #[serde(deserialize_with = "tier_name")]
    pub tier: TierName,
    /// Blocks served from it.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Requested blocks that were matched in it; over all tiers they add up to
    /// [`Counters::matched`].
    pub matched_blocks: u64,
}

/// What a store holds and did, at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Stats {
    /// Counters since it was opened.
    pub counters: Counters,
    /// Hits by tier, fast to slow; they add up to `counters.hits`.
    pub hits_by_tier: Vec<TierHits>,
    /// Keys known in any tier.
    pub keys: u64,
    /// Distinct contents known in any tier.
    pub contents: u64,
    /// Bytes of the distinct contents, each counted once.
    pub content_bytes: u64,
    /// Blocks resident in DRAM.
    pub dram_blocks: u64,
    /// Bytes of the contents resident in DRAM.
    pub dram_bytes: u64,
    /// Protected blocks resident in DRAM.
    pub protected_blocks: u64,
    /// Blocks that were to be protected since the start, but the quota was full.
    pub protection_refused: u64,
    /// Memory of the catalog and the policy.
    pub catalog_bytes: u64,
    /// Bytes waiting to be written to lower stages.
    pub pending_bytes: u64,
    /// The pool.
    pub pool: PoolStats,
    /// Lower stages, fast to slow.
    #[serde(deserialize_with = "by_tier")]
    pub stages: Vec<(TierName, StageStats)>,
    /// Distinct contents in each of them, in the same order.
    pub stage_blocks: Vec<u64>,
    /// Their health, in the same order.
    #[serde(deserialize_with = "by_tier")]
    pub health: Vec<(TierName, StageHealth)>,
    /// What other sizes of each bounded tier would give, by tier and size.
    pub shadows: Vec<ShadowFigure>,
    /// Memory of the shadows, of what is known of blocks that are gone, and of hot prefixes.
    pub insight_bytes: u64,
    /// What an earlier run left, if the pool has a name.
    pub warm: Option<WarmStats>,
    /// What an operator should know, such as a tier that was left out.
    pub notes: Vec<String>,
}
