//! Worker threads for calls that may hang, so that no thread with a deadline makes them.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, mpsc};
use std::{fmt, io, thread};

use cascade_runtime::{Clock, Deadline};

type Job = Box<dyn FnOnce() + Send>;

/// Threads that start when there is work and end when this value is dropped.
///
/// A thread that hangs in the kernel is detached and ends when its call returns.
pub struct WorkerThreads {
    shared: Arc<SharedJobs>,
    threads_max: usize,
}

#[derive(Default)]
struct SharedJobs {
    queue: Mutex<JobQueue>,
    wake: Condvar,
    /// Calls that still run after the deadline of their caller.
    stuck: AtomicU64,
}

/// States of a call: not started, running, abandoned by its caller after the deadline, complete.
const QUEUED: u8 = 0;
const RUNNING: u8 = 1;
const ABANDONED: u8 = 2;
const DONE: u8 = 3;

/// A running call. Its drop marks the call as complete, also after a panic.
struct RunningCall {
    shared: Arc<SharedJobs>,
    progress: Arc<AtomicU8>,
}

impl Drop for RunningCall {
    fn drop(&mut self) {
        if self.progress.swap(DONE, Ordering::AcqRel) == ABANDONED {
            self.shared.stuck.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[derive(Default)]
struct JobQueue {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
    is_closed: bool,
}

impl WorkerThreads {
    /// At most `threads_max` threads. None is started yet.
    pub fn new(threads_max: usize) -> Self {
        Self { shared: Arc::default(), threads_max: threads_max.max(1) }
    }

    /// The maximum number of threads.
    pub fn threads_max(&self) -> usize {
        self.threads_max
    }

    /// Calls that still run after the deadline of their caller.
    pub(super) fn stuck_jobs(&self) -> u64 {
        self.shared.stuck.load(Ordering::Relaxed)
    }

    /// Queues a job. Returns an error if no thread could be started for it.
    pub(super) fn submit(&self, job: Job) -> io::Result<()> {
        let mut queue = self.shared.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.jobs.push_back(job);
        // A thread counts as idle until it runs again, even if it was notified for an earlier job.
        // So the idle threads are compared with all waiting jobs.
        if queue.idle < queue.jobs.len() && queue.threads < self.threads_max {
            let shared = Arc::clone(&self.shared);
            let started =
                thread::Builder::new().name("cascade-disk".to_owned()).spawn(move || shared.work());
            match started {
                Ok(_detached) => queue.threads += 1,
                Err(error) if queue.threads == 0 => {
                    queue.jobs.pop_back();
                    return Err(error);
                }
                // A running thread executes the job later.
                Err(_busy) => {}
            }
        }
        drop(queue);
        self.shared.wake.notify_one();
        Ok(())
    }

    /// Runs a call on a worker thread and waits until the deadline. Returns `TimedOut` if it has
    /// not finished by then; if it has not started by then, it never does.
    pub(super) fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
        deadline: Deadline,
        clock: &dyn Clock,
    ) -> io::Result<T> {
        // With room for the result the worker never waits for its caller.
        let (sender, receiver) = mpsc::sync_channel(1);
        let progress = Arc::new(AtomicU8::new(QUEUED));
        let (shared, job_progress) = (Arc::clone(&self.shared), Arc::clone(&progress));
        self.submit(Box::new(move || {
            // The start of the job races with the time-out of its caller. If the caller swapped
            // `ABANDONED` in first, the job must not run: the caller has reported a failure.
            let started =
                job_progress.compare_exchange(QUEUED, RUNNING, Ordering::AcqRel, Ordering::Acquire);
            if started.is_err() {
                return;
            }
            let running = RunningCall { shared, progress: job_progress };
            let result = work();
            drop(running);
            if sender.send(result).is_err() {
                // The caller's deadline passed and nothing waits for the result.
            }
        }))?;
        loop {
            match receiver.recv_timeout(deadline.remaining(clock)) {
                Ok(result) => return Ok(result),
                Err(mpsc::RecvTimeoutError::Timeout) if !deadline.has_passed(clock) => {}
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    // Counted before the swap: the job subtracts as soon as it sees `ABANDONED`,
                    // and the counter must not drop below zero.
                    self.shared.stuck.fetch_add(1, Ordering::Relaxed);
                    if progress.swap(ABANDONED, Ordering::AcqRel) != RUNNING {
                        self.shared.stuck.fetch_sub(1, Ordering::Relaxed);
                    }
                    return Err(io::ErrorKind::TimedOut.into());
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(io::Error::other("a file operation panicked"));
                }
            }
        }
    }
}

impl SharedJobs {
    fn work(&self) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            // Before `is_closed`: jobs that were queued before the drop are still executed.
            if let Some(job) = queue.jobs.pop_front() {
                drop(queue);
                // A thread that ended here would never be replaced: after `threads_max` panics no
                // job would be executed. The panic hook has printed the message, and `call` returns
                // an error because the job's sender is dropped.
                drop(catch_unwind(AssertUnwindSafe(job)));
                queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
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
}

impl Drop for WorkerThreads {
    fn drop(&mut self) {
        self.shared.queue.lock().unwrap_or_else(PoisonError::into_inner).is_closed = true;
        self.shared.wake.notify_all();
    }
}

impl fmt::Debug for WorkerThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerThreads")
            .field("threads_max", &self.threads_max)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    use cascade_runtime::SystemClock;

    use super::*;

    /// Each panic ended a thread that was not replaced, so all later calls timed out.
    #[test]
    fn a_panic_fails_its_call_and_costs_no_thread() {
        let workers = WorkerThreads::new(1);
        let later = || Deadline::after(&SystemClock, Duration::from_secs(10));
        for _ in 0..3 {
            let work = || -> u8 { panic!("on purpose") };
            let failed = workers.call(work, later(), &SystemClock).unwrap_err();
            assert_eq!(failed.kind(), io::ErrorKind::Other, "{failed}");
            assert_eq!(workers.call(|| 7, later(), &SystemClock).unwrap(), 7);
        }
        assert_eq!(workers.stuck_jobs(), 0);
    }

    /// An erase that had timed out removed files that were written later.
    #[test]
    fn a_call_that_times_out_before_it_starts_never_starts() {
        let workers = WorkerThreads::new(1);
        let (release, hold) = mpsc::channel::<()>();
        workers.submit(Box::new(move || hold.recv().unwrap_or(()))).unwrap();
        let has_started = Arc::new(AtomicBool::new(false));
        let starts = Arc::clone(&has_started);
        let soon = Deadline::after(&SystemClock, Duration::from_millis(5));
        let work = move || starts.store(true, Ordering::Release);
        let timed_out = workers.call(work, soon, &SystemClock).unwrap_err();
        assert_eq!((timed_out.kind(), workers.stuck_jobs()), (io::ErrorKind::TimedOut, 0));
        drop(release);
        let later = Deadline::after(&SystemClock, Duration::from_secs(60));
        workers.call(|| (), later, &SystemClock).unwrap();
        assert!(!has_started.load(Ordering::Acquire));
    }
}
