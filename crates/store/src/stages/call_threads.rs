//! Threads for stage calls that may never return, so that callers can keep their deadlines.
//!
//! A late call keeps its thread and everything that was passed to it, buffers above all, until it
//! ends. The number of calls is bounded.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use cascade_runtime::{Clock, Condvar, Deadline, Mutex, MutexGuard, thread};

use crate::stage::StageError;

/// Poll interval for conditions without a notification.
const RECHECK: Duration = Duration::from_millis(20);
/// Time after the deadline in which a stage can still report a time-out itself.
const GRACE: Duration = Duration::from_millis(20);

type Job = Box<dyn FnOnce() + Send>;

/// At most `calls_max` concurrent calls, each on a thread that is started when first needed.
pub(crate) struct CallThreads {
    shared: Arc<Shared>,
    calls_max: usize,
    clock: Arc<dyn Clock>,
}

/// When to stop waiting for a call.
#[derive(Clone, Copy)]
pub(crate) struct WaitLimit<'a> {
    pub(crate) deadline: Deadline,
    /// Set to end the wait before the deadline.
    pub(crate) is_cancelled: &'a AtomicBool,
    /// Whether a call that takes too long opens the circuit.
    pub(crate) is_watched: bool,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<CallQueue>,
    wake: Condvar,
    freed: Condvar,
}

#[derive(Default)]
struct CallQueue {
    jobs: VecDeque<Job>,
    running: Vec<RunningCall>,
    next_number: u64,
    threads: usize,
    idle: usize,
    is_closed: bool,
}

/// A call in flight.
struct RunningCall {
    number: u64,
    began: Duration,
    is_watched: bool,
    /// Its caller has stopped waiting.
    is_stuck: bool,
    /// It was reported as hung.
    is_reported: bool,
}

/// Passes a call's result to its caller.
struct ResultSlot<T> {
    result: Mutex<SlotState<T>>,
    ready: Condvar,
}

enum SlotState<T> {
    Pending,
    Ready(T),
    Panicked,
    /// The caller has stopped waiting.
    Abandoned,
}

impl CallThreads {
    pub(crate) fn new(calls_max: usize, clock: Arc<dyn Clock>) -> Self {
        Self { shared: Arc::default(), calls_max, clock }
    }

    /// Makes a call and waits for its result. A late result goes to `late`. If the wait is over
    /// before the call begins, the call is not made: its effect would be unknown.
    pub(crate) fn call<T: Send + 'static>(
        &self,
        wait_limit: WaitLimit<'_>,
        work: impl FnOnce() -> T + Send + 'static,
        late: impl FnOnce(T) + Send + 'static,
    ) -> Result<T, StageError> {
        // Held until the call is in `running`: otherwise two callers could take the last free
        // thread.
        let mut queue = self.wait_for_thread(wait_limit)?;
        let slot =
            Arc::new(ResultSlot { result: Mutex::new(SlotState::Pending), ready: Condvar::new() });
        let number = queue.next_number;
        let (shared, filled) = (Arc::clone(&self.shared), Arc::clone(&slot));
        queue.jobs.push_back(Box::new(move || {
            // The store shares no state with the stage that a panic could leave inconsistent.
            let result = catch_unwind(AssertUnwindSafe(work)).ok();
            // Before the caller continues: it may need the thread again.
            shared.end(number);
            filled.deliver(result, late);
        }));
        // With `calls_max` threads, one of them will finish its call and take this job.
        let needs_thread = queue.idle < queue.jobs.len() && queue.threads < self.calls_max;
        if needs_thread && let Err(error) = self.start_thread(&mut queue) {
            // Still the last job, because the lock has been held since the push.
            queue.jobs.pop_back();
            return Err(StageError::Failed(Arc::new(error)));
        }
        queue.next_number += 1;
        queue.running.push(RunningCall {
            number,
            began: self.clock.monotonic(),
            is_watched: wait_limit.is_watched,
            is_stuck: false,
            is_reported: false,
        });
        drop(queue);
        self.shared.wake.notify_one();
        self.wait(&slot, number, wait_limit)
    }

    /// Waits for a free thread. Fails at once when all calls are stuck.
    fn wait_for_thread(
        &self,
        wait_limit: WaitLimit<'_>,
    ) -> Result<MutexGuard<'_, CallQueue>, StageError> {
        let mut queue = self.shared.lock();
        loop {
            if wait_limit.is_cancelled.load(Ordering::Acquire) {
                return Err(StageError::CircuitOpen);
            }
            if queue.running.len() < self.calls_max {
                return Ok(queue);
            }
            if queue.running.iter().all(|call| call.is_stuck) {
                return Err(StageError::CircuitOpen);
            }
            let now = self.clock.monotonic();
            if now >= wait_limit.deadline.time() {
                return Err(StageError::Timeout);
            }
            let until = Deadline::at(wait_limit.deadline.time().min(now.saturating_add(RECHECK)));
            let waited = self.shared.freed.wait_until(queue, until, &*self.clock);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn start_thread(&self, queue: &mut CallQueue) -> std::io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let builder = thread::Builder::new().name("cascade-stage".to_owned());
        // Detached: nothing waits for a stuck thread.
        drop(builder.spawn(move || shared.work())?);
        queue.threads += 1;
        Ok(())
    }

    fn wait<T>(
        &self,
        slot: &ResultSlot<T>,
        number: u64,
        wait_limit: WaitLimit<'_>,
    ) -> Result<T, StageError> {
        let mut result = slot.lock();
        let mut is_late = false;
        loop {
            match std::mem::replace(&mut *result, SlotState::Pending) {
                SlotState::Ready(value) => return Ok(value),
                SlotState::Panicked => return Err(StageError::NoResult),
                SlotState::Pending | SlotState::Abandoned => {}
            }
            let is_cancelled = wait_limit.is_cancelled.load(Ordering::Acquire);
            if is_late || is_cancelled {
                // Under the lock of the slot: a result comes before this and is returned, or after
                // it and goes to `late`. None is lost.
                *result = SlotState::Abandoned;
                drop(result);
                self.shared.mark_stuck(number);
                return Err(if is_cancelled {
                    StageError::CircuitOpen
                } else {
                    StageError::Timeout
                });
            }
            let (now, deadline) = (self.clock.monotonic(), wait_limit.deadline.time());
            // The next round is the last one, and gives the stage `GRACE` to report its own
            // time-out.
            is_late = now >= deadline;
            let until = if is_late {
                now.saturating_add(GRACE)
            } else {
                deadline.min(now.saturating_add(RECHECK))
            };
            let waited = slot.ready.wait_until(result, Deadline::at(until), &*self.clock);
            result = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Number of calls still running after their callers stopped waiting.
    pub(crate) fn stuck_calls(&self) -> u64 {
        self.shared.lock().running.iter().filter(|call| call.is_stuck).count() as u64
    }

    /// Whether a watched call has lasted as long as `limit`; each call is reported once.
    pub(crate) fn has_hung(&self, limit: Duration) -> bool {
        let now = self.clock.monotonic();
        let mut has_hung = false;
        for call in self.shared.lock().running.iter_mut().filter(|call| call.is_watched) {
            let hangs = now.saturating_sub(call.began) >= limit;
            has_hung |= hangs && !call.is_reported;
            call.is_reported |= hangs;
        }
        has_hung
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, CallQueue> {
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
        // The call may have ended since; then it is no longer listed.
        if let Some(call) = self.lock().running.iter_mut().find(|call| call.number == number) {
            call.is_stuck = true;
        }
    }
}

impl<T> ResultSlot<T> {
    fn lock(&self) -> MutexGuard<'_, SlotState<T>> {
        self.result.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes a result to the caller, none for a panic; if the caller has stopped waiting, to
    /// `late`.
    fn deliver(&self, result: Option<T>, late: impl FnOnce(T)) {
        let mut state = self.lock();
        if matches!(*state, SlotState::Abandoned) {
            drop(state);
            if let Some(result) = result {
                late(result);
            }
            return;
        }
        // Before the caller continues: `late` may hold the store alive, which the caller may close.
        drop(late);
        *state = result.map_or(SlotState::Panicked, SlotState::Ready);
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
