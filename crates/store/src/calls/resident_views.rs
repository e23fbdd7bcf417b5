//! Views of blocks that need no wait for a tier because they are in DRAM or in no tier, and of the
//! matched blocks of a chain. Both look up each key once, 256 keys in a hold of the lock.

use cascade_block::BlockKey;
use cascade_memory::Slab;
use cascade_tier::{Request, StoreError, ViewOutcome};

use crate::calls::lookup::Lookup;
use crate::calls::read_counters::count_direct_requests;
use crate::calls::read_flow::{ReadPurpose, resident};
use crate::calls::sources::match_in_sources;
use crate::core::catalog::KeyIndex;
use crate::core::state::StoreState;
use crate::shared::StoreCore;
use crate::shared::call::CallContext;
use crate::shared::call_counts::CallCounts;
use crate::shared::hold::KEYS_PER_HOLD;

/// The views of a call that fails.
pub(crate) fn failed_views(keys: &[BlockKey], error: &StoreError) -> Vec<ViewOutcome> {
    keys.iter().map(|_| ViewOutcome::Failed(error.clone())).collect()
}

/// Views of blocks that need no wait for a tier.
#[derive(Debug, Clone, Copy)]
pub(super) struct ResidentViews<'a>(pub(super) &'a StoreCore);

impl ResidentViews<'_> {
    /// Looks up a chain. Returns a view of each matched block, and the places of those that are
    /// only in lower tiers; their views are still misses.
    pub(super) fn acquire(
        self,
        request: &Request<'_>,
        call: CallContext,
        asks_sources: bool,
    ) -> (Vec<ViewOutcome>, Vec<usize>) {
        let core = self.0;
        let mut views = Vec::with_capacity(request.keys.len());
        let mut below = Vec::new();
        let mut counts = Lookup { core, request }.match_chain(&mut Some(call), |state, blocks| {
            let now = core.policy_now(state);
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
        core.count_call(&counts);
        let later = if asks_sources {
            match_in_sources(core, request.keys, views.len(), call)
        } else {
            Vec::new()
        };
        for _ in later {
            below.push(views.len());
            views.push(ViewOutcome::Miss);
        }
        (views, below)
    }

    /// See [`crate::Store::view_resident`].
    pub(super) fn view(
        self,
        keys: &[BlockKey],
        purpose: ReadPurpose,
        call: CallContext,
    ) -> Vec<ViewOutcome> {
        let core = self.0;
        let now_unix_ms = core.clock.unix_ms();
        let mut views = Vec::with_capacity(keys.len());
        let mut found = Vec::with_capacity(keys.len().min(KEYS_PER_HOLD));
        let mut is_load = false;
        for keys in keys.chunks(KEYS_PER_HOLD) {
            if !views.is_empty() && call.has_timed_out(&*core.clock) {
                break;
            }
            let Some(mut state) = core.lock_within(keys.len(), call) else { break };
            state.charge_keys(keys);
            found.clear();
            state.catalog.find_batch(keys, &mut found);
            if !needs_no_wait(core, &state, &found, now_unix_ms) {
                break;
            }
            if purpose == ReadPurpose::Use && !state.is_closed {
                let tier = core.memory_tier();
                count_direct_requests(&mut state, &found, now_unix_ms, tier, &mut is_load);
            }
            self.view_batch(&mut state, (keys, &found), now_unix_ms, purpose, &mut views);
            core.unlock(state);
        }
        if purpose == ReadPurpose::Use && !views.is_empty() {
            let mut counts = CallCounts::default();
            self.add_views(&mut counts, &views, 0);
            core.count_call(&counts);
        }
        views
    }

    /// See [`crate::OwnBlocks::in_memory`].
    pub(super) fn in_memory(self, keys: &[BlockKey], call: CallContext) -> Vec<Option<Slab>> {
        let core = self.0;
        let now_unix_ms = core.clock.unix_ms();
        let mut views = Vec::with_capacity(keys.len());
        let mut found = Vec::with_capacity(keys.len().min(KEYS_PER_HOLD));
        for keys in keys.chunks(KEYS_PER_HOLD) {
            let Some(mut state) = core.lock_within(keys.len(), call) else { break };
            state.charge_keys(keys);
            found.clear();
            state.catalog.find_batch(keys, &mut found);
            let purpose = ReadPurpose::Compare;
            self.view_batch(&mut state, (keys, &found), now_unix_ms, purpose, &mut views);
            core.unlock(state);
        }
        let in_memory = |view| match view {
            ViewOutcome::Hit { slab, .. } => Some(slab),
            ViewOutcome::Miss | ViewOutcome::Failed(_) => None,
        };
        let mut views: Vec<Option<Slab>> = views.into_iter().map(in_memory).collect();
        views.resize(keys.len(), None);
        views
    }

    /// Views of blocks for which [`needs_no_wait`] holds, or of those of them that are in memory.
    fn view_batch(
        self,
        state: &mut StoreState,
        (keys, found): (&[BlockKey], &[Option<KeyIndex>]),
        now_unix_ms: u64,
        purpose: ReadPurpose,
        views: &mut Vec<ViewOutcome>,
    ) {
        let core = self.0;
        if state.is_closed {
            views.extend(keys.iter().map(|_| ViewOutcome::Failed(StoreError::Closed)));
            return;
        }
        let now = core.policy_now(state);
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

    fn view_in_memory(self, slab: Option<Slab>) -> ViewOutcome {
        let core = self.0;
        let tier = core.tier_name(core.memory_tier());
        slab.map_or(ViewOutcome::Miss, |slab| ViewOutcome::Hit { slab, tier })
    }

    /// Counts views of blocks in memory. `below` of the misses are read and counted by the caller.
    fn add_views(self, counts: &mut CallCounts, views: &[ViewOutcome], below: usize) {
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
        let (blocks, sum) = &mut counts.tier_hits[self.0.memory_tier()];
        *blocks += hits;
        *sum += bytes;
    }
}

/// Whether each of these blocks is in memory, or cannot be read from any tier.
pub(super) fn needs_no_wait(
    core: &StoreCore,
    state: &StoreState,
    found: &[Option<KeyIndex>],
    now_unix_ms: u64,
) -> bool {
    // A source may have a block that is not in the catalog.
    let is_known = core.sources.is_empty() || found.iter().all(Option::is_some);
    (core.stages.is_empty() && core.sources.is_empty())
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
