//! Work of the writer on another thread: while one segment is written, the one before it is sealed
//! and the next one is created.

use std::fmt;
use std::sync::{Arc, PoisonError};

use cascade_runtime::{Clock, Condvar, Deadline, Mutex};

use super::segment::Segment;
use crate::DiskError;
use crate::io::FileIo;

/// Work that was started and has a result of its own later.
pub(super) struct Background<T>(Arc<Outcome<T>>);

/// A full segment that another thread seals while the next one is written.
#[derive(Debug)]
pub(super) struct Sealing {
    pub(super) segment: Arc<Segment>,
    pub(super) sealed: Background<Result<(), DiskError>>,
    /// When the seal ends at the latest, unless the device hangs.
    pub(super) deadline: Deadline,
}

struct Outcome<T> {
    state: Mutex<State<T>>,
    ended: Condvar,
}

enum State<T> {
    Running,
    /// `None` after a panic.
    Ended(Option<T>),
}

/// Reports the result when it is dropped, also by a thread that panics.
struct Report<T> {
    outcome: Arc<Outcome<T>>,
    result: Option<T>,
}

impl<T> Drop for Report<T> {
    fn drop(&mut self) {
        let mut state = self.outcome.state.lock().unwrap_or_else(PoisonError::into_inner);
        *state = State::Ended(self.result.take());
        drop(state);
        self.outcome.ended.notify_all();
    }
}

impl<T: Send + 'static> Background<T> {
    /// Starts work that ends by its deadline. `None` if there is no thread for it: then it is not
    /// done.
    pub(super) fn start(io: &FileIo, work: impl FnOnce() -> T + Send + 'static) -> Option<Self> {
        let outcome =
            Arc::new(Outcome { state: Mutex::new(State::Running), ended: Condvar::new() });
        let report = Report { outcome: Arc::clone(&outcome), result: None };
        let submitted = io.background.submit(move || {
            // Bound, so that the thread has all of it and not only its result.
            let mut report = report;
            report.result = Some(work());
        });
        submitted.is_ok().then_some(Self(outcome))
    }

    /// Waits until the work has ended. `false` if the deadline passes before.
    pub(super) fn wait_for_end(&self, deadline: Deadline, clock: &dyn Clock) -> bool {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if matches!(*state, State::Ended(_)) {
                return true;
            }
            if deadline.has_passed(clock) {
                return false;
            }
            let waited = self.0.ended.wait_until(state, deadline, clock);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits for the result. `None` if the deadline passes or the work has panicked.
    pub(super) fn wait(self, deadline: Deadline, clock: &dyn Clock) -> Option<T> {
        if !self.wait_for_end(deadline, clock) {
            return None;
        }
        match &mut *self.0.state.lock().unwrap_or_else(PoisonError::into_inner) {
            State::Ended(result) => result.take(),
            State::Running => None,
        }
    }
}

impl<T> fmt::Debug for Background<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Background").finish_non_exhaustive()
    }
}
