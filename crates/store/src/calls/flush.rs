//! Flush, and the write failures that each caller has been informed of.

use cascade_tier::tier::TierError;
use cascade_tier::{CallOptions, StoreError};

use crate::core::circuit::Direction;
use crate::core::flush_mark::FlushMark;
use crate::core::health_signal::HealthSignal;
use crate::core::lower_tier::LowerTier;
use crate::drive::breaker::record_health;
use crate::shared::call::CallContext;
use crate::shared::{StoreCore, tier_error};

/// A flush of one caller.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Flush<'a> {
    core: &'a StoreCore,
    call: CallContext,
}

impl<'a> Flush<'a> {
    pub(crate) fn new(core: &'a StoreCore, options: CallOptions) -> Self {
        Self { core, call: core.call(options) }
    }

    /// For callers without a mark: reports the failures that no flush has reported so far.
    pub(crate) fn flush(self) -> Result<(), StoreError> {
        let mut reported = self.core.lock_or_time_out("flush", self.call)?.reported_failures;
        self.since(&mut reported)
    }

    /// Waits until the stages have everything that is queued now.
    fn wait_for_queues(self) -> Result<(), StoreError> {
        let mut state = self.core.lock_or_time_out("flush", self.call)?;
        loop {
            if state.is_closed {
                return Err(StoreError::Closed);
            }
            // An erase cancels the removals of deleted blocks, until it has erased the stages, or
            // has queued the removals again.
            if state.are_removals_cancelled {
                state = self.core.wait_or_time_out(state, "flush", self.call)?;
                continue;
            }
            let erases = state.erases;
            // Blocks that are queued after this line belong to a later flush. Without fixed
            // tickets, steady puts would keep this call waiting.
            let tickets: Vec<u64> =
                state.lower.iter().map(|tier| tier.block_tickets.pushed).collect();
            let is_awaited =
                |(tier, ticket): (&LowerTier, &u64)| tier.block_tickets.settled < *ticket;
            while state.lower.iter().zip(&tickets).any(is_awaited) {
                state = self.core.wait_or_time_out(state, "flush", self.call)?;
            }
            // A written block can queue key changes for its stage: draw these tickets only now.
            let tickets = state.key_changes_pushed();
            state = self.core.wait_for_key_changes(state, tickets, "flush", self.call)?;
            if state.erases == erases {
                return Ok(());
            }
        }
    }

    pub(crate) fn since(self, reported: &mut FlushMark) -> Result<(), StoreError> {
        self.wait_for_queues()?;
        // Read once: exactly the stages that are skipped or cut short below are reported at the
        // end, even if a circuit closes meanwhile.
        let mut open_circuits = self.core.lock_or_time_out("flush", self.call)?.open_write_circuits;
        let mut flushed = Ok(());
        // Try every stage and report the first error.
        for (at, stage) in self.core.stages.iter().enumerate() {
            if open_circuits & (1 << at) != 0 {
                continue;
            }
            // Without the lock: the stage may use the whole time of the call.
            let result = stage.flush(self.call.deadline);
            let signal = match &result {
                // A flush can have much to write: a time-out says nothing about the health, and an
                // open circuit says nothing new.
                Ok(()) | Err(TierError::Timeout | TierError::CircuitOpen) => HealthSignal::None,
                Err(error) => HealthSignal::Failure(error.clone()),
            };
            let mut state = self.core.lock();
            if matches!(signal, HealthSignal::Failure(_)) {
                // What a failed sync has lost, no later one can save. The lost blocks may be those
                // of another caller with a mark, so its next flush fails, too. This one fails now.
                state.write_failures.count(at, 1);
                state.reported_failures.count(at, 1);
                reported.count(at, 1);
            }
            record_health(self.core, &mut state, at, Direction::Writes, signal);
            let is_open = state.is_write_circuit_open(at);
            drop(state);
            if is_open && matches!(result, Err(TierError::CircuitOpen)) {
                // It opened during the call: report the error that opened it, as if it had been
                // open before.
                open_circuits |= 1 << at;
                continue;
            }
            flushed = flushed.and(result.map_err(|error| tier_error(stage, "flush", error)));
        }
        let mut state = self.core.lock_or_time_out("flush", self.call)?;
        let failures = state.write_failures;
        let failed = failures.stage_with_failures_since(reported.max(state.failures_before_erase));
        if state.is_closed && (flushed.is_err() || failed.is_some()) {
            // Another thread closed the store meanwhile: closing aborts the calls to the stages,
            // so these errors say nothing about the stages.
            return Err(StoreError::Closed);
        }
        // A failed flush leaves the marks as they are: the next one reports these failures again.
        flushed?;
        *reported = failures;
        state.reported_failures = failures;
        if let Some(stage) = failed {
            return Err(self.core.stage_error(&state, stage, "store some blocks"));
        }
        match (0..self.core.stages.len()).find(|stage| open_circuits & (1 << stage) != 0) {
            Some(stage) => Err(self.core.stage_error(&state, stage, "flush")),
            None => Ok(()),
        }
    }
}
