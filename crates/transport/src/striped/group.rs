//! The parts of one batch that threads of streams move: when all have ended, and how.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};

use cascade_runtime::{Condvar, Deadline, Mutex, MutexGuard, SystemClock};

use crate::TransportError;

/// The parts of one batch.
#[derive(Debug)]
pub(super) struct Group {
    state: Mutex<GroupState>,
    changed: Condvar,
    /// Parts that are not posted yet are left out, others are cancelled.
    is_cancelled: AtomicBool,
    /// Sent by the thread whose part ends last, if none failed.
    notice: Option<Box<[u8]>>,
}

#[derive(Debug)]
struct GroupState {
    /// Parts whose bytes have not all moved.
    moving: usize,
    /// Parts whose threads still use the memory.
    parts_left: usize,
    failure: Option<TransportError>,
}

impl Group {
    pub(super) fn new(parts: usize, notice: Option<Box<[u8]>>) -> Self {
        let state = GroupState { moving: parts, parts_left: parts, failure: None };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Self { state, changed, is_cancelled: AtomicBool::new(false), notice }
    }

    fn lock(&self) -> MutexGuard<'_, GroupState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Acquire)
    }

    pub(super) fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Release);
    }

    /// Set once the batch is cancelled.
    pub(super) fn flag(&self) -> &AtomicBool {
        &self.is_cancelled
    }

    pub(super) fn fail(&self, error: TransportError) {
        self.lock().failure.get_or_insert(error);
    }

    /// How the batch has ended.
    pub(super) fn result(&self) -> Result<(), TransportError> {
        self.lock().failure.clone().map_or(Ok(()), Err)
    }

    /// Notes that the bytes of a part have moved. True for the last part, whose thread sends the
    /// notice.
    pub(super) fn moved(&self) -> bool {
        let mut state = self.lock();
        state.moving -= 1;
        state.moving == 0
    }

    /// The notice, unless a part failed or the batch was cancelled.
    pub(super) fn due_notice(&self) -> Option<&[u8]> {
        let is_due = self.lock().failure.is_none() && !self.is_cancelled();
        self.notice.as_deref().filter(|_| is_due)
    }

    pub(super) fn end_part(&self) {
        let mut state = self.lock();
        state.parts_left -= 1;
        if state.parts_left == 0 {
            self.changed.notify_all();
        }
    }

    /// Waits until all parts have ended; false if they have not by the deadline.
    pub(super) fn wait_for_parts(&self, deadline: Deadline) -> bool {
        let mut state = self.lock();
        while state.parts_left > 0 {
            let left = deadline.remaining(&SystemClock);
            if left.is_zero() {
                return false;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}
