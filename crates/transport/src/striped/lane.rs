//! One of several streams: its connection, and the thread that moves its parts of batches.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use cascade_runtime::thread::{Builder, JoinHandle};
use cascade_runtime::{Condvar, Deadline, Mutex, MutexGuard, SystemClock};

use super::Group;
use crate::TransportError;
use crate::connection::{Batch, Connection};
use crate::piece::{Direction, Piece};
use crate::stream::{StreamConnection, Until};

/// How often a thread that waits for its part looks whether the batch was cancelled.
pub(super) const LOOK: Duration = Duration::from_millis(50);
/// Time in which the threads notice that a batch is cancelled, and leave its answers.
pub(super) const LEAVE_TIMEOUT: Duration = LOOK.saturating_mul(3);
/// The longest time to post a part. A stream without progress ends sooner, by its stall time-out,
/// and a part whose batch is cancelled is given up.
const POST_TIMEOUT: Duration = Duration::from_secs(3600);
/// Time in which a cancelled part has to be answered; then its stream is closed.
pub(super) const CANCEL_TIMEOUT: Duration = Duration::from_secs(1);
/// Parts that wait for a stream.
const PARTS_MAX: usize = 64;

/// A part of a batch.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) direction: Direction,
    pub(super) pieces: Vec<Piece>,
    pub(super) group: Arc<Group>,
}

/// A stream and its thread.
#[derive(Debug)]
pub(super) struct Lane {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What a lane, its thread and the tickets of its parts share.
#[derive(Debug)]
pub(super) struct Shared {
    stream: Arc<StreamConnection>,
    queue: Mutex<Queue>,
    /// A part was added or taken, or the lane is closing.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    parts: VecDeque<Part>,
    is_closing: bool,
}

impl Lane {
    /// Starts the thread.
    pub(super) fn start(stream: StreamConnection) -> Result<Self, TransportError> {
        let (queue, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { stream: Arc::new(stream), queue, changed });
        let of_thread = Arc::clone(&shared);
        let builder = Builder::new().name("transport-stream".to_owned());
        let thread = builder.spawn(move || of_thread.run()).map_err(|error| {
            TransportError::Unavailable(format!("no thread for another stream: {error}"))
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    pub(super) fn stream(&self) -> &StreamConnection {
        &self.shared.stream
    }

    pub(super) fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    /// Gives a part to the thread. Waits while many wait.
    pub(super) fn push(&self, part: Part, deadline: Deadline) -> Result<(), TransportError> {
        let mut queue = self.shared.lock();
        while queue.parts.len() >= PARTS_MAX {
            let left = deadline.remaining(&SystemClock);
            if left.is_zero() {
                return Err(TransportError::Deadline { what: "waiting for other batches" });
            }
            let waited = self.shared.changed.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        queue.parts.push_back(part);
        self.shared.changed.notify_all();
        Ok(())
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // The parts that wait fail, and the one that moves is cut off.
        self.stream().close();
        self.shared.lock().is_closing = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic was printed by the thread; nothing of it is left to use.
            drop(thread.join());
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the connection.
    pub(super) fn close(&self) {
        self.stream.close();
    }

    /// Takes back the parts of a cancelled batch that the thread has not begun.
    pub(super) fn withdraw(&self, group: &Arc<Group>) {
        let withdrawn = {
            let mut queue = self.lock();
            let before = queue.parts.len();
            queue.parts.retain(|part| !Arc::ptr_eq(&part.group, group));
            before - queue.parts.len()
        };
        self.changed.notify_all();
        (0..withdrawn).for_each(|_| group.end_part());
    }

    fn run(&self) {
        while let Some(part) = self.next() {
            let group = &part.group;
            if !group.is_cancelled() {
                let batch = Batch { direction: part.direction, pieces: &part.pieces, notice: None };
                let moved = self.run_batch(&batch, group);
                let moved = moved.and_then(|()| match group.moved() {
                    Some(notice) => {
                        let batch = Batch { pieces: &[], notice: Some(notice), ..batch };
                        self.run_batch(&batch, group)
                    }
                    None => Ok(()),
                });
                if let Err(error) = moved {
                    group.fail(self.final_error(error));
                }
            }
            group.end_part();
        }
    }

    /// A deadline is no end of a batch for its ticket, and a part that passed one is not tried
    /// again.
    fn final_error(&self, error: TransportError) -> TransportError {
        match error {
            TransportError::Deadline { .. } => {
                let peer = &self.stream.peer().address;
                TransportError::lost(peer, "a part of a batch could not be sent")
            }
            other => other,
        }
    }

    /// The next part; `None` once the lane closes and none waits.
    fn next(&self) -> Option<Part> {
        let mut queue = self.lock();
        loop {
            if let Some(part) = queue.parts.pop_front() {
                self.changed.notify_all();
                return Some(part);
            }
            if queue.is_closing {
                return None;
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Posts a batch and waits for its end, or until its group is cancelled.
    fn run_batch(&self, batch: &Batch<'_>, group: &Group) -> Result<(), TransportError> {
        let deadline = Deadline::after(&SystemClock, POST_TIMEOUT);
        let until = Until { deadline, flag: Some(&group.is_cancelled) };
        let mut ticket = match self.stream.post_until(batch, until) {
            // What was sent of it ends in the background.
            Err(TransportError::Deadline { .. }) if group.is_cancelled() => return Ok(()),
            posted => posted?,
        };
        loop {
            match ticket.wait(Deadline::after(&SystemClock, LOOK)) {
                Err(TransportError::Deadline { .. }) if group.is_cancelled() => {
                    ticket.cancel(Deadline::after(&SystemClock, CANCEL_TIMEOUT));
                    return Ok(());
                }
                Err(TransportError::Deadline { .. }) => {}
                ended => return ended,
            }
        }
    }
}
