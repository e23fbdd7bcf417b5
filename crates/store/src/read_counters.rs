//! Counters of get and view.

use crate::store_core::StoreCore;
use crate::{GetOutcome, ViewOutcome};

impl StoreCore {
    pub(crate) fn count_gets(&self, gets: usize, results: impl Iterator<Item = ReadResult>) {
        let mut state = self.lock();
        state.counters.gets += gets as u64;
        for result in results {
            match result {
                ReadResult::Hit { tier, bytes } => {
                    let tier = (self.memory_tier()..=self.stages.len())
                        .find(|at| self.tier_name(*at) == tier)
                        .expect("hits come from tiers of this pipeline");
                    state.counters.hits += 1;
                    state.counters.bytes_read += bytes;
                    state.tier_hits[tier].0 += 1;
                    state.tier_hits[tier].1 += bytes;
                }
                ReadResult::Miss => state.counters.misses += 1,
                ReadResult::Failed => state.counters.get_failures += 1,
            }
        }
    }
}

/// The outcome of one read, as the counters need it.
pub(crate) enum ReadResult {
    Hit { tier: crate::TierName, bytes: u64 },
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
