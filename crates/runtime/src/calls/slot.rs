//! Passes the result of a call to its caller, or learns that the caller no longer waits.

use std::sync::PoisonError;

use crate::{Clock, Condvar, Deadline, Mutex, MutexGuard, Plant, is_planted};

use super::cancel::{Cancel, Waiting};

pub(super) struct Slot<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

enum State<T> {
    Queued,
    Running,
    Ready(T),
    Panicked,
    Refused,
    /// The caller has stopped waiting.
    Abandoned,
}

/// Why a caller has no result.
pub(super) enum Unanswered {
    TimedOut { has_begun: bool },
    Cancelled { has_begun: bool },
    Refused,
    Panicked,
}

impl<T> Slot<T> {
    pub(super) fn new() -> Self {
        Self { state: Mutex::new(State::Queued), changed: Condvar::new() }
    }

    /// Whether the call is to be made. The start of a call races with the end of its wait. If the
    /// caller has reported a failure, the call must not run: its effect would come unexpected.
    pub(super) fn begin(&self) -> bool {
        let mut state = self.lock();
        let is_wanted = matches!(*state, State::Queued);
        if is_wanted {
            *state = State::Running;
        }
        is_wanted
    }

    /// Passes a result to the caller, none for a panic; if the caller has stopped waiting, to
    /// `late`.
    pub(super) fn deliver(&self, result: Option<T>, late: impl FnOnce(T)) {
        let mut state = self.lock();
        if matches!(*state, State::Abandoned) {
            drop(state);
            if let Some(result) = result {
                late(result);
            }
            return;
        }
        // Before the caller continues: `late` may hold alive what the caller closes next.
        drop(late);
        *state = result.map_or(State::Panicked, State::Ready);
        self.changed.notify_one();
    }

    /// The caller stops waiting. Returns whether the call has begun, or `None` if it has ended.
    pub(super) fn abandon(&self) -> Option<bool> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Abandoned) {
            State::Queued => Some(false),
            State::Running => Some(true),
            State::Ready(_) | State::Panicked | State::Refused | State::Abandoned => None,
        }
    }

    pub(super) fn is_refused(&self) -> bool {
        matches!(*self.lock(), State::Refused)
    }

    pub(super) fn wait(
        &self,
        until: Deadline,
        cancel: Option<&Cancel>,
        clock: &dyn Clock,
    ) -> Result<T, Unanswered> {
        let mut state = self.lock();
        loop {
            // Under the lock: a result comes before this and is returned, or after it and goes to
            // `late`. None is lost.
            let has_begun = match std::mem::replace(&mut *state, State::Abandoned) {
                State::Ready(value) => return Ok(value),
                State::Panicked => return Err(Unanswered::Panicked),
                State::Refused | State::Abandoned => return Err(Unanswered::Refused),
                State::Queued => false,
                State::Running => true,
            };
            if cancel.is_some_and(Cancel::is_set) {
                return Err(Unanswered::Cancelled { has_begun });
            }
            let ignores_deadline = is_planted(Plant::LateDeadline);
            if until.has_passed(clock) && !ignores_deadline {
                return Err(Unanswered::TimedOut { has_begun });
            }
            *state = if has_begun { State::Running } else { State::Queued };
            state = if ignores_deadline {
                self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
            } else {
                let waited = self.changed.wait_until(state, until, clock);
                waited.unwrap_or_else(PoisonError::into_inner).0
            };
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Send> Waiting for Slot<T> {
    fn wake(&self) {
        // Under the lock, so that the caller waits already, or looks at the flag after this.
        let _state = self.lock();
        self.changed.notify_one();
    }

    fn refuse(&self) {
        let mut state = self.lock();
        if matches!(*state, State::Queued) {
            *state = State::Refused;
            self.changed.notify_one();
        }
    }
}
