//! Lookups of chains, and views of blocks that need no wait because they are in DRAM or in no tier.
//! Both look up each key once; up to 256 keys take one hold of the lock.

use std::time::Duration;

use cascade_block::BlockKey;
use cascade_tier::{CallOptions, PrefixMatch, Request, StoreError, ViewOutcome};

use crate::Store;
use crate::calls::read::{ReadPurpose, resident};
use crate::core::catalog::KeyIndex;
use crate::core::eviction::RequestedBlock;
use crate::core::state::StoreState;
use crate::insight::shadow::ChainLookup;
use crate::shared::StoreCore;
use crate::shared::hold::{KEYS_PER_HOLD, StateGuard};

/// The match of a chain, while the lock is held under which it was found.
struct ChainMatch {
    at: Duration,
    /// The leading blocks that can be read, each with its fastest tier.
    blocks: Vec<(KeyIndex, usize)>,
    /// Leading blocks in DRAM.
    in_dram: usize,
    block_bytes: u32,
}

impl Store {
    /// Matches the leading blocks of a chain, and returns the fastest tier of each. The eviction
    /// policy learns of requests from this call: look up the whole chain first, then read the
    /// matched blocks and put the others.
    pub fn lookup_prefix(&self, request: &Request<'_>) -> PrefixMatch {
        let core = self.core();
        let (state, matched) = core.match_chain(request);
        core.unlock(state);
        core.report_chain(request, &matched);
        PrefixMatch {
            tiers: matched.blocks.iter().map(|(_, tier)| core.tier_name(*tier)).collect(),
        }
    }

    /// Looks up a chain and returns views of the matched blocks: one round trip instead of two
    /// where the store is in another process.
    pub fn acquire(&self, request: &Request<'_>, options: CallOptions) -> Vec<ViewOutcome> {
        self.acquire_with(request, |below| self.view(below, options))
    }

    /// As [`Store::acquire`], for a caller that needs permission to wait: `read_below` reads the
    /// matched blocks that are only in lower tiers. It is not called if there are none.
    pub fn acquire_with(
        &self,
        request: &Request<'_>,
        read_below: impl FnOnce(&[BlockKey]) -> Vec<ViewOutcome>,
    ) -> Vec<ViewOutcome> {
        let keys = request.keys;
        if keys.len() > KEYS_PER_HOLD {
            let matched = &keys[..self.lookup_prefix(request).tiers.len()];
            let mut views = self.view_resident(matched);
            if views.len() < matched.len() {
                views.extend(read_below(&matched[views.len()..]));
            }
            return views;
        }
        let (mut views, below) = self.core().acquire_resident(request);
        if !below.is_empty() {
            let below_keys: Vec<BlockKey> = below.iter().map(|at| keys[*at]).collect();
            for (at, view) in below.into_iter().zip(read_below(&below_keys)) {
                views[at] = view;
            }
        }
        views
    }

    /// As [`Store::view`], as far as it needs no wait: the views of the leading blocks, up to the
    /// first batch of 256 that has a block which is only in lower tiers.
    pub fn view_resident(&self, keys: &[BlockKey]) -> Vec<ViewOutcome> {
        self.core().view_resident(keys, ReadPurpose::Use)
    }

    /// As [`Store::peek`], as far as it needs no wait; see [`Store::view_resident`].
    pub fn peek_resident(&self, keys: &[BlockKey]) -> Vec<ViewOutcome> {
        self.core().view_resident(keys, ReadPurpose::Compare)
    }
}

impl StoreCore {
    /// Looks up a chain and reports the request to the eviction policy.
    fn match_chain(&self, request: &Request<'_>) -> (StateGuard<'_>, ChainMatch) {
        let now_unix_ms = self.clock.unix_ms();
        let mut found = Vec::with_capacity(request.keys.len());
        let mut chain = Vec::with_capacity(request.keys.len());
        let mut blocks = Vec::with_capacity(request.keys.len());
        let mut state = self.lock_for(request.keys.len());
        state.charge_keys(request.keys);
        state.history.set_time(now_unix_ms);
        state.policy_time = state.policy_time.max(request.at);
        let now = self.policy_now(&state);
        state.catalog.find_batch(request.keys, &mut found);
        let mut in_dram = 0;
        let mut is_unbroken = true;
        // Forgetting an expired block frees its index, which `found` may hold twice: from then on,
        // each key is looked up again.
        let mut has_forgotten = state.is_closed;
        for (key, mut found) in request.keys.iter().zip(found) {
            let expired = |found| state.catalog.entry(found).has_expired(now_unix_ms);
            if has_forgotten || found.is_some_and(expired) {
                found = if state.is_closed { None } else { state.find_live(key, now_unix_ms) };
                has_forgotten = true;
            }
            // The policy gets the whole chain, the match only the blocks before the first gap.
            let fingerprint = state.catalog.fingerprint(key);
            let Some(found) = found else {
                is_unbroken = false;
                chain.push(RequestedBlock { fingerprint, resident: None });
                continue;
            };
            let entry = state.catalog.entry(found);
            let (content, resident) = (entry.content, entry.slot());
            chain.push(RequestedBlock { fingerprint, resident });
            is_unbroken &= !state.is_unreadable(state.catalog.content(content));
            if is_unbroken {
                if state.has_dram {
                    state.expect_read(found);
                }
                state.catalog.entry_mut(found).note_matched();
                let content = state.catalog.content(content);
                in_dram += usize::from(content.slab.is_some() && in_dram == blocks.len());
                let lower = content.fastest_lower_except(state.open_read_circuits);
                let lower = lower.map_or(0, |(stage, _)| 1 + stage);
                let tier = if content.slab.is_some() { 0 } else { lower };
                state.tier_matches[tier] += 1;
                blocks.push((found, tier));
            }
        }
        if state.has_dram {
            state.eviction.request(now, &chain, request.partial_tail, &request.hints);
        }
        state.counters.requests += 1;
        state.counters.blocks_requested += request.keys.len() as u64;
        state.counters.blocks_matched += blocks.len() as u64;
        let block_bytes = state.mean_block_bytes();
        (state, ChainMatch { at: now, blocks, in_dram, block_bytes })
    }

    /// Counts a lookup in the traffic statistics. Their lock is never taken under the lock of the
    /// state.
    fn report_chain(&self, request: &Request<'_>, matched: &ChainMatch) {
        self.insight().request(&ChainLookup {
            at: matched.at,
            keys: request.keys,
            partial_tail: request.partial_tail,
            hints: &request.hints,
            in_dram: matched.in_dram,
            matched: matched.blocks.len(),
            block_bytes: matched.block_bytes,
        });
    }

    /// Looks up a chain that fits one hold of the lock. Returns a view of each matched block, and
    /// the places of those that are only in lower tiers; their views are still misses.
    fn acquire_resident(&self, request: &Request<'_>) -> (Vec<ViewOutcome>, Vec<usize>) {
        let mut views = Vec::with_capacity(request.keys.len());
        let mut below = Vec::new();
        let (mut state, matched) = self.match_chain(request);
        let stamp = state.history.stamp();
        for (at, (key, _)) in matched.blocks.iter().enumerate() {
            let slab = resident(&mut state, *key, matched.at, stamp, ReadPurpose::Use);
            if slab.is_none() {
                below.push(at);
            }
            views.push(self.view_in_memory(slab));
        }
        // The caller of `read_below` counts the others.
        self.count_views(&mut state, &views, below.len());
        self.unlock(state);
        self.report_chain(request, &matched);
        (views, below)
    }

    /// See [`Store::view_resident`].
    pub(crate) fn view_resident(
        &self,
        keys: &[BlockKey],
        purpose: ReadPurpose,
    ) -> Vec<ViewOutcome> {
        let now_unix_ms = self.clock.unix_ms();
        let mut views = Vec::with_capacity(keys.len());
        let mut found = Vec::with_capacity(keys.len().min(KEYS_PER_HOLD));
        for keys in keys.chunks(KEYS_PER_HOLD) {
            let mut state = self.lock_for(keys.len());
            state.charge_keys(keys);
            found.clear();
            state.catalog.find_batch(keys, &mut found);
            if !self.needs_no_wait(&state, &found, now_unix_ms) {
                break;
            }
            let first = views.len();
            self.view_batch(&mut state, (keys, &found), now_unix_ms, purpose, &mut views);
            if purpose == ReadPurpose::Use {
                self.count_views(&mut state, &views[first..], 0);
            }
            self.unlock(state);
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
        self.stages.is_empty()
            || state.is_closed
            || found.iter().flatten().all(|key| {
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
        if purpose == ReadPurpose::Use {
            state.count_direct_requests(found, now_unix_ms, self.memory_tier());
        }
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
    fn count_views(&self, state: &mut StoreState, views: &[ViewOutcome], below: usize) {
        let (mut hits, mut bytes, mut misses) = (0, 0, 0);
        for view in views {
            match view {
                ViewOutcome::Hit { slab, .. } => {
                    hits += 1;
                    bytes += slab.len() as u64;
                }
                ViewOutcome::Miss => misses += 1,
                ViewOutcome::Failed(_) => state.counters.get_failures += 1,
            }
        }
        state.counters.gets += (views.len() - below) as u64;
        state.counters.hits += hits;
        state.counters.bytes_read += bytes;
        state.counters.misses += misses - below as u64;
        let (blocks, sum) = &mut state.tier_hits[self.memory_tier()];
        *blocks += hits;
        *sum += bytes;
    }
}

#[cfg(test)]
mod tests;
