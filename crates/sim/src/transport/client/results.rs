//! Results of a client's batches, compared with the model.

use std::sync::Arc;
use std::time::Duration;

use cascade_runtime::{Deadline, now, sleep};
use cascade_transport::{Direction, Refusal, TransportError};

use super::super::process::Linked;
use super::super::profile::Trouble;
use super::batches::{Bad, InFlight, Plan};
use super::{Caller, soon};

/// Waits for a batch, before one that is not meant to end early.
const WAITS_MAX: u32 = 20;

impl Caller {
    /// Ends the batch of a slot: waits for it, cancels it, or drops its ticket.
    pub(super) fn finish(&mut self, slot: usize) {
        let Some(InFlight { plan, linked, mut ticket }) = self.in_flight[slot].take() else {
            return;
        };
        let mut waits = 0;
        let ended = loop {
            waits += 1;
            if self.has(Trouble::Haste) && self.random.one_in(4) {
                sleep(Duration::from_micros(self.random.below(3000)));
                // It does not wait for the peer.
                let deadline = Deadline::at(now());
                self.timed("a cancel", deadline, || ticket.cancel(deadline));
                break None;
            }
            let deadline = if waits > WAITS_MAX { soon() } else { self.deadline() };
            let ended = self.timed("a wait", deadline, || ticket.wait(deadline));
            if !matches!(ended, Err(TransportError::Deadline { .. })) {
                break Some((ended, deadline));
            }
            self.check_deadline(&plan, deadline);
            if self.random.below(8) == 0 {
                self.timed("a drop of a ticket", Deadline::at(now()), || drop(ticket));
                break None;
            }
        };
        match ended {
            None => {
                self.shared.count("cancelled");
                self.failed(slot, &plan, &linked);
            }
            Some((Ok(()), _)) => self.confirmed(slot, &plan, &linked),
            Some((Err(error), deadline)) => {
                self.check_error(&error, (&plan, &linked), deadline);
                if let TransportError::Refused { refusal, .. } = error {
                    self.refused(slot, &plan, &linked, refusal);
                }
                self.failed(slot, &plan, &linked);
            }
        }
    }

    fn confirmed(&mut self, slot: usize, plan: &Plan, linked: &Linked) {
        self.shared.count("confirmed");
        let batch = plan.batch;
        if let Some(bad) = plan.bad {
            self.shared.add(format_args!("batch {batch} was confirmed, though it has {bad:?}"));
        }
        if matches!(plan.passing, Some((_, true))) && !plan.moves_nothing() {
            self.shared.add(format_args!("batch {batch} read a region that was unregistered"));
        }
        if let Some(posted) = self.shared.state().notices.get_mut(&batch) {
            posted.is_confirmed = true;
        }
        let wrong = match plan.direction {
            Direction::Write => {
                let actual = linked.target.fetch(plan.slot);
                let mut slots = linked.target.slots();
                let wrong = slots[plan.slot].missing(batch, &actual);
                slots[plan.slot].confirm(batch);
                wrong
            }
            Direction::Read => {
                let actual = self.fetch_local(slot);
                let wrong = self.local[slot].missing(batch, &actual);
                self.local[slot].confirm(batch);
                wrong
            }
        };
        if let Some(wrong) = wrong {
            let direction = plan.direction;
            self.shared.state().findings.add_wrong_bytes(format_args!(
                "{direction:?} batch {batch} was confirmed without its bytes: {wrong:?}"
            ));
        }
        self.check(slot, plan, linked, "after a batch was confirmed");
    }

    fn refused(&mut self, slot: usize, plan: &Plan, linked: &Arc<Linked>, refusal: Refusal) {
        self.shared.count(&format!("refused: {refusal:?}"));
        let batch = plan.batch;
        match plan.direction {
            Direction::Write => linked.target.slots()[plan.slot].settle(batch),
            Direction::Read => self.local[slot].settle(batch),
        }
        if plan.bad == Some(Bad::Remote(refusal)) && plan.is_one_frame(self.shared.profile.streams)
        {
            self.forget(slot, plan, linked);
        }
        // The bytes of a read have left before this side sees that they are damaged.
        let has_left = refusal == Refusal::Damaged && plan.direction == Direction::Read;
        let mut state = self.shared.state();
        let Some(posted) = state.notices.get_mut(&batch).filter(|_| !has_left) else { return };
        posted.is_refused = true;
        if posted.is_seen {
            let what = format!("the notice of batch {batch} came, which was refused: {refusal}");
            state.findings.add(what);
        }
    }

    /// The batch moved nothing, and nothing of it comes.
    pub(super) fn forget(&mut self, slot: usize, plan: &Plan, linked: &Linked) {
        match plan.direction {
            Direction::Write => linked.target.slots()[plan.slot].forget(plan.batch),
            Direction::Read => self.local[slot].forget(plan.batch),
        }
    }

    /// The batch has ended without success. Its local memory is not used any more.
    pub(super) fn failed(&mut self, slot: usize, plan: &Plan, linked: &Linked) {
        if plan.direction == Direction::Read {
            self.local[slot].settle(plan.batch);
        }
        self.check(slot, plan, linked, "after a batch failed");
    }

    fn check(&mut self, slot: usize, plan: &Plan, linked: &Linked, when: &str) {
        self.check_local(slot);
        if plan.direction == Direction::Write {
            linked.target.check_slot(&self.shared, plan.slot, when);
        }
    }

    fn check_deadline(&self, plan: &Plan, deadline: Deadline) {
        self.shared.count("deadlines");
        let left = deadline.time().saturating_sub(now());
        if left > Duration::ZERO {
            let batch = plan.batch;
            self.shared.add(format_args!("batch {batch}: {left:?} before its deadline, it passed"));
        }
        if !self.has(Trouble::Haste) {
            self.shared.add(format_args!("batch {} did not end", plan.batch));
        }
    }

    /// Whether a batch may fail like this.
    pub(super) fn check_error(
        &self,
        error: &TransportError,
        (plan, linked): (&Plan, &Linked),
        deadline: Deadline,
    ) {
        let profile = &self.shared.profile;
        let is_allowed = match error {
            TransportError::Deadline { .. } => {
                self.check_deadline(plan, deadline);
                return;
            }
            TransportError::Lost { .. } => {
                self.shared.count("lost");
                self.has(Trouble::Haste)
            }
            TransportError::Local { refusal, .. } => plan.bad == Some(Bad::Local(*refusal)),
            TransportError::Refused { refusal: Refusal::Busy, .. } => {
                plan.notice.is_some() && profile.limits.notices_max < 1000
            }
            TransportError::Refused { refusal: Refusal::Damaged, .. } => {
                // An earlier batch of a lost connection wrote the same bytes meanwhile.
                let is_write = plan.direction == Direction::Write;
                let is_contested =
                    || is_write && linked.target.slots()[plan.slot].is_contested(linked.number);
                profile.conditions.flip_one_in > 0 || is_contested()
            }
            TransportError::Refused { refusal, .. } => {
                let is_going = *refusal == Refusal::UnknownRegion
                    && plan.passing.is_some_and(|(id, _)| {
                        linked.target.passing.state(id).is_some_and(|state| state.is_going)
                    });
                is_going || plan.bad == Some(Bad::Remote(*refusal))
            }
            _ => false,
        };
        if !is_allowed {
            let (batch, direction, bad) = (plan.batch, plan.direction, plan.bad);
            let what = format!("{direction:?} batch {batch} with {bad:?} failed: {error}");
            self.shared.add(what);
        }
    }
}
