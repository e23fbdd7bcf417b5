//! One read call: loads blocks from the stages and hands each out while others are being read.
//!
//! Blocks are planned under the lock in pieces. A stage pulls them from a [`StageReads`] when it
//! has capacity and gives each back as it ends, in the thread of the caller. That thread copies the
//! block to the caller's buffer while the stage reads the next ones. While it would wait for the
//! stage, it copies the blocks of the batch that are in DRAM.

use std::collections::VecDeque;

use cascade_block::BlockKey;
use cascade_memory::{Slab, SlabMut};
use cascade_runtime::Clock;
use cascade_tier::tier::{Load, LoadOutcome, LoadQueue, StageError};
use cascade_tier::{GetOutcome, TierName, ViewOutcome};

use crate::calls::fetch_source::FetchSource;
use crate::calls::read::ReadPurpose;
use crate::core::circuit::Direction;
use crate::drive::breaker::HealthSignal;
use crate::shared::StoreCore;
use crate::shared::call::CallContext;
use crate::shared::hold::KEYS_PER_HOLD;

/// A read call holds at most DRAM divided by this in slabs that it loads, and as much in slabs that
/// it copies from.
const HELD_SHARE: usize = 8;
/// Maximum bytes of these slabs. Enough for a disk to work without a pause, and for other calls to
/// wait only some milliseconds behind these reads.
const HELD_BYTES_MAX: usize = 32 << 20;
/// Bytes that are copied from DRAM before the call looks for loads that have ended.
const IDLE_COPY_BYTES: usize = 1 << 20;
/// Ended loads are applied to the catalog together, to take the lock once for this many blocks or
/// bytes.
const ENDED_BLOCKS_MAX: usize = 32;
const ENDED_BYTES_MAX: usize = 1 << 20;
/// Keys that are looked up again in one piece, because the first lookup found more blocks than the
/// call may hold.
const KEYS_AGAIN_MAX: usize = 64;

/// What the result of a read from a stage costs a hold of the lock, in keys looked up.
const SETTLE_COST: u32 = 4;

/// A block of a read without an outcome so far.
#[derive(Debug, Clone, Copy)]
pub(super) struct PendingRead {
    pub(super) index: usize,
    pub(super) key: BlockKey,
    /// Bit per lower stage that failed, or that keeps only keys.
    pub(super) avoid: u8,
    /// Whether the read circuit of a stage that has the block opened during the read.
    pub(super) circuit_opened: bool,
    /// Whether an earlier lookup counted the block as requested.
    pub(super) is_counted: bool,
    pub(super) tries: u32,
}

/// A block to read from a lower stage.
pub(super) struct Fetch {
    pub(super) pending: PendingRead,
    pub(super) from: FetchSource,
    pub(super) slab: SlabMut,
}

/// A load in flight.
#[derive(Debug, Clone, Copy)]
struct Loading {
    pending: PendingRead,
    from: FetchSource,
    bytes: usize,
}

/// The buffers of a copying get, and what was copied to them.
struct CallerBuffers<'a, 'b> {
    buffers: &'a mut [&'b mut [u8]],
    copied: Vec<Option<GetOutcome>>,
    batch_bytes: usize,
    /// Blocks in DRAM that are not copied yet, and their bytes.
    hits: VecDeque<(usize, Slab, TierName)>,
    hit_bytes: usize,
    /// Blocks in DRAM to look up again, because the call holds enough others. With their lengths.
    deferred: VecDeque<(PendingRead, usize)>,
}

/// State of one read call.
pub(super) struct ReadFlow<'a, 'b> {
    pub(super) call: CallContext,
    pub(super) purpose: ReadPurpose,
    pub(super) outcomes: Vec<Option<ViewOutcome>>,
    target: Option<CallerBuffers<'a, 'b>>,
    /// Blocks to look up.
    pub(super) queued: VecDeque<PendingRead>,
    /// Blocks to look up again, after the loads of this call or of another one.
    pub(super) waiting: Vec<PendingRead>,
    /// Blocks to load, by stage.
    planned: Vec<VecDeque<Fetch>>,
    /// Loads in flight, by their number.
    loading: Vec<Option<Loading>>,
    free_numbers: Vec<usize>,
    /// Loads that ended and are not applied to the catalog yet.
    ended: Vec<(Loading, LoadOutcome)>,
    ended_bytes: usize,
    /// Bytes of all slabs that this call loads.
    held_bytes: usize,
    /// The limit of these, and of the slabs that the call has yet to copy from.
    held_bytes_max: usize,
    /// There was no memory for the next block; the slabs that this call holds may be the reason.
    is_blocked: bool,
    postponed: Option<PendingRead>,
    /// Whether any block made progress since the last wait for other callers.
    has_progress: bool,
    /// Whether a lookup has counted a block of this batch as requested.
    pub(super) is_load: bool,
}

impl<'a, 'b> ReadFlow<'a, 'b> {
    fn new(core: &StoreCore, keys: &[BlockKey], call: CallContext, purpose: ReadPurpose) -> Self {
        let is_counted = purpose != ReadPurpose::Use;
        let pending = |(index, key): (usize, &BlockKey)| {
            let key = *key;
            PendingRead { index, key, avoid: 0, circuit_opened: false, is_counted, tries: 0 }
        };
        Self {
            call,
            purpose,
            outcomes: keys.iter().map(|_| None).collect(),
            target: None,
            queued: keys.iter().enumerate().map(pending).collect(),
            waiting: Vec::new(),
            planned: Vec::new(),
            loading: Vec::new(),
            free_numbers: Vec::new(),
            ended: Vec::new(),
            ended_bytes: 0,
            held_bytes: 0,
            held_bytes_max: (core.pool.region().bytes() / HELD_SHARE).min(HELD_BYTES_MAX),
            is_blocked: false,
            postponed: None,
            has_progress: false,
            is_load: false,
        }
    }

    fn copying(self, buffers: &'a mut [&'b mut [u8]]) -> Self {
        let batch_bytes = buffers.iter().map(|buffer| buffer.len()).sum();
        let copied = buffers.iter().map(|_| None).collect();
        let (hits, hit_bytes, deferred) = (VecDeque::new(), 0, VecDeque::new());
        let target = CallerBuffers { buffers, copied, batch_bytes, hits, hit_bytes, deferred };
        Self { target: Some(target), ..self }
    }

    pub(super) fn settle(&mut self, pending: &PendingRead, outcome: ViewOutcome) {
        self.has_progress = true;
        self.outcomes[pending.index] = Some(outcome);
    }

    /// Settles a block that is in DRAM. A copying get copies it after the lock is released.
    pub(super) fn settle_resident(&mut self, pending: &PendingRead, slab: Slab, tier: TierName) {
        let Some(target) = &mut self.target else {
            return self.settle(pending, ViewOutcome::Hit { slab, tier });
        };
        self.has_progress = true;
        target.hit_bytes += slab.len();
        target.hits.push_back((pending.index, slab, tier));
    }

    /// If the call has to copy as many blocks as it may hold, keeps this one, which is in DRAM, for
    /// later and returns true. So the call finds the blocks that a stage has to load first.
    pub(super) fn defer(&mut self, pending: &PendingRead, bytes: usize) -> bool {
        let Some(target) = &mut self.target else { return false };
        let is_full = target.hit_bytes >= self.held_bytes_max && !target.hits.is_empty();
        if is_full {
            target.deferred.push_back((*pending, bytes));
        }
        is_full
    }

    /// Settles a block that was loaded. A copying get has copied it when its load ended, unless
    /// the block was read as another key.
    pub(super) fn settle_loaded(&mut self, pending: &PendingRead, slab: Slab, tier: TierName) {
        let copied = self.target.as_ref().map(|target| &target.copied[pending.index]);
        if copied.is_none_or(Option::is_none) {
            self.settle_resident(pending, slab, tier);
        }
    }

    pub(super) fn plan(&mut self, fetch: Fetch) {
        let stage = fetch.from.stage;
        if stage >= self.planned.len() {
            self.planned.resize_with(stage + 1, VecDeque::new);
        }
        self.held_bytes += fetch.slab.len();
        self.planned[stage].push_back(fetch);
    }

    /// Whether the call holds slabs, so that it must not wait for more.
    pub(super) fn holds_some(&self) -> bool {
        self.held_bytes > 0 || self.target.as_ref().is_some_and(|target| !target.hits.is_empty())
    }

    /// Whether the call loads into as many slabs as it may.
    pub(super) fn is_full(&self) -> bool {
        self.held_bytes > 0 && self.held_bytes >= self.held_bytes_max
    }

    /// There is no memory for this block. It is planned again once the call has released slabs.
    pub(super) fn postpone(&mut self, pending: PendingRead) {
        self.is_blocked = true;
        self.stop_at(pending);
    }

    /// The call may not load this block yet.
    pub(super) fn stop_at(&mut self, pending: PendingRead) {
        self.postponed = Some(pending);
    }

    pub(super) fn is_blocked(&self) -> bool {
        self.is_blocked
    }

    /// Queues blocks that were not planned, in their order, behind the one without memory.
    pub(super) fn queue_again(&mut self, rest: Vec<PendingRead>) {
        for pending in self.postponed.take().into_iter().chain(rest).rev() {
            self.queued.push_front(pending);
        }
    }

    /// If the deadline has passed, fails all blocks without an outcome and returns true.
    fn fail_if_late(&mut self, clock: &dyn Clock) -> bool {
        if !self.call.has_timed_out(clock) {
            return false;
        }
        self.fail_rest("read all blocks of a batch");
        true
    }

    fn fail_rest(&mut self, operation: &'static str) {
        let queued = std::mem::take(&mut self.queued);
        let deferred = self.target.as_mut().map(|target| std::mem::take(&mut target.deferred));
        let deferred = deferred.into_iter().flatten().map(|(pending, _)| pending);
        let rest = queued.into_iter().chain(std::mem::take(&mut self.waiting)).chain(deferred);
        for pending in rest {
            let late = self.call.timeout_error(operation);
            self.settle(&pending, ViewOutcome::Failed(late));
        }
    }

    /// Copies blocks in DRAM to the caller's buffers, at least one and up to this many bytes.
    /// Returns whether there was one.
    fn copy_resident(&mut self, bytes_max: usize) -> bool {
        let Some(target) = &mut self.target else { return false };
        let mut bytes = 0;
        while bytes < bytes_max
            && let Some((index, slab, tier)) = target.hits.pop_front()
        {
            bytes += slab.len();
            target.hit_bytes -= slab.len();
            target.copy(index, &slab, tier);
        }
        bytes > 0
    }

    fn deferred_count(&self) -> usize {
        self.target.as_ref().map_or(0, |target| target.deferred.len())
    }

    fn has_deferred(&self) -> bool {
        self.deferred_count() > 0
    }

    /// Takes as many deferred blocks as the call may copy from.
    fn take_deferred(&mut self) -> Vec<PendingRead> {
        let Some(target) = &mut self.target else { return Vec::new() };
        let (mut taken, mut bytes) = (Vec::new(), target.hit_bytes);
        while taken.len() < KEYS_PER_HOLD
            && (bytes < self.held_bytes_max || taken.is_empty())
            && let Some((pending, block_bytes)) = target.deferred.pop_front()
        {
            bytes += block_bytes;
            taken.push(pending);
        }
        taken
    }

    /// Takes a planned block for its stage.
    fn start(&mut self, Fetch { pending, from, slab }: Fetch) -> (usize, Load) {
        let loading = Loading { pending, from, bytes: slab.len() };
        let number = self.free_numbers.pop().unwrap_or_else(|| {
            self.loading.push(None);
            self.loading.len() - 1
        });
        self.loading[number] = Some(loading);
        (number, Load { key: from.key, address: from.address, slab })
    }

    fn add_ended(&mut self, loading: Loading, outcome: LoadOutcome) {
        self.ended_bytes += loading.bytes;
        self.ended.push((loading, outcome));
    }

    fn into_views(self) -> Vec<ViewOutcome> {
        self.outcomes.into_iter().map(|outcome| outcome.unwrap_or(ViewOutcome::Miss)).collect()
    }

    fn into_gets(self) -> Vec<GetOutcome> {
        let copied = self.target.map(|target| target.copied).unwrap_or_default();
        let outcomes = copied.into_iter().zip(self.outcomes);
        outcomes
            .map(|(copied, outcome)| match (copied, outcome) {
                (Some(copied), _) => copied,
                (None, Some(ViewOutcome::Failed(error))) => GetOutcome::Failed(error),
                (None, _) => GetOutcome::Miss,
            })
            .collect()
    }
}

impl CallerBuffers<'_, '_> {
    fn copy(&mut self, index: usize, block: &[u8], tier: TierName) {
        let (bytes, buffer) = (block.len(), &mut *self.buffers[index]);
        self.copied[index] = Some(if bytes > buffer.len() {
            GetOutcome::TooShort { needed_bytes: bytes }
        } else {
            cascade_memory::copy_out(&mut buffer[..bytes], block, self.batch_bytes);
            GetOutcome::Hit { bytes, tier }
        });
    }
}

/// The blocks of a read call that one stage loads.
struct StageReads<'c, 'f, 'a, 'b> {
    core: &'c StoreCore,
    flow: &'f mut ReadFlow<'a, 'b>,
    stage: usize,
    /// Whether a time-out of these loads is a failure of the stage.
    is_long_enough: bool,
    /// What the loads since the last report say about the stage's health.
    signal: HealthSignal,
    reported_bytes: usize,
}

impl LoadQueue for StageReads<'_, '_, '_, '_> {
    fn next_load(&mut self) -> Option<(usize, Load)> {
        let is_last = self.flow.planned[self.stage].is_empty();
        let (blocks, bytes) = (self.flow.ended.len(), self.flow.ended_bytes);
        if is_last || blocks >= ENDED_BLOCKS_MAX || bytes >= ENDED_BYTES_MAX {
            self.settle_ended();
        }
        loop {
            if let Some(fetch) = self.flow.planned[self.stage].pop_front() {
                return Some(self.flow.start(fetch));
            }
            let flow = &mut *self.flow;
            let may_plan = !flow.queued.is_empty() && !flow.is_full() && !flow.is_blocked;
            if !may_plan || flow.call.has_timed_out(&*self.core.clock) {
                return None;
            }
            if !self.core.plan_piece(flow, false) {
                return None;
            }
        }
    }

    fn ended(&mut self, number: usize, outcome: LoadOutcome) {
        let loading = self.flow.loading[number].take().expect("a load ends once");
        self.flow.free_numbers.push(number);
        // Here, not when it is applied to the catalog: the stage has just read these bytes to
        // verify them, so that they are in the cache of the processor. If they were read as another
        // key, only the catalog can tell whether they are the bytes of this one.
        if loading.from.key == loading.pending.key
            && let (LoadOutcome::Hit(slab), Some(target)) = (&outcome, &mut self.flow.target)
        {
            let tier = self.core.tier_name(1 + self.stage);
            target.copy(loading.pending.index, slab, tier);
        }
        self.flow.add_ended(loading, outcome);
    }

    fn idle(&mut self) -> bool {
        if self.flow.copy_resident(IDLE_COPY_BYTES) {
            return true;
        }
        self.flow.has_deferred()
            && !self.flow.call.has_timed_out(&*self.core.clock)
            && self.core.plan_deferred(self.flow)
    }
}

impl StageReads<'_, '_, '_, '_> {
    /// Applies the loads that ended to the catalog.
    fn settle_ended(&mut self) {
        if self.flow.ended.is_empty() {
            return;
        }
        let (core, flow) = (self.core, &mut *self.flow);
        let ended = std::mem::take(&mut flow.ended);
        self.signal.add(HealthSignal::of_load(
            ended.iter().map(|(_, outcome)| outcome),
            self.is_long_enough,
        ));
        self.reported_bytes += std::mem::take(&mut flow.ended_bytes);
        let now_unix_ms = core.clock.unix_ms();
        let mut state = core.lock_for(ended.len());
        // A call that lasts reports now and then, as several calls would.
        if self.reported_bytes >= flow.held_bytes_max {
            self.reported_bytes = 0;
            let signal = std::mem::replace(&mut self.signal, HealthSignal::None);
            core.record_health(&mut state, self.stage, Direction::Reads, signal);
        }
        state.history.set_time(now_unix_ms);
        for (Loading { mut pending, from, bytes }, outcome) in ended {
            state = core.end_full_hold(state);
            state.charge(SETTLE_COST);
            state.slabs_in_flight -= 1;
            flow.held_bytes -= bytes;
            flow.has_progress = true;
            if !core.settle(&mut state, &mut pending, from, outcome, flow) {
                flow.waiting.push(pending);
            }
        }
        flow.is_blocked = false;
        core.unlock(state);
        // Other callers wait for these contents, and for slabs that were not kept.
        core.notify_changed();
    }

    /// Settles everything that the stage was to load, after its call.
    fn finish(mut self) {
        let is_late = self.flow.call.deadline.has_passed(&*self.core.clock);
        // The stage did not take these.
        for fetch in std::mem::take(&mut self.flow.planned[self.stage]) {
            let Fetch { pending, from, slab } = fetch;
            let error = if is_late { StageError::Timeout } else { StageError::NoResult };
            let loading = Loading { pending, from, bytes: slab.len() };
            self.flow.add_ended(loading, LoadOutcome::Failed(error));
        }
        self.settle_ended();
        let mut state = self.core.lock();
        self.core.record_health(&mut state, self.stage, Direction::Reads, self.signal);
        self.core.unlock(state);
    }
}

impl StoreCore {
    /// Reads blocks and returns their slabs.
    pub(crate) fn read(
        &self,
        keys: &[BlockKey],
        call: CallContext,
        purpose: ReadPurpose,
    ) -> Vec<ViewOutcome> {
        let mut flow = ReadFlow::new(self, keys, call, purpose);
        self.run_read(&mut flow);
        flow.into_views()
    }

    /// Reads blocks and copies them to the caller's buffers.
    pub(super) fn read_into(
        &self,
        keys: &[BlockKey],
        buffers: &mut [&mut [u8]],
        call: CallContext,
    ) -> Vec<GetOutcome> {
        let mut flow = ReadFlow::new(self, keys, call, ReadPurpose::Use).copying(buffers);
        self.run_read(&mut flow);
        flow.into_gets()
    }

    /// Reads until each block has an outcome or the deadline passes: new blocks first, then those
    /// that have to be looked up again. Waits for other callers only while the call holds no slab
    /// that it loads, because they may wait for these.
    fn run_read(&self, flow: &mut ReadFlow<'_, '_>) {
        loop {
            if flow.queued.is_empty() {
                if flow.waiting.is_empty() {
                    return;
                }
                if !std::mem::take(&mut flow.has_progress) && !self.wait_for_other_fetches(flow) {
                    return;
                }
                flow.queued.extend(std::mem::take(&mut flow.waiting));
            }
            if flow.target.is_some() && flow.fail_if_late(&*self.clock) {
                return;
            }
            self.plan_some(flow);
            loop {
                // While one stage loads, blocks for another one may be planned.
                while let Some(stage) = flow.planned.iter().position(|loads| !loads.is_empty()) {
                    self.load_planned(flow, stage);
                }
                flow.copy_resident(usize::MAX);
                if flow.fail_if_late(&*self.clock) {
                    return;
                }
                if !flow.has_deferred() {
                    break;
                }
                self.plan_deferred(flow);
            }
        }
    }

    /// Looks up blocks until there is one to load, or none is left to look up: blocks in DRAM are
    /// copied while a stage loads.
    fn plan_some(&self, flow: &mut ReadFlow<'_, '_>) {
        flow.is_blocked = false;
        loop {
            if !self.plan_piece(flow, true) {
                return;
            }
            let has_planned = flow.planned.iter().any(|loads| !loads.is_empty());
            if flow.target.is_none()
                || flow.queued.is_empty()
                || has_planned
                || flow.is_blocked
                || flow.call.has_timed_out(&*self.clock)
            {
                return;
            }
        }
    }

    /// Looks up blocks again that were in DRAM. Returns false if the deadline passed before the
    /// call got the lock: the blocks stay deferred.
    fn plan_deferred(&self, flow: &mut ReadFlow<'_, '_>) -> bool {
        let count = flow.deferred_count().min(KEYS_PER_HOLD);
        let Some(state) = self.lock_within(count, flow.call) else { return false };
        let pending = flow.take_deferred();
        let state = self.plan(state, pending, false, flow);
        self.unlock(state);
        true
    }

    /// Looks up the next blocks and plans their loads, under one hold of the lock. Returns false if
    /// the deadline passed before the call got the lock: the blocks stay queued.
    fn plan_piece(&self, flow: &mut ReadFlow<'_, '_>, may_wait: bool) -> bool {
        let is_again = flow.queued.front().is_some_and(|pending| pending.is_counted);
        let keys_max = if is_again { KEYS_AGAIN_MAX } else { KEYS_PER_HOLD };
        let count = flow.queued.len().min(keys_max);
        let Some(state) = self.lock_within(count, flow.call) else { return false };
        let pending: Vec<PendingRead> = flow.queued.drain(..count).collect();
        let state = self.plan(state, pending, may_wait, flow);
        self.unlock(state);
        true
    }

    /// Loads the planned blocks of a stage, and those that become possible meanwhile.
    fn load_planned(&self, flow: &mut ReadFlow<'_, '_>, stage: usize) {
        let deadline = flow.call.deadline;
        // Measured before the load: a time-out is a failure of the stage only if the call had at
        // least the time of a probe.
        let is_long_enough = deadline.remaining(&*self.clock) >= self.config.health.probe_timeout;
        let signal = HealthSignal::None;
        let mut reads =
            StageReads { core: self, flow, stage, is_long_enough, signal, reported_bytes: 0 };
        self.stages[stage].load_each(&mut reads, deadline);
        reads.finish();
    }

    /// Waits for the fetches of other callers. If the deadline has passed, fails the blocks that
    /// wait for them, and returns false.
    fn wait_for_other_fetches(&self, flow: &mut ReadFlow<'_, '_>) -> bool {
        let state = self.lock_within(0, flow.call);
        let in_time = state.is_some_and(|state| self.wait_for_change(state, flow.call).1);
        if !in_time {
            flow.fail_rest("wait for another reader's fetch");
        }
        in_time
    }
}
