//! The end of a put: it waits for the stages, if it has to, and counts its outcomes.

use std::time::Duration;

use cascade_tier::{Put, PutOutcome};

use crate::calls::put_facts::PutBytes;
use crate::calls::write_through::{WriteThrough, waits_for_writes};
use crate::core::awaited::Place;
use crate::shared::StoreCore;
use crate::shared::call::CallContext;
use crate::shared::call_counts::CallCounts;
use crate::shared::hold::KEYS_PER_HOLD;

/// A block that was stored by a put, and its place if the put has begun to wait for its writes.
type Written = (usize, Option<Place>);

/// A put whose blocks have outcomes, as far as they are known without the stages.
pub(super) struct DecidedPut<'a> {
    pub(super) core: &'a StoreCore,
    pub(super) batch: &'a [Put<'a>],
    pub(super) bytes: PutBytes<'a>,
    pub(super) call: CallContext,
    pub(super) outcomes: Vec<PutOutcome>,
}

impl DecidedPut<'_> {
    /// Waits for the stages if the write policy requires it, then counts the outcomes.
    pub(super) fn end(
        mut self,
        awaited: &[(usize, Place)],
        noted: (usize, Duration),
    ) -> Vec<PutOutcome> {
        if waits_for_writes(self.core) {
            let mut awaited = awaited.iter().peekable();
            let place_of = |at| awaited.next_if(|(index, _)| *index == at).map(|(_, place)| *place);
            let written: Vec<Written> = (0..self.batch.len()).map(place_of).enumerate().collect();
            self.wait_until_written(&written);
        }
        let mut counts = CallCounts::default();
        for outcome in &self.outcomes {
            counts.counters.count_put(outcome);
        }
        self.core.count_call(&counts);
        self.note(noted);
        self.outcomes
    }

    /// Waits for the writes of each block until the deadline, then asks only which are written.
    fn wait_until_written(&mut self, written: &[Written]) {
        let Self { core, batch, bytes, call, outcomes } = self;
        let (core, call) = (*core, *call);
        let writes = WriteThrough { core, call };
        let mut waited = 0;
        for (at, place) in written {
            if waited > 0 && call.has_timed_out(&*core.clock) {
                break;
            }
            let block = (&batch[*at], bytes.length(*at));
            if let Err(error) = writes.wait_written(block, &outcomes[*at], *place) {
                outcomes[*at] = PutOutcome::Failed(error);
            }
            waited += 1;
        }
        // A hold for each block would be too many, when other calls wait for the lock, too.
        core.in_holds(None, &written[waited..], |state, (at, place)| {
            let block = (&batch[*at], bytes.length(*at));
            let result = writes.result_now(state, block, &outcomes[*at], *place);
            place.inspect(|place| state.awaited.end(*place));
            let late = || Err(call.timeout_error("put"));
            if let Err(error) = result.unwrap_or_else(late) {
                outcomes[*at] = PutOutcome::Failed(error);
            }
        });
    }

    /// Tells the history and the shadow tiers of the outcomes, until the deadline: they need not
    /// know of each block. The history knows the first `noted` blocks already: a piece of only
    /// these needs no lock.
    fn note(&self, (noted, mut now): (usize, Duration)) {
        let (core, call) = (self.core, self.call);
        let pieces = self.batch.chunks(KEYS_PER_HOLD).zip(self.outcomes.chunks(KEYS_PER_HOLD));
        for (piece, (batch, outcomes)) in pieces.enumerate() {
            if piece > 0 && call.has_timed_out(&*core.clock) {
                return;
            }
            let noted = noted.saturating_sub(piece * KEYS_PER_HOLD).min(batch.len());
            let rest = &batch[noted..];
            if !rest.is_empty() {
                let Some(mut state) = core.lock_within(rest.len(), call) else { return };
                state.charge_keys(rest);
                now = core.policy_now(&state);
                for (put, outcome) in rest.iter().zip(&outcomes[noted..]) {
                    state.note_unstored_put(&put.key, outcome);
                }
            }
            // The lock of the insight is never taken under the lock of the state.
            let length = |at| self.bytes.length(piece * KEYS_PER_HOLD + at);
            core.insight().shadows.put(now, batch, length, outcomes);
        }
    }
}
