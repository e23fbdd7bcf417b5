//! One of several streams: its connection, and the thread that moves its parts of batches.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use cascade_runtime::thread::Builder;
use cascade_runtime::{Condvar, Deadline, Mutex, MutexGuard, SystemClock};

use super::group::Group;
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
    /// What is left of it.
    step: Step,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Bytes,
    /// The bytes of all parts have moved.
    Notice,
}

impl Part {
    pub(super) fn new(direction: Direction, pieces: Vec<Piece>, group: &Arc<Group>) -> Self {
        Self { direction, pieces, group: Arc::clone(group), step: Step::Bytes }
    }

    pub(super) fn fail(self, error: TransportError) {
        self.group.fail(error);
        self.group.end_part();
    }
}

/// Takes a part whose stream was lost: has another stream move it, or lets it fail.
pub(super) type Again = dyn Fn(Part, &Arc<Shared>, TransportError) + Send;

/// A stream with its thread, which ends when this is dropped.
#[derive(Debug)]
pub(super) struct Lane(Arc<Shared>);

/// What a lane, its thread and tickets share.
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
    pub(super) fn start(
        stream: StreamConnection,
        again: Box<Again>,
    ) -> Result<Self, TransportError> {
        let (queue, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { stream: Arc::new(stream), queue, changed });
        let of_thread = Arc::clone(&shared);
        let builder = Builder::new().name("transport-stream".to_owned());
        builder.spawn(move || of_thread.run(&again)).map_err(|error| {
            TransportError::Unavailable(format!("no thread for another stream: {error}"))
        })?;
        Ok(Self(shared))
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.0
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // The part that moves is cut off. The thread gives those that wait back, and ends.
        self.0.stream.close();
        self.0.lock().is_closing = true;
        self.0.changed.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn stream(&self) -> &StreamConnection {
        &self.stream
    }

    /// Gives a part to the thread. Waits while many wait.
    ///
    /// # Errors
    /// The part, if it was not given, and why.
    pub(super) fn push(
        &self,
        part: Part,
        deadline: Deadline,
    ) -> Result<(), (Part, TransportError)> {
        let mut queue = self.lock();
        while queue.parts.len() >= PARTS_MAX && !queue.is_closing {
            let left = deadline.remaining(&SystemClock);
            if left.is_zero() {
                return Err((part, TransportError::Deadline { what: "waiting for other batches" }));
            }
            let waited = self.changed.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        self.add(queue, part)
    }

    /// As `push`, also where many wait: threads that wait for each other would not end.
    pub(super) fn push_again(&self, part: Part) -> Result<(), (Part, TransportError)> {
        self.add(self.lock(), part)
    }

    fn add(
        &self,
        mut queue: MutexGuard<'_, Queue>,
        part: Part,
    ) -> Result<(), (Part, TransportError)> {
        if queue.is_closing {
            let peer = &self.stream.peer().address;
            return Err((part, TransportError::lost(peer, "the stream was closed")));
        }
        queue.parts.push_back(part);
        self.changed.notify_all();
        Ok(())
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

    fn run(self: &Arc<Self>, again: &Again) {
        while let Some(mut part) = self.next() {
            match self.move_part(&mut part) {
                Ok(()) => part.group.end_part(),
                Err(error @ TransportError::Lost { .. }) => again(part, self, error),
                Err(error) => part.fail(error),
            }
        }
    }

    /// Moves what is left of a part, and after the last one sends the notice.
    fn move_part(&self, part: &mut Part) -> Result<(), TransportError> {
        let group = &part.group;
        if group.is_cancelled() {
            return Ok(());
        }
        let batch = Batch { direction: part.direction, pieces: &part.pieces, notice: None };
        if part.step == Step::Bytes {
            self.run_batch(&batch, group)?;
            if !group.moved() {
                return Ok(());
            }
            part.step = Step::Notice;
        }
        match group.due_notice() {
            Some(notice) => {
                self.run_batch(&Batch { pieces: &[], notice: Some(notice), ..batch }, group)
            }
            None => Ok(()),
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
        let until = Until { deadline, flag: Some(group.flag()) };
        let mut ticket = match self.stream.post_until(batch, until) {
            // What was sent of it ends in the background.
            Err(TransportError::Deadline { .. }) if group.is_cancelled() => return Ok(()),
            // A deadline is no end of a batch for its ticket.
            Err(TransportError::Deadline { .. }) => return Err(self.too_slow()),
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

    fn too_slow(&self) -> TransportError {
        TransportError::lost(&self.stream.peer().address, "a part of a batch could not be sent")
    }
}
