//! Threads for calls that may never return, so that callers keep their deadlines.
//!
//! A call that is late keeps its thread and everything that was passed to it, buffers above all,
//! until it ends. Both the number of threads and the number of late calls are bounded.

mod cancel;
mod slot;
mod started;

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::thread::Builder;
use crate::{Clock, Condvar, Deadline, Mutex, MutexGuard, Plant, is_planted};

use cancel::Waiting;
use slot::{Slot, Unanswered};

pub use cancel::Cancel;
pub use started::StartedCall;

/// Takes the queue and its own number.
type Work = Box<dyn FnOnce(&Shared, u64) + Send>;

/// Makes calls on threads that start when there is work, and end when this value is dropped.
///
/// A thread whose call hangs is detached and ends when the call returns.
pub struct Calls {
    shared: Arc<Shared>,
    thread_name: &'static str,
    threads_max: usize,
    clock: Arc<dyn Clock>,
}

/// When to stop waiting for a call.
#[derive(Debug, Clone, Copy)]
pub struct CallLimit<'a> {
    /// When the call is late.
    pub deadline: Deadline,
    /// Time after the deadline in which the call can still report a time-out of its own.
    pub grace: Duration,
    /// Ends the wait before the deadline.
    pub cancel: Option<&'a Cancel>,
    /// Whether [`Calls::has_hung`] looks at the call.
    pub is_watched: bool,
    /// Fail at once while the late calls occupy all threads. Else the call waits for one of them
    /// to end.
    pub refuse_if_stuck: bool,
}

/// Why a call has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The deadline passed. A call that had not begun by then never does.
    #[error("the call did not return before its deadline")]
    TimedOut,
    /// The wait was cancelled. A call that had not begun by then never does.
    #[error("the wait for the call was cancelled")]
    Cancelled,
    /// Late calls occupy all threads.
    #[error("calls that are late occupy all threads")]
    AllStuck,
    /// The call panicked.
    #[error("the call panicked")]
    Panicked,
    /// No thread could be started for the call.
    #[error("no thread could be started for the call")]
    NoThread(#[source] io::Error),
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    running: Vec<RunningCall>,
    next_number: u64,
    threads: usize,
    idle: usize,
    is_closed: bool,
}

struct Job {
    number: u64,
    work: Work,
    call: Option<QueuedCall>,
}

/// What the queue knows about a call that somebody waits for.
struct QueuedCall {
    slot: Arc<dyn Waiting>,
    is_watched: bool,
    refuse_if_stuck: bool,
}

struct RunningCall {
    number: u64,
    began: Duration,
    is_watched: bool,
    /// Its caller has stopped waiting.
    is_stuck: bool,
    /// It was reported as hung.
    is_reported: bool,
}

impl CallLimit<'_> {
    /// Waits until the deadline, however many other calls are late.
    pub fn until(deadline: Deadline) -> Self {
        let grace = Duration::ZERO;
        Self { deadline, grace, cancel: None, is_watched: false, refuse_if_stuck: false }
    }
}

/// The work of a thread that makes a call and passes the result to `slot`, or to `late` if its
/// caller has stopped waiting.
fn job_of<T: Send + 'static>(
    slot: Arc<Slot<T>>,
    work: impl FnOnce() -> T + Send + 'static,
    late: impl FnOnce(T) + Send + 'static,
) -> Work {
    Box::new(move |shared, number| {
        if !slot.begin() {
            return shared.end(number);
        }
        // The caller shares no state with the call that a panic could leave inconsistent.
        // `None` after a panic: the caller gets `CallError::Panicked`, and the hook reports it.
        let result = catch_unwind(AssertUnwindSafe(work)).ok();
        // Before the caller continues: it may need the thread again.
        shared.end(number);
        slot.deliver(result, late);
    })
}

impl Calls {
    /// At most `threads_max` threads with this name. None is started yet.
    pub fn new(thread_name: &'static str, threads_max: usize, clock: Arc<dyn Clock>) -> Self {
        Self { shared: Arc::default(), thread_name, threads_max: threads_max.max(1), clock }
    }

    /// The maximum number of threads.
    pub fn threads_max(&self) -> usize {
        self.threads_max
    }

    /// Queues work without waiting for its result. Returns an error if no thread could be started
    /// for it.
    pub fn submit(&self, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        self.push(Box::new(move |_, _| work()), None).map(drop)
    }

    /// Makes a call and waits for its result. A result that is late goes to `late`. What was passed
    /// is dropped before this returns, unless the call is late.
    pub fn call<T: Send + 'static>(
        &self,
        limit: CallLimit<'_>,
        work: impl FnOnce() -> T + Send + 'static,
        late: impl FnOnce(T) + Send + 'static,
    ) -> Result<T, CallError> {
        let slot = Arc::new(Slot::new());
        let waiting = Arc::clone(&slot) as Arc<dyn Waiting>;
        // Before the call is queued: one that is refused is never made.
        let _registered = match limit.cancel {
            Some(cancel) => Some(cancel.register(&waiting).ok_or(CallError::Cancelled)?),
            None => None,
        };
        if limit.refuse_if_stuck && self.shared.lock().is_all_stuck(self.threads_max) {
            return Err(CallError::AllStuck);
        }
        let call = QueuedCall {
            slot: waiting,
            is_watched: limit.is_watched,
            refuse_if_stuck: limit.refuse_if_stuck,
        };
        let job = job_of(Arc::clone(&slot), work, late);
        let number = self.push(job, Some(call)).map_err(CallError::NoThread)?;
        let until = Deadline::at(limit.deadline.time().saturating_add(limit.grace));
        slot.wait(until, limit.cancel, &*self.clock).map_err(|why| match why {
            Unanswered::TimedOut { has_begun } => {
                self.shared.abandon(number, has_begun, self.threads_max);
                CallError::TimedOut
            }
            Unanswered::Cancelled { has_begun } => {
                self.shared.abandon(number, has_begun, self.threads_max);
                CallError::Cancelled
            }
            Unanswered::Refused => CallError::AllStuck,
            Unanswered::Panicked => CallError::Panicked,
        })
    }

    /// Number of calls still running after their callers stopped waiting.
    pub fn stuck_calls(&self) -> u64 {
        self.shared.lock().running.iter().filter(|call| call.is_stuck).count() as u64
    }

    /// Whether a watched call has lasted as long as `limit`; each call is reported once.
    pub fn has_hung(&self, limit: Duration) -> bool {
        let now = self.clock.monotonic();
        let mut has_hung = false;
        for call in self.shared.lock().running.iter_mut().filter(|call| call.is_watched) {
            let hangs = now.saturating_sub(call.began) >= limit;
            has_hung |= hangs && !call.is_reported;
            call.is_reported |= hangs;
        }
        has_hung
    }

    fn push(&self, work: Work, call: Option<QueuedCall>) -> io::Result<u64> {
        let mut queue = self.shared.lock();
        let number = queue.next_number;
        queue.next_number += 1;
        queue.jobs.push_back(Job { number, work, call });
        // A thread counts as idle until it runs again, even if it was notified for an earlier job.
        // So the idle threads are compared with all waiting jobs.
        if queue.idle < queue.jobs.len()
            && queue.threads < self.threads_max
            && let Err(error) = self.start_thread(&mut queue)
            && queue.threads == 0
        {
            // Still the last job, because the lock has been held since the push. With a thread
            // that runs, the job would be executed later.
            let refused = queue.jobs.pop_back();
            drop(queue);
            drop(refused);
            return Err(error);
        }
        drop(queue);
        self.shared.wake.notify_one();
        Ok(number)
    }

    fn start_thread(&self, queue: &mut Queue) -> io::Result<()> {
        let (shared, clock) = (Arc::clone(&self.shared), Arc::clone(&self.clock));
        let builder = Builder::new().name(self.thread_name.to_owned());
        // Detached: nothing waits for a stuck thread.
        drop(builder.spawn(move || shared.work(&*clock))?);
        queue.threads += 1;
        Ok(())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The life of a thread.
    fn work(&self, clock: &dyn Clock) {
        let mut queue = self.lock();
        loop {
            // Before `is_closed`: jobs that were queued before the drop are still executed.
            if let Some(job) = queue.jobs.pop_front() {
                if let Some(call) = &job.call {
                    queue.running.push(RunningCall {
                        number: job.number,
                        began: clock.monotonic(),
                        is_watched: call.is_watched,
                        is_stuck: false,
                        is_reported: false,
                    });
                }
                drop(queue);
                // A thread that ended here would never be replaced: after as many panics as there
                // are threads no job would be executed. The panic hook has printed the message.
                drop(catch_unwind(AssertUnwindSafe(|| (job.work)(self, job.number))));
                queue = self.lock();
            } else if queue.is_closed {
                queue.threads -= 1;
                return;
            } else {
                queue.idle += 1;
                if is_planted(Plant::LostWakeUp) {
                    drop(queue);
                    queue = self.lock();
                }
                queue = self.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
                queue.idle -= 1;
            }
        }
    }

    fn end(&self, number: u64) {
        self.lock().running.retain(|call| call.number != number);
    }

    /// The caller of a call has stopped waiting.
    fn abandon(&self, number: u64, has_begun: bool, threads_max: usize) {
        let mut queue = self.lock();
        // A call that has begun may have ended since; then it is no longer listed.
        if let Some(call) = queue.running.iter_mut().find(|call| call.number == number) {
            call.is_stuck = has_begun;
        }
        let is_all_stuck = queue.is_all_stuck(threads_max);
        let is_dropped = |job: &Job| {
            let is_refused = job.call.as_ref().is_some_and(|call| call.refuse_if_stuck);
            job.number == number || (is_all_stuck && is_refused)
        };
        let (dropped, kept) = queue.jobs.drain(..).partition::<Vec<_>, _>(is_dropped);
        queue.jobs = kept.into();
        drop(queue);
        for call in dropped.iter().filter_map(|job| job.call.as_ref()) {
            call.slot.refuse();
        }
    }
}

impl Queue {
    fn is_all_stuck(&self, threads_max: usize) -> bool {
        self.running.len() >= threads_max && self.running.iter().all(|call| call.is_stuck)
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.wake.notify_all();
    }
}

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Calls")
            .field("thread_name", &self.thread_name)
            .field("threads_max", &self.threads_max)
            .finish_non_exhaustive()
    }
}
