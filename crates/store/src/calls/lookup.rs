//! Lookup of a chain: what is known of its blocks in short holds, then the request to the policy.

use std::time::Duration;

use cascade_block::BlockKey;
use cascade_tier::{CallOptions, PrefixMatch, Request};

use crate::calls::sources::match_in_sources;
use crate::core::catalog::KeyIndex;
use crate::core::eviction::{RequestedBlock, Visits};
use crate::core::state::StoreState;
use crate::insight::shadow::ChainLookup;
use crate::shared::StoreCore;
use crate::shared::call::CallContext;
use crate::shared::call_counts::CallCounts;
use crate::shared::hold::{KEYS_PER_HOLD, StateGuard};

/// A block of a chain that can be read, with its fastest tier.
pub(super) type MatchedBlock = (KeyIndex, usize);

/// What is known of a chain so far.
struct ChainMatch {
    /// Its blocks, for the policy.
    chain: Vec<RequestedBlock>,
    /// The blocks matched in the current hold.
    blocks: Vec<MatchedBlock>,
    /// How many blocks were matched in all holds.
    matched: usize,
    /// Leading blocks in DRAM.
    in_dram: usize,
    /// Whether all blocks so far were matched.
    is_unbroken: bool,
}

/// A chain to look up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lookup<'a> {
    pub(crate) core: &'a StoreCore,
    pub(crate) request: &'a Request<'a>,
}

impl<'a> Lookup<'a> {
    /// See [`crate::Store::lookup_prefix`].
    pub(crate) fn lookup_prefix(self, asks_sources: bool) -> PrefixMatch {
        let Self { core, request } = self;
        let mut tiers = Vec::with_capacity(request.keys.len());
        let mut call = None;
        let counts = self.match_chain(&mut call, |_, blocks| {
            tiers.extend(blocks.iter().map(|(_, tier)| core.tier_name(*tier)));
        });
        core.count_call(&counts);
        if asks_sources && !core.sources.is_empty() {
            let call = call.unwrap_or_else(|| core.call(CallOptions::default()));
            let later = match_in_sources(core, request.keys, tiers.len(), call);
            tiers.extend(later.into_iter().map(|tier| core.tier_name(tier)));
        }
        PrefixMatch { tiers }
    }

    /// Looks up a chain and reports the request to the eviction policy. `use_blocks` gets the
    /// matched blocks in the hold that has found them: after the report if that is in the same
    /// hold. Returns the counts of the lookup. Without a `call`, the deadline is that of the store,
    /// as in [`StoreCore::lock_in_time`].
    pub(super) fn match_chain(
        self,
        call: &mut Option<CallContext>,
        mut use_blocks: impl FnMut(&mut StoreState, &[MatchedBlock]),
    ) -> CallCounts {
        let Self { core, request } = self;
        let now_unix_ms = core.clock.unix_ms();
        let count = request.keys.len();
        let mut matched = ChainMatch {
            chain: Vec::with_capacity(count),
            blocks: Vec::with_capacity(count.min(KEYS_PER_HOLD)),
            matched: 0,
            in_dram: 0,
            is_unbroken: true,
        };
        let state = self.chain_in_holds((true, call), |state, keys, found| {
            state.history.set_time(now_unix_ms);
            matched.blocks.clear();
            match_blocks(state, keys, found, now_unix_ms, &mut matched);
            matched.matched += matched.blocks.len();
            if count > KEYS_PER_HOLD {
                use_blocks(state, &matched.blocks);
            }
        });
        let mut counts = CallCounts::default();
        counts.counters.requests = 1;
        counts.counters.blocks_requested = count as u64;
        counts.counters.blocks_matched = matched.matched as u64;
        let Some(mut state) = state else { return counts };
        let now = core.policy_now(&state);
        if state.memory.keeps_blocks {
            state = self.report_request(state, now, &mut matched.chain);
        }
        if count <= KEYS_PER_HOLD {
            use_blocks(&mut state, &matched.blocks);
        }
        let block_bytes = state.mean_block_bytes();
        // The lock of the insight is never taken under the lock of the state.
        core.unlock(state);
        core.insight.request(&ChainLookup {
            at: now,
            keys: request.keys,
            partial_tail: request.partial_tail,
            hints: &request.hints,
            in_dram: matched.in_dram,
            matched: matched.matched,
            block_bytes,
        });
        counts
    }

    /// Does the work of the eviction policy that is due before a request, in as many holds of the
    /// lock as needed. Returns the guard of a hold that has done nothing else, or `None` if the
    /// deadline passed before; the next request then goes on with the work.
    fn prepare_request(
        self,
        mut state: StateGuard<'a>,
        call: &mut Option<CallContext>,
    ) -> Option<StateGuard<'a>> {
        let core = self.core;
        loop {
            let now = core.policy_now(&state);
            let mut visits = Visits::default();
            let is_done = state.memory.eviction.prepare_request(now, &mut visits);
            if is_done && visits.total() == 0 {
                return Some(state);
            }
            state.charge(u32::try_from(visits.total()).unwrap_or(u32::MAX));
            core.unlock(state);
            state = core.lock_in_time(KEYS_PER_HOLD, call)?;
        }
    }

    /// Reports a request to the eviction policy, in as many holds of the lock as needed.
    fn report_request(
        self,
        mut state: StateGuard<'a>,
        now: Duration,
        chain: &mut [RequestedBlock],
    ) -> StateGuard<'a> {
        let mut report = state.memory.eviction.begin_request(now, chain, self.request.partial_tail);
        self.in_visits(state, chain.len(), |state, visits| {
            state.memory.eviction.continue_request(&mut report, chain, &self.request.hints, visits)
        })
    }

    /// Calls `visit` until it returns true, each time in a hold of the lock that has few enough
    /// visits: at once for a chain that one hold may handle. Without a deadline, because a report
    /// that has begun must end; it waits for no other than short holds.
    fn in_visits(
        self,
        mut state: StateGuard<'a>,
        blocks: usize,
        mut visit: impl FnMut(&mut StoreState, &mut Visits) -> bool,
    ) -> StateGuard<'a> {
        if blocks <= KEYS_PER_HOLD {
            // Its keys are charged already.
            let is_done = visit(&mut state, &mut Visits::unlimited());
            debug_assert!(is_done, "the visits suffice for every chain");
            return state;
        }
        loop {
            state = self.core.end_full_hold(state);
            let mut visits = Visits::limited(state.cost_left());
            let is_done = visit(&mut state, &mut visits);
            state.charge(u32::try_from(visits.total()).unwrap_or(u32::MAX));
            if is_done {
                return state;
            }
        }
    }

    /// See [`crate::Store::hint`].
    pub(crate) fn hint(self) {
        let Self { core, request } = self;
        let mut chain = Vec::with_capacity(request.keys.len());
        let state = self.chain_in_holds((false, &mut None), |state, keys, found| {
            let asked = |(key, found): (&BlockKey, &Option<KeyIndex>)| RequestedBlock {
                fingerprint: state.catalog.fingerprint(key),
                resident: found.and_then(|found| state.catalog.entry(found).slot()),
            };
            chain.extend(keys.iter().zip(found).map(asked));
        });
        // Without the time to look all of it up, the hint is dropped.
        let Some(mut state) = state else { return };
        let now = core.policy_now(&state);
        let mut hint = state.memory.eviction.begin_hint(now);
        let state = self.in_visits(state, chain.len(), |state, visits| {
            state.memory.eviction.continue_hint(&mut hint, &mut chain, &request.hints, visits)
        });
        core.unlock(state);
        core.insight.hint(now, request.keys, &request.hints);
    }

    /// Finds the keys of a chain in as many holds of the lock as needed, for a request that the
    /// policy counts or for hints. Returns the last one, or `None` if the deadline passed before.
    fn chain_in_holds(
        self,
        (is_counted, call): (bool, &mut Option<CallContext>),
        mut handle: impl FnMut(&mut StoreState, &[BlockKey], &[Option<KeyIndex>]),
    ) -> Option<StateGuard<'a>> {
        let Self { core, request } = self;
        let mut rest = request.keys;
        let mut found = Vec::with_capacity(rest.len().min(KEYS_PER_HOLD));
        loop {
            let (keys, later) = rest.split_at(rest.len().min(KEYS_PER_HOLD));
            let mut state = core.lock_in_time(keys.len(), call)?;
            state.policy_time = state.policy_time.max(request.at);
            if is_counted && state.memory.keeps_blocks && rest.len() == request.keys.len() {
                state = self.prepare_request(state, call)?;
            }
            state.charge_keys(keys);
            found.clear();
            state.catalog.find_batch(keys, &mut found);
            handle(&mut state, keys, &found);
            if later.is_empty() {
                return Some(state);
            }
            core.unlock(state);
            if call.is_some_and(|call| call.has_timed_out(&*core.clock)) {
                return None;
            }
            rest = later;
        }
    }
}

/// Matches some blocks of a chain, which follow those of `matched`.
fn match_blocks(
    state: &mut StoreState,
    keys: &[BlockKey],
    found: &[Option<KeyIndex>],
    now_unix_ms: u64,
    matched: &mut ChainMatch,
) {
    let ChainMatch { chain, blocks, matched: before, in_dram, is_unbroken } = matched;
    // Forgetting an expired block frees its index, which `found` may hold twice: from then on,
    // each key is looked up again.
    let mut has_forgotten = state.is_closed;
    for (key, found) in keys.iter().zip(found) {
        let mut found = *found;
        let expired = |found| state.catalog.entry(found).has_expired(now_unix_ms);
        if has_forgotten || found.is_some_and(expired) {
            found = if state.is_closed { None } else { state.find_live(key, now_unix_ms) };
            has_forgotten = true;
        }
        // The policy gets the whole chain, the match only the blocks before the first gap.
        let Some(found) = found else {
            *is_unbroken = false;
            let fingerprint = state.catalog.fingerprint(key);
            chain.push(RequestedBlock { fingerprint, resident: None });
            continue;
        };
        let entry = state.catalog.entry(found);
        let (content, resident) = (entry.content, entry.slot());
        chain.push(RequestedBlock { fingerprint: state.catalog.fingerprint(key), resident });
        *is_unbroken &= !state.is_unreadable(state.catalog.content(content));
        if *is_unbroken {
            if state.memory.keeps_blocks {
                state.expect_read(found);
            }
            state.catalog.entry_mut(found).note_matched();
            let content = state.catalog.content(content);
            *in_dram += usize::from(content.slab.is_some() && *in_dram == *before + blocks.len());
            let lower = content.fastest_stage_except(state.open_read_circuits);
            let lower = lower.map_or(0, |stage| 1 + stage);
            let tier = if content.slab.is_some() { 0 } else { lower };
            state.tier_matches[tier] += 1;
            blocks.push((found, tier));
        }
    }
}
