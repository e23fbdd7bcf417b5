//! Counts of the outcomes of calls.
//!
//! They have a lock of their own, which is held for a few additions, so that a call whose deadline
//! has passed counts its outcomes without the lock of the state.

use std::sync::PoisonError;

use cascade_tier::StoreCounters;

use crate::core::catalog::LOWER_STAGES_MAX;
use crate::core::state::StoreState;
use crate::shared::StoreCore;

/// Outcomes of calls that the state does not include yet.
#[derive(Debug, Default)]
pub(crate) struct CallCounts {
    /// Only those that `add` adds.
    pub(crate) counters: StoreCounters,
    /// Hits and bytes by tier, as in the state.
    pub(crate) tier_hits: [(u64, u64); 1 + LOWER_STAGES_MAX],
}

impl CallCounts {
    fn add_to(
        &self,
        counters: &mut StoreCounters,
        tier_hits: &mut [(u64, u64); 1 + LOWER_STAGES_MAX],
    ) {
        add(counters, &self.counters);
        for (sum, (blocks, bytes)) in tier_hits.iter_mut().zip(self.tier_hits) {
            sum.0 += blocks;
            sum.1 += bytes;
        }
    }
}

fn add(to: &mut StoreCounters, from: &StoreCounters) {
    to.requests += from.requests;
    to.blocks_requested += from.blocks_requested;
    to.blocks_matched += from.blocks_matched;
    to.gets += from.gets;
    to.hits += from.hits;
    to.bytes_read += from.bytes_read;
    to.misses += from.misses;
    to.get_failures += from.get_failures;
    to.puts += from.puts;
    to.stored += from.stored;
    to.deduplicated += from.deduplicated;
    to.present += from.present;
    to.conflicts += from.conflicts;
    to.declined += from.declined;
    to.put_failures += from.put_failures;
}

impl StoreCore {
    /// Counts outcomes of a call.
    pub(crate) fn count_call(&self, call: &CallCounts) {
        let mut counts = self.call_counts.lock().unwrap_or_else(PoisonError::into_inner);
        let CallCounts { counters, tier_hits } = &mut *counts;
        call.add_to(counters, tier_hits);
    }

    /// Adds the outcomes of calls so far to the counters of the state.
    pub(crate) fn add_call_counts(&self, state: &mut StoreState) {
        let mut counts = self.call_counts.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *counts).add_to(&mut state.counters, &mut state.tier_hits);
    }
}
