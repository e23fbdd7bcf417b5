//! Calls whose callers do other work meanwhile.

use std::fmt;
use std::sync::Arc;

use super::cancel::Waiting;
use super::slot::Slot;
use super::{CallError, Calls, QueuedCall, Shared, job_of};

/// A call that was started. Dropping it ends the interest in the call: one that has not begun is
/// never made, and one that still runs counts as stuck until it ends.
pub struct StartedCall {
    shared: Arc<Shared>,
    slot: Arc<Slot<()>>,
    number: u64,
    threads_max: usize,
}

impl Calls {
    /// Starts a call without waiting for it. It passes its results on by itself, also when it
    /// panics. Fails at once while late calls occupy all threads.
    pub fn start(
        &self,
        is_watched: bool,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<StartedCall, CallError> {
        if self.shared.lock().is_all_stuck(self.threads_max) {
            return Err(CallError::AllStuck);
        }
        let slot = Arc::new(Slot::new());
        let waiting = Arc::clone(&slot) as Arc<dyn Waiting>;
        let call = QueuedCall { slot: waiting, is_watched, refuse_if_stuck: true };
        let job = job_of(Arc::clone(&slot), work, drop);
        let number = self.push(job, Some(call)).map_err(CallError::NoThread)?;
        let (shared, threads_max) = (Arc::clone(&self.shared), self.threads_max);
        Ok(StartedCall { shared, slot, number, threads_max })
    }
}

impl StartedCall {
    /// Whether the call was refused before it began, because late calls occupy all threads.
    pub fn is_refused(&self) -> bool {
        self.slot.is_refused()
    }
}

impl Drop for StartedCall {
    fn drop(&mut self) {
        if let Some(has_begun) = self.slot.abandon() {
            self.shared.abandon(self.number, has_begun, self.threads_max);
        }
    }
}

impl fmt::Debug for StartedCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StartedCall").field("number", &self.number).finish_non_exhaustive()
    }
}
