//! Threads for calls that may never come back, so that nobody who has a deadline makes them.
//!
//! A call that is late is left with its thread and all that was given to it, buffers above all,
//! until it ends; how many there are is bounded.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_block::{Clock, Deadline};

use super::StageError;

/// How often a wait looks whether it should end for a reason that nobody announces.
const RECHECK: Duration = Duration::from_millis(20);
/// What a stage gets beyond the deadline to say itself what was late.
const GRACE: Duration = Duration::from_millis(20);

type Job = Box<dyn FnOnce() + Send>;

/// At most so many calls at once, each on a thread that is started when it is first needed.
pub(crate) struct CallThreads {
    shared: Arc<Shared>,
    calls_max: usize,
    clock: Arc<dyn Clock>,
}

/// How long a call is waited for.
#[derive(Clone, Copy)]
pub(crate) struct Patience<'a> {
    pub(crate) deadline: Deadline,
    /// Set when nobody waits any longer, whatever the deadline says.
    pub(crate) is_over: &'a AtomicBool,
    /// Whether the stage is shed when the call takes too long.
    pub(crate) is_watched: bool,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
    freed: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    running: Vec<Running>,
    next_number: u64,
    threads: usize,
    idle: usize,
    is_closed: bool,
}

/// A call that has not ended.
struct Running {
    number: u64,
    began: Duration,
    is_watched: bool,
    /// Its caller has given up.
    is_stuck: bool,
    /// It was told of as hanging.
    is_told: bool,
}

/// Where a call's result is left for its caller.
struct Answer<T> {
    result: Mutex<Given<T>>,
    ready: Condvar,
}

enum Given<T> {
    NotYet,
    Here(T),
    Panicked,
    /// The caller does not wait any longer.
    Abandoned,
}

impl CallThreads {
    pub(crate) fn new(calls_max: usize, clock: Arc<dyn Clock>) -> Self {
        Self { shared: Arc::default(), calls_max, clock }
    }

    /// Makes a call and waits for its result. One that comes later goes to `late`. A call whose
    /// patience is over before it begins is not made at all: nobody would know what it did.
    pub(crate) fn call<T: Send + 'static>(
        &self,
        patience: Patience<'_>,
        work: impl FnOnce() -> T + Send + 'static,
        late: impl FnOnce(T) + Send + 'static,
    ) -> Result<T, StageError> {
        let mut queue = self.wait_for_thread(patience)?;
        let answer = Arc::new(Answer { result: Mutex::new(Given::NotYet), ready: Condvar::new() });
        let number = queue.next_number;
        let (shared, given) = (Arc::clone(&self.shared), Arc::clone(&answer));
        queue.jobs.push_back(Box::new(move || {
            // What unwinds is the stage's own affair: the store shares nothing with it that could
            // be torn.
            let result = catch_unwind(AssertUnwindSafe(work)).ok();
            // Before its caller goes on: it may want the thread again.
            shared.end(number);
            given.give(result, late);
        }));
        // With as many threads as calls, one of them is done with its call and comes for this one.
        let needs_thread = queue.idle < queue.jobs.len() && queue.threads < self.calls_max;
        if needs_thread && let Err(error) = self.start_thread(&mut queue) {
            queue.jobs.pop_back();
            return Err(StageError::Failed(Arc::new(error)));
        }
        queue.next_number += 1;
        queue.running.push(Running {
            number,
            began: self.clock.monotonic(),
            is_watched: patience.is_watched,
            is_stuck: false,
            is_told: false,
        });
        drop(queue);
        self.shared.wake.notify_one();
        self.wait(&answer, number, patience)
    }

    /// Waits until a thread is free for one more call. When all are stuck, that is not soon.
    fn wait_for_thread(&self, patience: Patience<'_>) -> Result<MutexGuard<'_, Queue>, StageError> {
        let mut queue = self.shared.lock();
        loop {
            if patience.is_over.load(Ordering::Acquire) {
                return Err(StageError::Shed);
            }
            if queue.running.len() < self.calls_max {
                return Ok(queue);
            }
            if queue.running.iter().all(|call| call.is_stuck) {
                return Err(StageError::Shed);
            }
            let left = patience.deadline.remaining(&*self.clock);
            if left.is_zero() {
                return Err(StageError::Timeout);
            }
            let waited = self.shared.freed.wait_timeout(queue, left.min(RECHECK));
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn start_thread(&self, queue: &mut Queue) -> std::io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let builder = std::thread::Builder::new().name("cascade-stage".to_owned());
        // Detached: one that is stuck is waited for by nobody.
        drop(builder.spawn(move || shared.work())?);
        queue.threads += 1;
        Ok(())
    }

    fn wait<T>(
        &self,
        answer: &Answer<T>,
        number: u64,
        patience: Patience<'_>,
    ) -> Result<T, StageError> {
        let mut result = answer.lock();
        let mut is_late = false;
        loop {
            match std::mem::replace(&mut *result, Given::NotYet) {
                Given::Here(value) => return Ok(value),
                Given::Panicked => return Err(StageError::NoAnswer),
                Given::NotYet | Given::Abandoned => {}
            }
            let is_over = patience.is_over.load(Ordering::Acquire);
            if is_late || is_over {
                *result = Given::Abandoned;
                drop(result);
                self.shared.mark_stuck(number);
                return Err(if is_over { StageError::Shed } else { StageError::Timeout });
            }
            let left = patience.deadline.remaining(&*self.clock);
            is_late = left.is_zero();
            let time = if is_late { GRACE } else { left.min(RECHECK) };
            let waited = answer.ready.wait_timeout(result, time);
            result = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Calls that go on although nobody waits for them.
    pub(crate) fn stuck_calls(&self) -> u64 {
        self.shared.lock().running.iter().filter(|call| call.is_stuck).count() as u64
    }

    /// Whether a watched call has come to last as long as `patience`; of each it is said once.
    pub(crate) fn has_hung(&self, patience: Duration) -> bool {
        let now = self.clock.monotonic();
        let mut has_hung = false;
        for call in self.shared.lock().running.iter_mut().filter(|call| call.is_watched) {
            let hangs = now.saturating_sub(call.began) >= patience;
            has_hung |= hangs && !call.is_told;
            call.is_told |= hangs;
        }
        has_hung
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut queue = self.lock();
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                drop(queue);
                job();
                queue = self.lock();
            } else if queue.is_closed {
                queue.threads -= 1;
                return;
            } else {
                queue.idle += 1;
                queue = self.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
                queue.idle -= 1;
            }
        }
    }

    fn end(&self, number: u64) {
        self.lock().running.retain(|call| call.number != number);
        self.freed.notify_all();
    }

    fn mark_stuck(&self, number: u64) {
        if let Some(call) = self.lock().running.iter_mut().find(|call| call.number == number) {
            call.is_stuck = true;
        }
    }
}

impl<T> Answer<T> {
    fn lock(&self) -> MutexGuard<'_, Given<T>> {
        self.result.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves a result, nothing for a panic; when nobody waits, it goes to `late`.
    fn give(&self, result: Option<T>, late: impl FnOnce(T)) {
        let mut given = self.lock();
        if matches!(*given, Given::Abandoned) {
            drop(given);
            if let Some(result) = result {
                late(result);
            }
            return;
        }
        // Before its caller goes on: a store that it closes is not to live on in here.
        drop(late);
        *given = result.map_or(Given::Panicked, Given::Here);
        self.ready.notify_one();
    }
}

impl Drop for CallThreads {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.wake.notify_all();
    }
}

impl fmt::Debug for CallThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallThreads").field("calls_max", &self.calls_max).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
