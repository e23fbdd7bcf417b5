//! The side of a read call that a stage takes blocks from.

use cascade_tier::tier::{Load, LoadOutcome, LoadQueue, TierError};
use cascade_tier::{StoreError, ViewOutcome};

use super::promotion::promote;
use super::{Fetch, Loading, PendingRead, ReadCall};
use crate::calls::fetch_source::FetchSource;
use crate::core::circuit::Direction;
use crate::core::health_signal::HealthSignal;
use crate::core::history::Loss;
use crate::core::state::StoreState;
use crate::drive::breaker::record_health;

/// Bytes that are copied from DRAM before the call looks for loads that have ended.
const IDLE_COPY_BYTES: usize = 1 << 20;
/// Ended loads are applied to the catalog together, to take the lock once for this many blocks or
/// bytes.
const ENDED_BLOCKS_MAX: usize = 32;
const ENDED_BYTES_MAX: usize = 1 << 20;
/// Attempts to read a block that was moved or damaged before it counts as a miss.
const TRIES_MAX: u32 = 4;
/// What the result of a read from a stage costs a hold of the lock, in keys looked up.
const SETTLE_COST: u32 = 4;

/// The blocks of a read call that one stage loads.
pub(super) struct StageReads<'f, 'a, 'b> {
    pub(super) read: ReadCall<'f, 'a, 'b>,
    pub(super) stage: usize,
    /// Whether a time-out of these loads is a failure of the stage.
    pub(super) is_long_enough: bool,
    /// What the loads since the last report say about the stage's health.
    pub(super) signal: HealthSignal,
    pub(super) reported_bytes: usize,
}

impl LoadQueue for StageReads<'_, '_, '_> {
    fn next_load(&mut self) -> Option<(usize, Load)> {
        let is_last = self.read.flow.planned[self.stage].is_empty();
        let (blocks, bytes) = (self.read.flow.ended.len(), self.read.flow.ended_bytes);
        if is_last || blocks >= ENDED_BLOCKS_MAX || bytes >= ENDED_BYTES_MAX {
            self.settle_ended();
        }
        loop {
            if let Some(fetch) = self.read.flow.planned[self.stage].pop_front() {
                return Some(self.read.flow.start(fetch));
            }
            let flow = &mut *self.read.flow;
            let may_plan = !flow.queued.is_empty() && !flow.is_full() && !flow.is_blocked;
            if !may_plan || flow.call.has_timed_out(&*self.read.core.clock) {
                return None;
            }
            if !self.read.plan_piece(false) {
                return None;
            }
        }
    }

    fn ended(&mut self, number: usize, outcome: LoadOutcome) {
        let loading = self.read.flow.loading[number].take().expect("a load ends once");
        self.read.flow.free_numbers.push(number);
        // Here, not when it is applied to the catalog: the stage has just read these bytes to
        // verify them, so that they are in the cache of the processor. If they were read as another
        // key, only the catalog can tell whether they are the bytes of this one.
        if loading.from.key == loading.pending.key
            && let (LoadOutcome::Hit(slab), Some(target)) = (&outcome, &mut self.read.flow.target)
        {
            let tier = self.read.core.tier_name(1 + self.stage);
            target.copy_loaded(loading.pending.index, slab, tier);
        }
        self.read.flow.add_ended(loading, outcome);
    }

    fn idle(&mut self) -> bool {
        if self.read.flow.copy_resident(IDLE_COPY_BYTES) {
            return true;
        }
        self.read.flow.has_deferred()
            && !self.read.flow.call.has_timed_out(&*self.read.core.clock)
            && self.read.plan_deferred()
    }
}

impl StageReads<'_, '_, '_> {
    /// Applies the loads that ended to the catalog.
    fn settle_ended(&mut self) {
        if self.read.flow.ended.is_empty() {
            return;
        }
        let core = self.read.core;
        let ended = std::mem::take(&mut self.read.flow.ended);
        self.signal.add(HealthSignal::of_load(
            ended.iter().map(|(_, outcome)| outcome),
            self.is_long_enough,
        ));
        self.reported_bytes += std::mem::take(&mut self.read.flow.ended_bytes);
        let now_unix_ms = core.clock.unix_ms();
        let mut state = core.lock_for(ended.len());
        // A call that lasts reports now and then, as several calls would.
        if self.reported_bytes >= self.read.flow.held_bytes_max {
            self.reported_bytes = 0;
            let signal = std::mem::replace(&mut self.signal, HealthSignal::None);
            record_health(core, &mut state, self.stage, Direction::Reads, signal);
        }
        state.history.set_time(now_unix_ms);
        for (Loading { mut pending, from, bytes }, outcome) in ended {
            state = core.end_full_hold(state);
            state.charge(SETTLE_COST);
            state.memory.slabs_in_flight -= 1;
            self.read.flow.held_bytes -= bytes;
            self.read.flow.has_progress = true;
            if !self.settle_one(&mut state, &mut pending, from, outcome) {
                self.read.flow.waiting.push(pending);
            }
        }
        self.read.flow.is_blocked = false;
        core.unlock(state);
        // Other callers wait for these contents, and for slabs that were not kept.
        core.notify_changed();
        self.read.run_sources(false);
        self.read.flow.give_views();
    }

    /// Applies the result of a stage. Returns false if the block has to be looked up again.
    fn settle_one(
        &mut self,
        state: &mut StoreState,
        pending: &mut PendingRead,
        from: FetchSource,
        loaded: LoadOutcome,
    ) -> bool {
        let (core, flow) = (self.read.core, &mut *self.read.flow);
        if let Some(content) = state.catalog.live_content(from.place()) {
            content.is_loading = false;
        }
        let tier = core.tier_name(1 + from.stage);
        match loaded {
            // Read as another key of its content, which may be a key of other bytes by now.
            LoadOutcome::Hit(_) if from.key != pending.key && !from.has_same_key(state) => {}
            LoadOutcome::Hit(slab) => {
                let slab = slab.seal();
                promote(core, state, pending, from, &slab, flow.purpose);
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
            LoadOutcome::Gone if core.stages[from.stage].keeps_names_only() => {
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

    /// Settles everything that the stage was to load, after its call.
    pub(super) fn finish(mut self) {
        let is_late = self.read.flow.call.deadline.has_passed(&*self.read.core.clock);
        // The stage did not take these.
        for fetch in std::mem::take(&mut self.read.flow.planned[self.stage]) {
            let Fetch { pending, from, slab } = fetch;
            let error = if is_late { TierError::Timeout } else { TierError::NoResult };
            let loading = Loading { pending, from, bytes: slab.len() };
            self.read.flow.add_ended(loading, LoadOutcome::Failed(error));
        }
        self.settle_ended();
        let mut state = self.read.core.lock();
        record_health(self.read.core, &mut state, self.stage, Direction::Reads, self.signal);
        self.read.core.unlock(state);
    }
}
