//! Counters of get and view: blocks requested, hits and misses.

use cascade_tier::{GetOutcome, ViewOutcome};

use crate::core::catalog::KeyIndex;
use crate::core::state::StoreState;
use crate::shared::StoreCore;
use crate::shared::call_counts::CallCounts;

pub(crate) fn count_gets(core: &StoreCore, gets: usize, results: impl Iterator<Item = ReadResult>) {
    let mut counts = CallCounts::default();
    counts.counters.gets = gets as u64;
    for result in results {
        match result {
            ReadResult::Hit { tier, bytes } => {
                let tier = (core.memory_tier()..core.tier_names().len())
                    .find(|at| core.tier_name(*at) == tier)
                    .expect("hits come from tiers of this pipeline, or from its sources");
                counts.counters.hits += 1;
                counts.counters.bytes_read += bytes;
                counts.count_hit(tier, bytes, core.stages.len());
            }
            ReadResult::Miss => counts.counters.misses += 1,
            ReadResult::Failed => counts.counters.get_failures += 1,
        }
    }
    core.count_call(&counts);
}

/// Counts the blocks of a read that no lookup has counted as requested.
///
/// - A block that a lookup matched was counted by the lookup: this read is its load.
/// - Another block in the store counts as requested and matched.
/// - A block that is not in the store counts as requested, unless the batch has a block that a
///   lookup matched: then the whole batch is the load of a lookup, which has counted it.
///   `is_load` says so for later pieces of the same batch.
pub(crate) fn count_direct_requests(
    state: &mut StoreState,
    found: &[Option<KeyIndex>],
    now_unix_ms: u64,
    memory_tier: usize,
    is_load: &mut bool,
) {
    let (mut direct, mut absent) = (0, 0);
    for found in found {
        let entry = found.map(|key| state.catalog.entry(key));
        let Some(entry) = entry.filter(|entry| !entry.has_expired(now_unix_ms)) else {
            absent += 1;
            continue;
        };
        if entry.was_matched() {
            *is_load = true;
            continue;
        }
        let content = state.catalog.content(entry.content);
        let lower = content.fastest_stage_except(state.open_read_circuits);
        let lower = lower.map(|stage| 1 + stage);
        match if content.slab.is_some() { Some(memory_tier) } else { lower } {
            Some(tier) => {
                direct += 1;
                state.tier_matches[tier] += 1;
            }
            None => absent += 1,
        }
    }
    state.counters.direct_matched += direct;
    state.counters.direct_requested += direct + if *is_load { 0 } else { absent };
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
