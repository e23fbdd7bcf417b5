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
    /// Hits and bytes by source; as long as the last source that has any.
    source_hits: Vec<(u64, u64)>,
    /// Requested blocks that were matched later than by the state: in tiers, and by source.
    tier_matches: [u64; 1 + LOWER_STAGES_MAX],
    source_matches: Vec<u64>,
}

impl CallCounts {
    /// Counts a hit of a tier, or of a source behind the tiers of `stages`.
    pub(crate) fn count_hit(&mut self, tier: usize, bytes: u64, stages: usize) {
        let sum = match tier.checked_sub(1 + stages) {
            Some(source) => at(&mut self.source_hits, source),
            None => &mut self.tier_hits[tier],
        };
        sum.0 += 1;
        sum.1 += bytes;
    }

    /// Counts a matched block, as `count_hit` a hit.
    pub(crate) fn count_match(&mut self, tier: usize, stages: usize) {
        *match tier.checked_sub(1 + stages) {
            Some(source) => at(&mut self.source_matches, source),
            None => &mut self.tier_matches[tier],
        } += 1;
    }

    fn add_to_call(&self, sum: &mut Self) {
        add(&mut sum.counters, &self.counters);
        add_pairs(&mut sum.tier_hits, &self.tier_hits);
        for (source, hits) in self.source_hits.iter().enumerate() {
            add_pairs(std::slice::from_mut(at(&mut sum.source_hits, source)), &[*hits]);
        }
        for (sum, matches) in sum.tier_matches.iter_mut().zip(self.tier_matches) {
            *sum += matches;
        }
        for (source, matches) in self.source_matches.iter().enumerate() {
            *at(&mut sum.source_matches, source) += matches;
        }
    }

    fn add_to_state(&self, state: &mut StoreState) {
        add(&mut state.counters, &self.counters);
        add_pairs(&mut state.tier_hits, &self.tier_hits);
        for (source, hits) in self.source_hits.iter().enumerate() {
            add_pairs(std::slice::from_mut(at(&mut state.source_hits, source)), &[*hits]);
        }
        for (sum, matches) in state.tier_matches.iter_mut().zip(self.tier_matches) {
            *sum += matches;
        }
        for (source, matches) in self.source_matches.iter().enumerate() {
            *at(&mut state.source_matches, source) += matches;
        }
    }
}

fn add_pairs(sums: &mut [(u64, u64)], counts: &[(u64, u64)]) {
    for (sum, (blocks, bytes)) in sums.iter_mut().zip(counts) {
        sum.0 += blocks;
        sum.1 += bytes;
    }
}

/// The count of a source. A store without sources never grows these lists.
pub(crate) fn at<T: Default + Clone>(counts: &mut Vec<T>, source: usize) -> &mut T {
    if source >= counts.len() {
        counts.resize(source + 1, T::default());
    }
    &mut counts[source]
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
        call.add_to_call(&mut counts);
    }

    /// Adds the outcomes of calls so far to the counters of the state.
    pub(crate) fn add_call_counts(&self, state: &mut StoreState) {
        let mut counts = self.call_counts.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *counts).add_to_state(state);
    }
}
