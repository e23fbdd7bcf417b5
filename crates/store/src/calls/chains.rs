//! Views of the matched blocks of a chain, and of blocks that need no wait for a tier because they
//! are in DRAM or in no tier. Both look up each key once, 256 keys in a hold of the lock.

use cascade_block::BlockKey;
use cascade_tier::{CallOptions, PrefixMatch, Request, StoreError, ViewOutcome};

use crate::Store;
use crate::calls::read::resident;
use crate::calls::read_flow::ReadPurpose;
use crate::core::catalog::KeyIndex;
use crate::core::state::StoreState;
use crate::shared::StoreCore;
use crate::shared::call::CallContext;
use crate::shared::call_counts::CallCounts;
use crate::shared::hold::KEYS_PER_HOLD;

impl Store {
    /// Matches the leading blocks of a chain, and returns the fastest tier of each. The eviction
    /// policy learns of requests from this call: look up the whole chain first, then read the
    /// matched blocks and put the others. Matches only the blocks that it could look up within the
    /// timeout of the store.
    pub fn lookup_prefix(&self, request: &Request<'_>) -> PrefixMatch {
        self.core().lookup_prefix(request)
    }

    /// Looks up a chain and returns views of the matched blocks: one round trip instead of two
    /// where the store is in another process. Matches as [`Store::lookup_prefix`].
    pub fn acquire(&self, request: &Request<'_>, options: CallOptions) -> Vec<ViewOutcome> {
        let core = self.core();
        self.acquire_with(request, |below| core.view_from_tiers(below, core.call(options)))
    }

    /// As [`Store::acquire`], for a caller that needs permission to wait: `read_below` reads the
    /// matched blocks that are only in lower tiers. It is not called if there are none.
    pub fn acquire_with(
        &self,
        request: &Request<'_>,
        read_below: impl FnOnce(&[BlockKey]) -> Vec<ViewOutcome>,
    ) -> Vec<ViewOutcome> {
        let (mut views, below) = self.core().acquire_resident(request);
        if !below.is_empty() {
            let below_keys: Vec<BlockKey> = below.iter().map(|at| request.keys[*at]).collect();
            for (at, view) in below.into_iter().zip(read_below(&below_keys)) {
                views[at] = view;
            }
        }
        views
    }

    /// As [`Store::view`], as far as it needs no wait for a tier: the views of the leading blocks,
    /// up to the first batch of 256 that has a block which is only in lower tiers, or that the call
    /// did not reach within its timeout.
    pub fn view_resident(&self, keys: &[BlockKey], options: CallOptions) -> Vec<ViewOutcome> {
        let core = self.core();
        core.view_resident(keys, ReadPurpose::Use, core.call(options))
    }

    /// As [`Store::peek`], as far as it needs no wait for a tier; see [`Store::view_resident`].
    pub fn peek_resident(&self, keys: &[BlockKey], options: CallOptions) -> Vec<ViewOutcome> {
        let core = self.core();
        core.view_resident(keys, ReadPurpose::Compare, core.call(options))
    }
}

impl StoreCore {
    /// Looks up a chain. Returns a view of each matched block, and the places of those that are
    /// only in lower tiers; their views are still misses.
    fn acquire_resident(&self, request: &Request<'_>) -> (Vec<ViewOutcome>, Vec<usize>) {
        let mut views = Vec::with_capacity(request.keys.len());
        let mut below = Vec::new();
        let mut counts = self.match_chain(request, |state, blocks| {
            let now = self.policy_now(state);
            let stamp = state.history.stamp();
            for (key, _) in blocks {
                let slab = resident(state, *key, now, stamp, ReadPurpose::Use);
                if slab.is_none() {
                    below.push(views.len());
                }
                views.push(self.view_in_memory(slab));
            }
        });
        // The caller of `read_below` counts the others.
        self.add_views(&mut counts, &views, below.len());
        self.count_call(&counts);
        for _ in self.match_in_sources(request.keys, views.len()) {
            below.push(views.len());
            views.push(ViewOutcome::Miss);
        }
        (views, below)
    }

    /// See [`Store::view_resident`].
    pub(crate) fn view_resident(
        &self,
        keys: &[BlockKey],
        purpose: ReadPurpose,
        call: CallContext,
    ) -> Vec<ViewOutcome> {
        let now_unix_ms = self.clock.unix_ms();
        let mut views = Vec::with_capacity(keys.len());
        let mut found = Vec::with_capacity(keys.len().min(KEYS_PER_HOLD));
        let mut is_load = false;
        for keys in keys.chunks(KEYS_PER_HOLD) {
            if !views.is_empty() && call.has_timed_out(&*self.clock) {
                break;
            }
            let Some(mut state) = self.lock_within(keys.len(), call) else { break };
            state.charge_keys(keys);
            found.clear();
            state.catalog.find_batch(keys, &mut found);
            if !self.needs_no_wait(&state, &found, now_unix_ms) {
                break;
            }
            if purpose == ReadPurpose::Use && !state.is_closed {
                let tier = self.memory_tier();
                state.count_direct_requests(&found, now_unix_ms, tier, &mut is_load);
            }
            self.view_batch(&mut state, (keys, &found), now_unix_ms, purpose, &mut views);
            self.unlock(state);
        }
        if purpose == ReadPurpose::Use && !views.is_empty() {
            let mut counts = CallCounts::default();
            self.add_views(&mut counts, &views, 0);
            self.count_call(&counts);
        }
        views
    }

    /// Whether each of these blocks is in memory, or cannot be read from any tier.
    pub(super) fn needs_no_wait(
        &self,
        state: &StoreState,
        found: &[Option<KeyIndex>],
        now_unix_ms: u64,
    ) -> bool {
        // A source may have a block that is not in the catalog.
        let is_known = self.sources.is_empty() || found.iter().all(Option::is_some);
        (self.stages.is_empty() && self.sources.is_empty())
            || state.is_closed
            || is_known
                && found.iter().flatten().all(|key| {
                    let entry = state.catalog.entry(*key);
                    let content = state.catalog.content(entry.content);
                    // An expired or unreadable block is a miss.
                    content.slab.is_some()
                        || entry.has_expired(now_unix_ms)
                        || state.is_unreadable(content)
                })
    }

    /// Views of blocks for which [`Self::needs_no_wait`] holds.
    fn view_batch(
        &self,
        state: &mut StoreState,
        (keys, found): (&[BlockKey], &[Option<KeyIndex>]),
        now_unix_ms: u64,
        purpose: ReadPurpose,
        views: &mut Vec<ViewOutcome>,
    ) {
        if state.is_closed {
            views.extend(keys.iter().map(|_| ViewOutcome::Failed(StoreError::Closed)));
            return;
        }
        let now = self.policy_now(state);
        state.history.set_time(now_unix_ms);
        let stamp = state.history.stamp();
        let mut has_forgotten = false;
        for (key, found) in keys.iter().zip(found) {
            let mut found = *found;
            // As in a lookup: an expired block is forgotten, which frees its index.
            let expired = |found| state.catalog.entry(found).has_expired(now_unix_ms);
            if has_forgotten || found.is_some_and(expired) {
                found = state.find_live(key, now_unix_ms);
                has_forgotten = true;
            }
            let slab = found.and_then(|key| resident(state, key, now, stamp, purpose));
            if found.is_some() && slab.is_none() && purpose == ReadPurpose::Use {
                state.counters.shed_gets += 1;
            }
            views.push(self.view_in_memory(slab));
        }
    }

    fn view_in_memory(&self, slab: Option<cascade_memory::Slab>) -> ViewOutcome {
        let tier = self.tier_name(self.memory_tier());
        slab.map_or(ViewOutcome::Miss, |slab| ViewOutcome::Hit { slab, tier })
    }

    /// Counts views of blocks in memory. `below` of the misses are read and counted by the caller.
    fn add_views(&self, counts: &mut CallCounts, views: &[ViewOutcome], below: usize) {
        let (mut hits, mut bytes, mut misses, mut failures) = (0, 0, 0, 0);
        for view in views {
            match view {
                ViewOutcome::Hit { slab, .. } => {
                    hits += 1;
                    bytes += slab.len() as u64;
                }
                ViewOutcome::Miss => misses += 1,
                ViewOutcome::Failed(_) => failures += 1,
            }
        }
        let counters = &mut counts.counters;
        counters.gets += (views.len() - below) as u64;
        counters.hits += hits;
        counters.bytes_read += bytes;
        counters.misses += misses - below as u64;
        counters.get_failures += failures;
        let (blocks, sum) = &mut counts.tier_hits[self.memory_tier()];
        *blocks += hits;
        *sum += bytes;
    }
}

#[cfg(test)]
mod tests;
