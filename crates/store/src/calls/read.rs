//! Get and view: hits in DRAM at once, hits below DRAM with one read for all waiting callers.

use cascade_block::BlockKey;
use cascade_memory::Slab;
use cascade_tier::tier::{LoadOutcome, TierError};
use cascade_tier::{CallOptions, GetOutcome, StoreError, ViewOutcome};

use crate::calls::fetch_source::FetchSource;
use crate::calls::read_counters::ReadResult;
use crate::calls::read_flow::{Fetch, PendingRead, ReadFlow, ReadPurpose};
use crate::core::catalog::{ExpectedAccess, KeyIndex};
use crate::core::history::Loss;
use crate::core::state::StoreState;
use crate::shared::call::CallContext;
use crate::shared::hold::{KEYS_PER_HOLD, StateGuard};
use crate::shared::{AllocationFailure, StoreCore};

/// The blocks of a step take at most DRAM divided by this.
const STEP_SHARE: usize = 8;
/// Maximum bytes of a step; the deadline is checked between steps.
const STEP_BYTES: usize = 256 << 20;
/// Prefetched blocks are protected from eviction until their first use, within DRAM divided by
/// this.
const PREFETCHED_SHARE: u64 = 4;
/// Attempts to read a block that was moved or damaged before it counts as a miss.
const TRIES_MAX: u32 = 4;

impl StoreCore {
    pub(crate) fn view(&self, keys: &[BlockKey], options: CallOptions) -> Vec<ViewOutcome> {
        let call = self.call(options);
        let mut views = self.view_resident(keys, ReadPurpose::Use, call);
        let rest = &keys[views.len()..];
        if rest.is_empty() {
            return views;
        }
        if !views.is_empty() && call.has_timed_out(&*self.clock) {
            let late = || ViewOutcome::Failed(call.timeout_error("read all blocks of a batch"));
            let late: Vec<ViewOutcome> = rest.iter().map(|_| late()).collect();
            self.count_gets(rest.len(), late.iter().map(ReadResult::from_view));
            views.extend(late);
        } else {
            views.extend(self.view_from_tiers(rest, call));
        }
        views
    }

    /// Views of blocks, also from lower tiers.
    pub(super) fn view_from_tiers(&self, keys: &[BlockKey], call: CallContext) -> Vec<ViewOutcome> {
        let outcomes = self.read(keys, call, ReadPurpose::Use);
        self.count_gets(keys.len(), outcomes.iter().map(ReadResult::from_view));
        outcomes
    }

    pub(crate) fn read_to_compare(&self, keys: &[BlockKey], call: CallContext) -> Vec<ViewOutcome> {
        self.read(keys, call, ReadPurpose::Compare)
    }

    /// Whether each block has these bytes. `None` if the store does not have the block. Does not
    /// count as an access, and promotes nothing.
    pub(crate) fn compare(
        &self,
        blocks: &[(BlockKey, &[u8])],
        call: CallContext,
    ) -> Vec<Result<Option<bool>, StoreError>> {
        let mut results = Vec::with_capacity(blocks.len());
        while results.len() < blocks.len() {
            let rest = &blocks[results.len()..];
            if call.has_timed_out(&*self.clock) {
                let late = || Err(call.timeout_error("compare all blocks of a batch"));
                results.extend(rest.iter().map(|_| late()));
                break;
            }
            let keys: Vec<BlockKey> =
                rest.iter().take(KEYS_PER_HOLD).map(|(key, _)| *key).collect();
            let step = &keys[..self.step_keys(&keys, call)];
            for (view, (_, bytes)) in
                self.read(step, call, ReadPurpose::Compare).into_iter().zip(rest)
            {
                results.push(match view {
                    ViewOutcome::Hit { slab, .. } => Ok(Some(*slab == **bytes)),
                    ViewOutcome::Miss => Ok(None),
                    ViewOutcome::Failed(error) => Err(error),
                });
            }
        }
        results
    }

    pub(crate) fn get(
        &self,
        keys: &[BlockKey],
        buffers: &mut [&mut [u8]],
        options: CallOptions,
    ) -> Vec<GetOutcome> {
        assert_eq!(keys.len(), buffers.len(), "one buffer for each key");
        let call = self.call(options);
        let outcomes = self.read_into(keys, buffers, call);
        self.count_gets(keys.len(), outcomes.iter().map(ReadResult::from_get));
        outcomes
    }

    /// The number of leading keys to read in one step, so that their blocks take at most a fixed
    /// share of DRAM; at least one, also if the deadline passes before it is known.
    pub(crate) fn step_keys(&self, keys: &[BlockKey], call: CallContext) -> usize {
        let keys = &keys[..keys.len().min(KEYS_PER_HOLD)];
        let most = (self.pool.region().bytes() / STEP_SHARE).min(STEP_BYTES);
        let mut found = Vec::with_capacity(keys.len());
        let Some(mut state) = self.lock_within(keys.len(), call) else { return 1 };
        state.charge_keys(keys);
        state.catalog.find_batch(keys, &mut found);
        let length = |found: &Option<KeyIndex>| {
            let content = found.map(|key| state.catalog.content(state.catalog.entry(key).content));
            content.map(|content| content.bytes as usize)
        };
        let lengths: Vec<Option<usize>> = found.iter().map(length).collect();
        self.unlock(state);
        let mut bytes = 0;
        let mut fits = |(key, length): &(&BlockKey, Option<usize>)| {
            bytes += length.or_else(|| self.located_bytes(key)).unwrap_or(0);
            bytes <= most
        };
        keys.iter().zip(lengths).take_while(|block| fits(block)).count().max(1)
    }

    /// Decides the pending blocks: hit in DRAM, miss, fetch by this call, or wait for the fetch of
    /// another call. Those for which the call has no room yet are queued again, and all behind the
    /// first of these.
    pub(super) fn plan<'a>(
        &'a self,
        mut state: StateGuard<'a>,
        mut pending: Vec<PendingRead>,
        may_wait: bool,
        flow: &mut ReadFlow<'_, '_>,
    ) -> StateGuard<'a> {
        let now = self.policy_now(&state);
        let now_unix_ms = self.clock.unix_ms();
        state.history.set_time(now_unix_ms);
        let stamp = state.history.stamp();
        let keys: Vec<BlockKey> = pending.iter().map(|pending| pending.key).collect();
        let mut found = Vec::with_capacity(keys.len());
        state.charge_keys(&keys);
        state.catalog.find_batch(&keys, &mut found);
        self.count_first_lookups(&mut state, &mut pending, &found, now_unix_ms, flow);
        let tier = self.tier_name(self.memory_tier());
        let mut may_have_changed = state.is_closed;
        let mut rest = pending.into_iter().zip(found);
        // No more loads, but blocks in DRAM may follow, to be copied while these are under way.
        let mut later = Vec::new();
        for (pending, mut found) in rest.by_ref() {
            if state.is_closed {
                flow.settle(&pending, ViewOutcome::Failed(StoreError::Closed));
                continue;
            }
            // An allocation for an earlier block of this batch may have evicted this one, or
            // released the lock: look it up again.
            let has_expired = |key| state.catalog.entry(key).has_expired(now_unix_ms);
            if may_have_changed || found.is_some_and(has_expired) {
                found = state.find_live(&pending.key, now_unix_ms);
                may_have_changed = true;
            }
            let Some(key) = found else {
                self.plan_absent(&mut state, pending, flow);
                continue;
            };
            let content = state.catalog.content(state.catalog.entry(key).content);
            if content.slab.is_some() && flow.defer(&pending, content.bytes as usize) {
                continue;
            }
            if let Some(slab) = resident(&mut state, key, now, stamp, flow.purpose) {
                flow.settle_resident(&pending, slab, tier);
                continue;
            }
            if flow.is_blocked() {
                flow.stop_at(pending);
                break;
            }
            if flow.is_full() {
                later.push(pending);
                continue;
            }
            may_have_changed = true;
            let (again, settled) = self.plan_fetch(state, pending, key, may_wait, flow);
            state = again;
            if let Some(outcome) = settled {
                flow.settle(&pending, outcome);
            }
            if flow.is_blocked() {
                break;
            }
        }
        // In their order, and behind the block for which there was no room.
        later.extend(flow.take_stopped());
        later.extend(rest.map(|(pending, _)| pending));
        flow.queue_again(later);
        state
    }

    /// Counts the blocks that no lookup of this call has counted as requested.
    fn count_first_lookups(
        &self,
        state: &mut StoreState,
        pending: &mut [PendingRead],
        found: &[Option<KeyIndex>],
        now_unix_ms: u64,
        flow: &mut ReadFlow<'_, '_>,
    ) {
        let counted = pending.iter().take_while(|pending| pending.is_counted).count();
        if !state.is_closed && counted < pending.len() {
            let (tier, is_load) = (self.memory_tier(), &mut flow.is_load);
            state.count_direct_requests(&found[counted..], now_unix_ms, tier, is_load);
        }
        for pending in pending {
            pending.is_counted = true;
        }
    }

    /// Plans the read of a block from the fastest usable stage: marks the content as loading and
    /// allocates a slab. Returns an outcome instead if no stage is usable or no slab is available.
    fn plan_fetch<'a>(
        &'a self,
        mut state: StateGuard<'a>,
        pending: PendingRead,
        key: KeyIndex,
        may_wait: bool,
        flow: &mut ReadFlow<'_, '_>,
    ) -> (StateGuard<'a>, Option<ViewOutcome>) {
        let (index, open_circuits) = (state.catalog.entry(key).content, state.open_read_circuits);
        let content = state.catalog.content(index);
        if content.is_loading {
            flow.waiting.push(pending);
            return (state, None);
        }
        let fastest = state.catalog.fastest_lower_except(index, pending.avoid | open_circuits);
        let Some((stage, address)) = fastest else {
            let is_unreadable =
                pending.circuit_opened || content.fastest_stage_except(pending.avoid).is_some();
            // If a stage that has the block failed, the outcome is that failure, not a miss.
            let failure = flow.outcomes[pending.index].take();
            if failure.is_none() && is_unreadable && flow.purpose == ReadPurpose::Use {
                state.counters.shed_gets += 1;
            }
            return (state, Some(failure.unwrap_or(ViewOutcome::Miss)));
        };
        // Set before the allocation, which can release the lock: other callers then wait for this
        // fetch and do not start their own.
        let content = state.catalog.content_mut(index);
        content.is_loading = true;
        let (bytes, generation) = (content.bytes as usize, content.generation);
        let holds_some = flow.holds_some() || !may_wait;
        let (again, slab) = self.allocate_slab(state, bytes, holds_some, None, flow.call);
        state = again;
        match slab {
            Ok(mut slab) => {
                let place = (index, generation);
                let from = FetchSource::new(&state, place, (stage, address), pending.key);
                // After a kill of this process, the kernel may still write into the slab.
                self.note_load(&mut slab);
                flow.plan(Fetch { pending, from, slab });
                (state, None)
            }
            Err(failure) => {
                if let Some(content) = state.catalog.live_content((index, generation)) {
                    // Other callers wait for this mark, and only this call can clear it.
                    content.is_loading = false;
                }
                // The slabs of this call may be the reason: look again after their fetches.
                if holds_some && failure != AllocationFailure::TooLarge {
                    flow.postpone(pending);
                    return (state, None);
                }
                if failure == AllocationFailure::Erasing {
                    return (state, Some(ViewOutcome::Miss));
                }
                let error = self.allocation_error(&state, failure, bytes, flow.call);
                (state, Some(ViewOutcome::Failed(error)))
            }
        }
    }

    /// Applies the result of a stage. Returns false if the block has to be looked up again.
    pub(super) fn settle(
        &self,
        state: &mut StoreState,
        pending: &mut PendingRead,
        from: FetchSource,
        loaded: LoadOutcome,
        flow: &mut ReadFlow<'_, '_>,
    ) -> bool {
        if let Some(content) = state.catalog.live_content(from.place()) {
            content.is_loading = false;
        }
        let tier = self.tier_name(1 + from.stage);
        match loaded {
            // Read as another key of its content, which may be a key of other bytes by now.
            LoadOutcome::Hit(_) if from.key != pending.key && !from.has_same_key(state) => {}
            LoadOutcome::Hit(slab) => {
                let slab = slab.seal();
                self.promote(state, pending, from, &slab, flow.purpose);
                flow.settle_loaded(pending, slab, tier);
                return true;
            }
            // No second attempt after a time-out: the next stage is slower still.
            LoadOutcome::Failed(TierError::Timeout) => {
                let late = flow.call.timeout_error("read from a tier");
                flow.settle(pending, ViewOutcome::Failed(late));
                return true;
            }
            LoadOutcome::Failed(TierError::CircuitOpen) => {
                pending.avoid |= 1 << from.stage;
                pending.circuit_opened = true;
            }
            // The failure becomes the outcome only if no slower stage has the block.
            LoadOutcome::Failed(error) => {
                pending.avoid |= 1 << from.stage;
                let (operation, source) = ("read a block", std::sync::Arc::new(error));
                let failure = StoreError::Tier { tier, operation, source };
                flow.settle(pending, ViewOutcome::Failed(failure));
            }
            LoadOutcome::Gone if self.stages[from.stage].keeps_names_only() => {
                pending.avoid |= 1 << from.stage;
            }
            LoadOutcome::Gone => {
                let can_be_read = from.settle_gone(state, &pending.key);
                pending.avoid |= u8::from(!can_be_read) << from.stage;
            }
            LoadOutcome::Damaged => {
                state.counters.damaged_blocks += 1;
                from.forget_address(state, Loss::Damaged);
            }
        }
        pending.tries += 1;
        if pending.tries >= TRIES_MAX {
            let failure = flow.outcomes[pending.index].take();
            flow.settle(pending, failure.unwrap_or(ViewOutcome::Miss));
        }
        pending.tries >= TRIES_MAX
    }

    /// Keeps a block from a lower stage in DRAM, if the policy promotes hits and the block was not
    /// deleted meanwhile.
    fn promote(
        &self,
        state: &mut StoreState,
        pending: &PendingRead,
        from: FetchSource,
        slab: &Slab,
        purpose: ReadPurpose,
    ) {
        // The stage reads by key, and the key may have been deleted and put with other bytes during
        // the read. Only if the key still has this content, at this address, are these its bytes.
        let found = state.catalog.find(&pending.key);
        let has_content = |key: &KeyIndex| state.catalog.entry(*key).content == from.content;
        let Some(key) = found.filter(has_content) else { return };
        let stamp = state.history.stamp();
        if state.catalog.live_content(from.place()).is_none() {
            return;
        }
        let has_moved = state.catalog.address(from.content, from.stage) != Some(from.address);
        if has_moved || purpose == ReadPurpose::Compare {
            return;
        }
        let content = state.catalog.content_mut(from.content);
        content.referenced |= 1 << from.stage;
        if purpose == ReadPurpose::Use {
            content.note_use(stamp);
        }
        if !self.pipeline.has_dram || !state.eviction.policy().promotes_hits() {
            return;
        }
        state.counters.promoted_blocks += 1;
        state.counters.promoted_bytes += slab.len() as u64;
        let now = self.policy_now(state);
        state.put_slab(from.content, slab.clone(), None);
        state.make_resident(key, now);
        if state.catalog.content(from.content).key_count > 1 {
            // A pin keeps a content in DRAM only through a slot of the pinned key.
            for other in state.catalog.keys_of(from.content) {
                if state.catalog.entry(other).pins > 0 {
                    state.make_resident(other, now);
                }
            }
        }
        if purpose == ReadPurpose::Prefetch {
            self.protect_prefetched(state, key);
        } else {
            state.catalog.entry_mut(key).expected_access = ExpectedAccess::None;
        }
    }

    /// Protects a block that was prefetched until its first use.
    pub(super) fn protect_prefetched(&self, state: &mut StoreState, key: KeyIndex) {
        state.counters.prefetched_blocks += 1;
        state.protect_prefetched(key, self.config.dram_bytes / PREFETCHED_SHARE);
    }
}

/// The slab of a block in DRAM. A read for use counts as an access.
pub(super) fn resident(
    state: &mut StoreState,
    key: KeyIndex,
    now: std::time::Duration,
    stamp: u32,
    purpose: ReadPurpose,
) -> Option<Slab> {
    let content = state.catalog.entry(key).content;
    let content = state.catalog.content_mut(content);
    let slab = content.slab.clone()?;
    if purpose == ReadPurpose::Use {
        content.note_use(stamp);
        state.touch(key, now);
    }
    Some(slab)
}
