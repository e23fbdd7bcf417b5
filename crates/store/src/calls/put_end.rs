//! The end of a put: it waits for the stages, if it has to, and counts its outcomes.

use cascade_tier::{Put, PutOutcome};

use crate::core::awaited::Place;
use crate::shared::StoreCore;
use crate::shared::call::CallContext;
use crate::shared::call_counts::CallCounts;
use crate::shared::hold::KEYS_PER_HOLD;

/// A block that was stored by a put, and its place if the put has begun to wait for its writes.
type Written = (usize, Option<Place>);

impl StoreCore {
    /// Waits for the stages if the write policy requires it, then counts the outcomes.
    pub(super) fn end_put(
        &self,
        batch: &[Put<'_>],
        mut outcomes: Vec<PutOutcome>,
        awaited: &[(usize, Place)],
        call: CallContext,
    ) -> Vec<PutOutcome> {
        if self.waits_for_writes() {
            let mut awaited = awaited.iter().peekable();
            let place_of = |at| awaited.next_if(|(index, _)| *index == at).map(|(_, place)| *place);
            let written: Vec<Written> = (0..batch.len()).map(place_of).enumerate().collect();
            self.wait_until_written(batch, &mut outcomes, &written, call);
        }
        let mut counts = CallCounts::default();
        for outcome in &outcomes {
            counts.counters.count_put(outcome);
        }
        self.count_call(&counts);
        self.note_put(batch, &outcomes, call);
        outcomes
    }

    /// Waits for the writes of each block until the deadline, then asks only which are written.
    fn wait_until_written(
        &self,
        batch: &[Put<'_>],
        outcomes: &mut [PutOutcome],
        written: &[Written],
        call: CallContext,
    ) {
        let mut waited = 0;
        for (at, place) in written {
            if waited > 0 && call.has_timed_out(&*self.clock) {
                break;
            }
            if let Err(error) = self.wait_written(&batch[*at], &outcomes[*at], *place, call) {
                outcomes[*at] = PutOutcome::Failed(error);
            }
            waited += 1;
        }
        // A hold for each block would be too many, when other calls wait for the lock, too.
        self.in_holds(None, &written[waited..], |state, (at, place)| {
            let result = self.result_now(state, &batch[*at], &outcomes[*at], *place);
            place.inspect(|place| state.awaited.end(*place));
            let late = || Err(call.timeout_error("put"));
            if let Err(error) = result.unwrap_or_else(late) {
                outcomes[*at] = PutOutcome::Failed(error);
            }
        });
    }

    /// Tells the history and the shadow tiers of the outcomes, until the deadline: they need not
    /// know of each block.
    fn note_put(&self, batch: &[Put<'_>], outcomes: &[PutOutcome], call: CallContext) {
        let pieces = batch.chunks(KEYS_PER_HOLD).zip(outcomes.chunks(KEYS_PER_HOLD));
        for (piece, (batch, outcomes)) in pieces.enumerate() {
            if piece > 0 && call.has_timed_out(&*self.clock) {
                return;
            }
            let Some(mut state) = self.lock_within(batch.len(), call) else { return };
            state.charge_keys(batch);
            let now = self.policy_now(&state);
            for (put, outcome) in batch.iter().zip(outcomes) {
                state.note_unstored_put(&put.key, outcome);
            }
            drop(state);
            // The lock of the insight is never taken under the lock of the state.
            self.insight().shadows.put(now, batch, outcomes);
        }
    }
}
