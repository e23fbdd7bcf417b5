//! Get and view: hits in DRAM at once, hits below DRAM with one read for all waiting callers.

use cascade_block::BlockKey;
use cascade_memory::{Slab, SlabMut};
use cascade_runtime::Clock;
use cascade_tier::tier::{Load, LoadOutcome, StageError};
use cascade_tier::{CallOptions, GetOutcome, StoreError, ViewOutcome};

use crate::calls::fetch_source::FetchSource;
use crate::calls::read_counters::ReadResult;
use crate::core::catalog::{ExpectedAccess, KeyIndex};
use crate::core::circuit::Direction;
use crate::core::history::Loss;
use crate::core::state::StoreState;
use crate::drive::breaker::HealthSignal;
use crate::shared::call::CallContext;
use crate::shared::hold::{KEYS_PER_HOLD, StateGuard};
use crate::shared::{AllocationFailure, StoreCore};

/// A step of a copying get holds at most DRAM divided by this.
const GET_SHARE: usize = 8;
/// Maximum bytes of a step of a copying get; the deadline is checked between steps.
const GET_BYTES: usize = 256 << 20;
/// Prefetched blocks are protected from eviction until their first use, within DRAM divided by
/// this.
const PREFETCHED_SHARE: u64 = 4;
/// Attempts to read a block that was moved or damaged before it counts as a miss.
const TRIES_MAX: u32 = 4;

/// The purpose of a read: decides what is counted and whether DRAM keeps the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadPurpose {
    /// A caller that uses the bytes.
    Use,
    /// The same caller again, for a block that did not fit beside the others of its batch.
    Retry,
    /// A prefetch hint.
    Prefetch,
    /// A comparison by the store itself.
    Compare,
}

/// A block of a read without an outcome so far.
#[derive(Debug, Clone, Copy)]
struct PendingRead {
    index: usize,
    key: BlockKey,
    /// Bit per lower stage that failed, or that keeps only keys.
    avoid: u8,
    /// Whether the read circuit of a stage that has the block opened during the read.
    circuit_opened: bool,
    tries: u32,
}

/// A block to read from a lower stage.
struct Fetch {
    pending: PendingRead,
    from: FetchSource,
    slab: SlabMut,
}

/// The blocks without an outcome after one lookup in the catalog.
#[derive(Default)]
struct ReadPlan {
    fetches: Vec<Fetch>,
    /// Blocks that another caller is fetching, or for which this caller has no room yet.
    waiting: Vec<PendingRead>,
}

/// State of one read call.
struct ReadBatch {
    outcomes: Vec<Option<ViewOutcome>>,
    purpose: ReadPurpose,
    /// Blocks are counted as requested only at their first lookup.
    is_first_lookup: bool,
    call: CallContext,
}

impl ReadBatch {
    fn settle(&mut self, pending: &PendingRead, outcome: ViewOutcome) {
        self.outcomes[pending.index] = Some(outcome);
    }

    /// If the deadline has passed, fails these blocks and returns true.
    fn fail_if_late(&mut self, pending: &[PendingRead], clock: &dyn Clock) -> bool {
        if !self.call.has_timed_out(clock) {
            return false;
        }
        for pending in pending {
            let late = self.call.timeout_error("read all blocks of a batch");
            self.settle(pending, ViewOutcome::Failed(late));
        }
        true
    }
}

/// What the result of a read from a stage costs a hold of the lock, in keys looked up.
const SETTLE_COST: u32 = 4;

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
        let batch_bytes = buffers.iter().map(|buffer| buffer.len()).sum();
        let mut outcomes = Vec::with_capacity(keys.len());
        while outcomes.len() < keys.len() {
            let at = outcomes.len();
            if call.has_timed_out(&*self.clock) {
                let late = || GetOutcome::Failed(call.timeout_error("get all blocks of a batch"));
                outcomes.extend(keys[at..].iter().map(|_| late()));
                break;
            }
            let step = &keys[at..at + self.step_keys(&keys[at..], call)];
            let views = self.read(step, call, ReadPurpose::Use);
            for ((key, view), buffer) in step.iter().zip(views).zip(&mut buffers[at..]) {
                // A block that did not fit beside the others of its step may fit alone, because
                // the views of the other blocks are dropped by now.
                let view = match view {
                    ViewOutcome::Failed(StoreError::NoRoom { .. }) => {
                        let mut alone = self.read(&[*key], call, ReadPurpose::Retry);
                        alone.pop().expect("one outcome for one key")
                    }
                    settled => settled,
                };
                outcomes.push(copy_out(view, buffer, batch_bytes));
            }
        }
        self.count_gets(keys.len(), outcomes.iter().map(ReadResult::from_get));
        outcomes
    }

    /// The number of leading keys to read in one step, so that their blocks take at most a fixed
    /// share of DRAM; at least one, also if the deadline passes before it is known.
    pub(crate) fn step_keys(&self, keys: &[BlockKey], call: CallContext) -> usize {
        let keys = &keys[..keys.len().min(KEYS_PER_HOLD)];
        let most = (self.pool.region().bytes() / GET_SHARE).min(GET_BYTES);
        let mut found = Vec::with_capacity(keys.len());
        let Some(mut state) = self.lock_within(keys.len(), call) else { return 1 };
        state.charge_keys(keys);
        state.catalog.find_batch(keys, &mut found);
        let mut bytes = 0;
        let mut fits = |found: &Option<KeyIndex>| {
            let content = found.map(|key| state.catalog.content(state.catalog.entry(key).content));
            bytes += content.map_or(0, |content| content.bytes as usize);
            bytes <= most
        };
        found.iter().take_while(|found| fits(found)).count().max(1)
    }

    /// Reads blocks in rounds until each has an outcome or the deadline passes. A round looks up
    /// some blocks under the lock, reads the missing ones from the stages without it, and puts
    /// those that another caller is fetching back into the queue.
    pub(crate) fn read(
        &self,
        keys: &[BlockKey],
        call: CallContext,
        purpose: ReadPurpose,
    ) -> Vec<ViewOutcome> {
        let outcomes = keys.iter().map(|_| None).collect();
        let is_first_lookup = purpose == ReadPurpose::Use;
        let purpose = if purpose == ReadPurpose::Retry { ReadPurpose::Use } else { purpose };
        let mut batch = ReadBatch { outcomes, purpose, is_first_lookup, call };
        let pending = |(index, key): (usize, &BlockKey)| {
            let key = *key;
            PendingRead { index, key, avoid: 0, circuit_opened: false, tries: 0 }
        };
        let mut pending: Vec<PendingRead> = keys.iter().enumerate().map(pending).collect();
        // Blocks since the last progress that only wait for fetches of other callers. Once these
        // are all, there is nothing to do but wait.
        let mut idle = 0;
        while !pending.is_empty() {
            let keys = pending.len().min(KEYS_PER_HOLD);
            let Some(state) = self.lock_within(keys, call) else {
                batch.fail_if_late(&pending, &*self.clock);
                break;
            };
            // A queue: new blocks first, waiting ones at the end.
            let later = pending.split_off(keys);
            let (state, plan) = self.plan(state, &pending, &mut batch);
            self.unlock(state);
            idle = if plan.waiting.len() < pending.len() { 0 } else { idle + pending.len() };
            let again = self.fetch(plan.fetches, &mut batch);
            pending = later;
            pending.extend(again);
            pending.extend(plan.waiting);
            if batch.fail_if_late(&pending, &*self.clock) {
                break;
            }
            if idle >= pending.len() && !pending.is_empty() {
                idle = 0;
                if !self.wait_for_other_fetches(&pending, &mut batch) {
                    break;
                }
            }
        }
        let settled = batch.outcomes.into_iter();
        settled.map(|outcome| outcome.unwrap_or(ViewOutcome::Miss)).collect()
    }

    /// Decides the pending blocks: hit in DRAM, miss, fetch by this call, or wait for the fetch of
    /// another call.
    fn plan<'a>(
        &'a self,
        mut state: StateGuard<'a>,
        pending: &[PendingRead],
        batch: &mut ReadBatch,
    ) -> (StateGuard<'a>, ReadPlan) {
        let now = self.policy_now(&state);
        let now_unix_ms = self.clock.unix_ms();
        state.history.set_time(now_unix_ms);
        let stamp = state.history.stamp();
        let keys: Vec<BlockKey> = pending.iter().map(|pending| pending.key).collect();
        let mut found = Vec::with_capacity(keys.len());
        state.charge_keys(&keys);
        state.catalog.find_batch(&keys, &mut found);
        if std::mem::take(&mut batch.is_first_lookup) && !state.is_closed {
            state.count_direct_requests(&found, now_unix_ms, self.memory_tier());
        }
        let tier = self.tier_name(self.memory_tier());
        let mut plan = ReadPlan::default();
        let mut may_have_changed = state.is_closed;
        for (pending, mut found) in pending.iter().zip(found) {
            if state.is_closed {
                batch.settle(pending, ViewOutcome::Failed(StoreError::Closed));
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
                batch.settle(pending, ViewOutcome::Miss);
                continue;
            };
            if let Some(slab) = resident(&mut state, key, now, stamp, batch.purpose) {
                batch.settle(pending, ViewOutcome::Hit { slab, tier });
                continue;
            }
            may_have_changed = true;
            let (again, settled) = self.plan_fetch(state, *pending, key, &mut plan, batch);
            state = again;
            if let Some(outcome) = settled {
                batch.settle(pending, outcome);
            }
        }
        (state, plan)
    }

    /// Plans the read of a block from the fastest usable stage: marks the content as loading and
    /// allocates a slab. Returns an outcome instead if no stage is usable or no slab is available.
    fn plan_fetch<'a>(
        &'a self,
        mut state: StateGuard<'a>,
        pending: PendingRead,
        key: KeyIndex,
        plan: &mut ReadPlan,
        batch: &mut ReadBatch,
    ) -> (StateGuard<'a>, Option<ViewOutcome>) {
        let (index, open_circuits) = (state.catalog.entry(key).content, state.open_read_circuits);
        let content = state.catalog.content_mut(index);
        if content.is_loading {
            plan.waiting.push(pending);
            return (state, None);
        }
        let Some((stage, address)) = content.fastest_lower_except(pending.avoid | open_circuits)
        else {
            let is_unreadable =
                pending.circuit_opened || content.fastest_lower_except(pending.avoid).is_some();
            // If a stage that has the block failed, the outcome is that failure, not a miss.
            let failure = batch.outcomes[pending.index].take();
            if failure.is_none() && is_unreadable && batch.purpose == ReadPurpose::Use {
                state.counters.shed_gets += 1;
            }
            return (state, Some(failure.unwrap_or(ViewOutcome::Miss)));
        };
        // Set before the allocation, which can release the lock: other callers then wait for this
        // fetch and do not start their own.
        content.is_loading = true;
        let (bytes, generation) = (content.bytes as usize, content.generation);
        let holds_some = !plan.fetches.is_empty();
        let (again, slab) = self.allocate_slab(state, bytes, holds_some, None, batch.call);
        state = again;
        match slab {
            Ok(mut slab) => {
                let place = (index, generation);
                let from = FetchSource::new(&state, place, (stage, address), pending.key);
                // After a kill of this process, the kernel may still write into the slab.
                self.note_load(&mut slab);
                plan.fetches.push(Fetch { pending, from, slab });
                (state, None)
            }
            Err(failure) => {
                if let Some(content) = state.catalog.live_content((index, generation)) {
                    // Other callers wait for this mark, and only this call can clear it.
                    content.is_loading = false;
                }
                // The slabs of this plan may be the reason: look again after their fetches.
                if holds_some {
                    plan.waiting.push(pending);
                    return (state, None);
                }
                if failure == AllocationFailure::Erasing {
                    return (state, Some(ViewOutcome::Miss));
                }
                let error = self.allocation_error(&state, failure, bytes, batch.call);
                (state, Some(ViewOutcome::Failed(error)))
            }
        }
    }

    /// Reads from the lower stages and settles the results. Returns the blocks that have to be
    /// looked up again.
    fn fetch(&self, fetches: Vec<Fetch>, batch: &mut ReadBatch) -> Vec<PendingRead> {
        let mut again = Vec::new();
        let mut by_stage: Vec<Vec<Fetch>> = self.stages.iter().map(|_| Vec::new()).collect();
        for fetch in fetches {
            by_stage[fetch.from.stage].push(fetch);
        }
        for (stage, fetches) in by_stage.into_iter().enumerate() {
            if fetches.is_empty() {
                continue;
            }
            let mut loads = Vec::with_capacity(fetches.len());
            let mut places = Vec::with_capacity(fetches.len());
            for Fetch { pending, from, slab } in fetches {
                places.push((pending, from));
                loads.push(Load { key: from.key, address: from.address, slab });
            }
            // Measured before the load: a time-out is a failure of the stage only if the call had
            // at least the time of a probe.
            let time = batch.call.deadline.remaining(&*self.clock);
            let loaded = self.stages[stage].load(loads, batch.call.deadline);
            let signal = HealthSignal::of_load(&loaded, time >= self.config.health.probe_timeout);
            let now_unix_ms = self.clock.unix_ms();
            let mut state = self.lock_for(places.len());
            self.record_health(&mut state, stage, Direction::Reads, signal);
            state.history.set_time(now_unix_ms);
            for ((mut pending, from), loaded) in places.into_iter().zip(loaded) {
                state = self.end_full_hold(state);
                state.charge(SETTLE_COST);
                state.slabs_in_flight -= 1;
                if !self.settle(&mut state, &mut pending, from, loaded, batch) {
                    again.push(pending);
                }
            }
            self.unlock(state);
            // Other callers wait for these contents, and for slabs that were not kept.
            self.notify_changed();
        }
        again
    }

    /// Applies the result of a stage. Returns false if the block has to be looked up again.
    fn settle(
        &self,
        state: &mut StoreState,
        pending: &mut PendingRead,
        from: FetchSource,
        loaded: LoadOutcome,
        batch: &mut ReadBatch,
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
                self.promote(state, pending, from, &slab, batch.purpose);
                batch.settle(pending, ViewOutcome::Hit { slab, tier });
                return true;
            }
            // No second attempt after a time-out: the next stage is slower still.
            LoadOutcome::Failed(StageError::Timeout) => {
                let late = batch.call.timeout_error("read from a tier");
                batch.settle(pending, ViewOutcome::Failed(late));
                return true;
            }
            LoadOutcome::Failed(StageError::CircuitOpen) => {
                pending.avoid |= 1 << from.stage;
                pending.circuit_opened = true;
            }
            // The failure becomes the outcome only if no slower stage has the block.
            LoadOutcome::Failed(error) => {
                pending.avoid |= 1 << from.stage;
                let (operation, source) = ("read a block", std::sync::Arc::new(error));
                let failure = StoreError::Tier { tier, operation, source };
                batch.settle(pending, ViewOutcome::Failed(failure));
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
            let failure = batch.outcomes[pending.index].take();
            batch.settle(pending, failure.unwrap_or(ViewOutcome::Miss));
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
        let Some(content) = state.catalog.live_content(from.place()) else { return };
        let has_moved = content.address(from.stage) != Some(from.address);
        if has_moved || purpose == ReadPurpose::Compare {
            return;
        }
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
            state.counters.prefetched_blocks += 1;
            state.protect_prefetched(key, self.config.dram_bytes / PREFETCHED_SHARE);
        } else {
            state.catalog.entry_mut(key).expected_access = ExpectedAccess::None;
        }
    }

    /// Waits for the fetches of other callers. False if the deadline passed.
    fn wait_for_other_fetches(&self, pending: &[PendingRead], batch: &mut ReadBatch) -> bool {
        let state = self.lock_within(0, batch.call);
        let in_time = state.is_some_and(|state| self.wait_for_change(state, batch.call).1);
        if !in_time {
            for pending in pending {
                let late = batch.call.timeout_error("wait for another reader's fetch");
                batch.settle(pending, ViewOutcome::Failed(late));
            }
        }
        in_time
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

fn copy_out(view: ViewOutcome, buffer: &mut [u8], batch_bytes: usize) -> GetOutcome {
    match view {
        ViewOutcome::Hit { slab, .. } if slab.len() > buffer.len() => {
            GetOutcome::TooShort { needed_bytes: slab.len() }
        }
        ViewOutcome::Hit { slab, tier } => {
            let bytes = slab.len();
            cascade_memory::copy_out(&mut buffer[..bytes], &slab, batch_bytes);
            GetOutcome::Hit { bytes, tier }
        }
        ViewOutcome::Miss => GetOutcome::Miss,
        ViewOutcome::Failed(error) => GetOutcome::Failed(error),
    }
}
