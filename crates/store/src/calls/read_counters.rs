//! Counters of get and view: blocks requested, hits and misses.

use cascade_tier::{GetOutcome, ViewOutcome};

use crate::core::catalog::KeyIndex;
use crate::core::state::StoreState;
use crate::shared::StoreCore;
use crate::shared::call_counts::CallCounts;

impl StoreCore {
    pub(crate) fn count_gets(&self, gets: usize, results: impl Iterator<Item = ReadResult>) {
        let mut counts = CallCounts::default();
        counts.counters.gets = gets as u64;
        for result in results {
            match result {
                ReadResult::Hit { tier, bytes } => {
                    let tier = (self.memory_tier()..self.tier_names().len())
                        .find(|at| self.tier_name(*at) == tier)
                        .expect("hits come from tiers of this pipeline, or from its sources");
                    counts.counters.hits += 1;
                    counts.counters.bytes_read += bytes;
                    counts.count_hit(tier, bytes, self.stages.len());
                }
                ReadResult::Miss => counts.counters.misses += 1,
                ReadResult::Failed => counts.counters.get_failures += 1,
            }
        }
        self.count_call(&counts);
    }
}

impl StoreState {
    /// Counts the blocks of a read that no lookup has counted as requested.
    ///
    /// - A block that a lookup matched was counted by the lookup: this read is its load.
    /// - Another block in the store counts as requested and matched.
    /// - A block that is not in the store counts as requested, unless the batch has a block that a
    ///   lookup matched: then the whole batch is the load of a lookup, which has counted it.
    ///   `is_load` says so for later pieces of the same batch.
    pub(crate) fn count_direct_requests(
        &mut self,
        found: &[Option<KeyIndex>],
        now_unix_ms: u64,
        memory_tier: usize,
        is_load: &mut bool,
    ) {
        let (mut direct, mut absent) = (0, 0);
        for found in found {
            let entry = found.map(|key| self.catalog.entry(key));
            let Some(entry) = entry.filter(|entry| !entry.has_expired(now_unix_ms)) else {
                absent += 1;
                continue;
            };
            if entry.was_matched() {
                *is_load = true;
                continue;
            }
            let content = self.catalog.content(entry.content);
            let lower = content.fastest_stage_except(self.open_read_circuits);
            let lower = lower.map(|stage| 1 + stage);
            match if content.slab.is_some() { Some(memory_tier) } else { lower } {
                Some(tier) => {
                    direct += 1;
                    self.tier_matches[tier] += 1;
                }
                None => absent += 1,
            }
        }
        self.counters.direct_matched += direct;
        self.counters.direct_requested += direct + if *is_load { 0 } else { absent };
    }
}

/// The outcome of one read, as the counters need it.
pub(crate) enum ReadResult {
    Hit { tier: cascade_tier::TierName, bytes: u64 },
    Miss,
    Failed,
}

impl ReadResult {
    pub(crate) fn from_view(view: &ViewOutcome) -> Self {
        match view {
            ViewOutcome::Hit { slab, tier } => Self::Hit { tier, bytes: slab.len() as u64 },
            ViewOutcome::Miss => Self::Miss,
            ViewOutcome::Failed(_) => Self::Failed,
        }
    }

    pub(crate) fn from_get(outcome: &GetOutcome) -> Self {
        match outcome {
            GetOutcome::Hit { bytes, tier } => Self::Hit { tier, bytes: *bytes as u64 },
            GetOutcome::Miss => Self::Miss,
            GetOutcome::TooShort { .. } | GetOutcome::Failed(_) => Self::Failed,
        }
    }
}
