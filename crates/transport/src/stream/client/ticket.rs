//! The ticket of a batch: waits for its answers, or leaves its memory.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use cascade_runtime::{Deadline, Plant, is_planted};

use super::{Link, Progress};
use crate::TransportError;
use crate::connection::Completion;

/// How often a cancelled batch looks whether the thread that receives has left its memory.
const LEAVE_WAIT: Duration = Duration::from_millis(50);

/// A batch of this connection.
#[derive(Debug)]
pub(super) struct StreamTicket {
    pub(super) link: Arc<Link>,
    pub(super) progress: Arc<Progress>,
}

impl Completion for StreamTicket {
    fn wait(&mut self, deadline: Deadline) -> Result<(), TransportError> {
        self.link.drive(deadline, |_| self.progress.has_ended())?;
        self.progress.result()
    }

    /// Does not wait for the peer: what it has not sent yet is thrown away when it comes.
    fn cancel(&mut self, _deadline: Deadline) {
        if is_planted(Plant::EarlyCancel) {
            return;
        }
        let is_ours = |it: &Arc<Progress>| Arc::ptr_eq(it, &self.progress);
        // Under the lock, so that the thread that receives either sees it or is seen here.
        let mut state = self.link.lock_state();
        self.progress.is_cancelled.store(true, Ordering::Release);
        let mut left = state.leave_memory(&self.progress);
        // A thread that receives into this memory looks at least each `TICK`, and stops or leaves
        // the rest of the answer to this one.
        while state.receiving.as_ref().is_some_and(is_ours) {
            let waited = self.link.changed.wait_timeout(state, LEAVE_WAIT);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            left.append(&mut state.leave_memory(&self.progress));
        }
        drop(state);
        // Without the lock: the owner of a region may be dropped here, whose code is not ours.
        drop(left);
    }
}
