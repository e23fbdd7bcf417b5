//! One read call: loads blocks from the stages and hands each out while others are being read.
//!
//! Blocks are planned under the lock in pieces. A stage pulls them from a [`StageReads`] when it
//! has capacity and gives each back as it ends, in the thread of the caller. That thread copies the
//! block to the caller's buffer while the stage reads the next ones. While it would wait for the
//! stage, it copies the blocks of the batch that are in DRAM.

mod buffers;
mod copies;
mod each_view;
mod plan;
mod promotion;
mod source_reads;
mod stage_reads;

use std::collections::VecDeque;
use std::sync::Arc;

use cascade_block::BlockKey;
use cascade_memory::{Slab, SlabMut};
use cascade_runtime::Clock;
use cascade_tier::tier::{Load, LoadOutcome};
use cascade_tier::{GetOutcome, TierName, ViewOutcome};

use crate::calls::fetch_source::FetchSource;
use crate::core::health_signal::HealthSignal;
use crate::shared::StoreCore;
use crate::shared::call::CallContext;
use crate::shared::hold::KEYS_PER_HOLD;

use buffers::CallerBuffers;
use copies::{Copies, SecondThread};
pub(super) use each_view::EachView;
pub(super) use plan::resident;
use source_reads::SourceReads;
use stage_reads::StageReads;

/// A read call holds at most DRAM divided by this in slabs that it loads, and as much in slabs that
/// it copies from.
const HELD_SHARE: usize = 8;
/// Maximum bytes of these slabs. Enough for a disk to work without a pause, and for other calls to
/// wait only some milliseconds behind these reads.
const HELD_BYTES_MAX: usize = 32 << 20;
/// Keys of one piece: each costs more than in a lookup, because the policy learns of each.
const KEYS_PER_PIECE: usize = KEYS_PER_HOLD / 2;
/// Keys that are looked up again in one piece, because the first lookup found more blocks than the
/// call may hold.
const KEYS_AGAIN_MAX: usize = 64;

/// The purpose of a read: decides what is counted and whether DRAM keeps the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadPurpose {
    /// A caller that uses the bytes.
    Use,
    /// A prefetch hint.
    Prefetch,
    /// A comparison by the store itself.
    Compare,
}

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
    /// Bit per source that does not have the block, or failed.
    pub(super) asked: u8,
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
    pub(super) held_bytes: usize,
    /// The limit of these, and of the slabs that the call has yet to copy from.
    held_bytes_max: usize,
    /// There was no memory for the next block; the slabs that this call holds may be the reason.
    pub(super) is_blocked: bool,
    postponed: Option<PendingRead>,
    /// Whether any block made progress since the last wait for other callers.
    has_progress: bool,
    /// Whether a lookup has counted a block of this batch as requested.
    pub(super) is_load: bool,
    /// What sources do for this call, if any is asked.
    pub(super) sources: Option<Box<SourceReads>>,
    /// Gets views as they come.
    pub(super) each: Option<Box<EachView<'a>>>,
}

impl<'a, 'b> ReadFlow<'a, 'b> {
    pub(super) fn new(
        core: &StoreCore,
        keys: &[BlockKey],
        call: CallContext,
        purpose: ReadPurpose,
    ) -> Self {
        let is_counted = purpose != ReadPurpose::Use;
        let pending = |(index, key): (usize, &BlockKey)| {
            let key = *key;
            let (avoid, circuit_opened, asked, tries) = (0, false, 0, 0);
            PendingRead { index, key, avoid, circuit_opened, is_counted, asked, tries }
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
            held_bytes_max: (core.pool.capacity_bytes() / HELD_SHARE).min(HELD_BYTES_MAX),
            is_blocked: false,
            postponed: None,
            has_progress: false,
            is_load: core.sources.has_matched(keys, &*core.clock),
            sources: None,
            each: None,
        }
    }

    /// Reads the blocks; see [`ReadCall::run`].
    pub(super) fn run(&mut self, core: &StoreCore) {
        ReadCall { core, flow: self }.run();
    }

    pub(super) fn copying(self, buffers: &'a mut [&'b mut [u8]]) -> Self {
        let target = CallerBuffers::new(buffers);
        Self { target: Some(target), ..self }
    }

    pub(super) fn settle(&mut self, pending: &PendingRead, outcome: ViewOutcome) {
        self.has_progress = true;
        if let Some(each) = &mut self.each {
            each.note(pending.index, &outcome);
        }
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
        let is_full = target.held_bytes() >= self.held_bytes_max && target.held_bytes() > 0;
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
        self.held_bytes > 0 || self.target.as_ref().is_some_and(|target| target.held_bytes() > 0)
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

    /// The block at which the planning stopped.
    pub(super) fn take_stopped(&mut self) -> Option<PendingRead> {
        self.postponed.take()
    }

    /// Queues blocks that were not planned, in their order, before the others.
    pub(super) fn queue_again(&mut self, rest: Vec<PendingRead>) {
        for pending in rest.into_iter().rev() {
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

    pub(super) fn fail_rest(&mut self, operation: &'static str) {
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
    pub(super) fn copy_resident(&mut self, bytes_max: usize) -> bool {
        let Some(target) = &mut self.target else { return false };
        if target.copies.is_some() {
            return target.copy_shared();
        }
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

    /// Makes room for this many blocks, so that no list grows under the lock: the pages of a list
    /// of 32,768 blocks took longer than their lookup.
    fn reserve(&mut self, count: usize) {
        self.waiting.reserve(count);
        if let Some(target) = &mut self.target {
            target.hits.reserve(count);
            target.deferred.reserve(count);
        }
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
        let (mut taken, mut bytes) = (Vec::new(), target.held_bytes());
        while taken.len() < KEYS_PER_PIECE
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

    pub(super) fn into_views(self) -> Vec<ViewOutcome> {
        self.outcomes.into_iter().map(|outcome| outcome.unwrap_or(ViewOutcome::Miss)).collect()
    }

    pub(super) fn into_gets(self) -> Vec<GetOutcome> {
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

/// A read call of a store, with its state.
struct ReadCall<'f, 'a, 'b> {
    core: &'f StoreCore,
    flow: &'f mut ReadFlow<'a, 'b>,
}

impl ReadCall<'_, '_, '_> {
    /// Reads until each block has an outcome or the deadline passes: new blocks first, then those
    /// that have to be looked up again. Waits for other callers only while the call holds no slab
    /// that it loads, because they may wait for these.
    fn run(&mut self) {
        self.read_all();
        self.end_sources();
    }

    fn read_all(&mut self) {
        loop {
            if self.flow.has_source_work() && self.read_from_sources() {
                continue;
            }
            if self.flow.queued.is_empty() {
                if self.flow.waiting.is_empty() {
                    return;
                }
                if !std::mem::take(&mut self.flow.has_progress) && !self.wait_for_other_fetches() {
                    return;
                }
                self.flow.queued.extend(std::mem::take(&mut self.flow.waiting));
            }
            if self.flow.target.is_some() && self.flow.fail_if_late(&*self.core.clock) {
                return;
            }
            self.plan_some();
            self.run_sources(false);
            loop {
                // While one stage loads, blocks for another one may be planned.
                while let Some(stage) = self.flow.planned.iter().position(|loads| !loads.is_empty())
                {
                    self.load_beside_copies(stage);
                }
                self.flow.copy_resident(usize::MAX);
                if self.flow.fail_if_late(&*self.core.clock) {
                    return;
                }
                if !self.flow.has_deferred() {
                    break;
                }
                self.plan_deferred();
            }
            self.flow.give_views();
        }
    }

    /// As [`Self::load_planned`]. If the call has much to copy from DRAM, a second thread helps.
    #[expect(clippy::disallowed_types, reason = "a thread that only copies; no world has it")]
    fn load_beside_copies(&mut self, stage: usize) {
        let wants_thread =
            self.flow.target.as_ref().is_some_and(CallerBuffers::wants_second_thread);
        // A simulated world has no second processor.
        let may_start = wants_thread && !cascade_runtime::is_simulated();
        let Some(_permission) = may_start.then(SecondThread::begin).flatten() else {
            return self.load_planned(stage);
        };
        let batch_bytes = self.flow.target.as_ref().map_or(0, |target| target.batch_bytes);
        let copies = Arc::new(Copies::new(batch_bytes));
        std::thread::scope(|scope| {
            let _ends = copies.ends_on_drop();
            let builder = std::thread::Builder::new().name("cascade-copy".to_owned());
            // Without the thread the call makes all copies itself.
            let has_thread = builder.spawn_scoped(scope, || copies.run()).is_ok();
            if let Some(target) = self.flow.target.as_mut().filter(|_| has_thread) {
                target.copies = Some(Arc::clone(&copies));
            }
            self.load_planned(stage);
            while copies.copy_one() {}
        });
        if let Some(target) = &mut self.flow.target {
            target.end_copies(&copies);
        }
    }

    /// Loads the planned blocks of a stage, and those that become possible meanwhile.
    fn load_planned(&mut self, stage: usize) {
        let deadline = self.flow.call.deadline;
        // Measured before the load.
        let is_long_enough = is_long_enough(self.core, self.flow.call);
        let signal = HealthSignal::None;
        let read = ReadCall { core: self.core, flow: &mut *self.flow };
        let mut reads = StageReads { read, stage, is_long_enough, signal, reported_bytes: 0 };
        self.core.stages[stage].load_each(&mut reads, deadline);
        reads.finish();
    }

    /// Waits for the fetches of other callers. If the deadline has passed, fails the blocks that
    /// wait for them, and returns false.
    fn wait_for_other_fetches(&mut self) -> bool {
        let state = self.core.lock_within(0, self.flow.call);
        let in_time = state.is_some_and(|state| self.core.wait_for_change(state, self.flow.call).1);
        if !in_time {
            self.flow.fail_rest("wait for another reader's fetch");
        }
        in_time
    }
}

/// Whether a time-out is a failure of a tier: the call has at least the time of a probe.
fn is_long_enough(core: &StoreCore, call: CallContext) -> bool {
    call.deadline.remaining(&*core.clock) >= core.config.health.probe_timeout
}
