//! The side of a read call that a stage takes blocks from.

use cascade_tier::tier::{Load, LoadOutcome, LoadQueue, TierError};

use super::{Fetch, Loading, ReadFlow};
use crate::core::circuit::Direction;
use crate::core::health_signal::HealthSignal;
use crate::shared::StoreCore;

/// Bytes that are copied from DRAM before the call looks for loads that have ended.
const IDLE_COPY_BYTES: usize = 1 << 20;
/// Ended loads are applied to the catalog together, to take the lock once for this many blocks or
/// bytes.
const ENDED_BLOCKS_MAX: usize = 32;
const ENDED_BYTES_MAX: usize = 1 << 20;
/// What the result of a read from a stage costs a hold of the lock, in keys looked up.
const SETTLE_COST: u32 = 4;

/// The blocks of a read call that one stage loads.
pub(super) struct StageReads<'c, 'f, 'a, 'b> {
    pub(super) core: &'c StoreCore,
    pub(super) flow: &'f mut ReadFlow<'a, 'b>,
    pub(super) stage: usize,
    /// Whether a time-out of these loads is a failure of the stage.
    pub(super) is_long_enough: bool,
    /// What the loads since the last report say about the stage's health.
    pub(super) signal: HealthSignal,
    pub(super) reported_bytes: usize,
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
        core.run_sources(flow, false);
        flow.give_views();
    }

    /// Settles everything that the stage was to load, after its call.
    pub(super) fn finish(mut self) {
        let is_late = self.flow.call.deadline.has_passed(&*self.core.clock);
        // The stage did not take these.
        for fetch in std::mem::take(&mut self.flow.planned[self.stage]) {
            let Fetch { pending, from, slab } = fetch;
            let error = if is_late { TierError::Timeout } else { TierError::NoResult };
            let loading = Loading { pending, from, bytes: slab.len() };
            self.flow.add_ended(loading, LoadOutcome::Failed(error));
        }
        self.settle_ended();
        let mut state = self.core.lock();
        self.core.record_health(&mut state, self.stage, Direction::Reads, self.signal);
        self.core.unlock(state);
    }
}
