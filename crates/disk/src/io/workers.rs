//! A few threads for calls that may hang, so that nobody who has a deadline makes them.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, mpsc};
use std::thread;

use cascade_block::{Clock, Deadline};

type Job = Box<dyn FnOnce() + Send>;

/// Threads that start when there is work and end when this value is dropped.
///
/// A thread that hangs in the kernel is left behind; it ends when the kernel lets it go.
pub struct Workers {
    shared: Arc<Shared>,
    threads_max: usize,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
    /// Calls that go on although their caller has given up.
    stuck: AtomicU64,
}

/// How far a call is: not begun, under way, given up by its caller, or over.
const WAITING: u8 = 0;
const BEGUN: u8 = 1;
const GIVEN_UP: u8 = 2;
const OVER: u8 = 3;

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
    is_closed: bool,
}

impl Workers {
    /// At most that many threads, none yet.
    pub fn new(threads_max: usize) -> Self {
        Self { shared: Arc::default(), threads_max: threads_max.max(1) }
    }

    /// Most threads that there will be.
    pub fn threads_max(&self) -> usize {
        self.threads_max
    }

    /// Calls that go on although their caller has given up.
    pub(super) fn stuck_jobs(&self) -> u64 {
        self.shared.stuck.load(Ordering::Relaxed)
    }

    /// Hands a job over; an error when no thread could be started for it.
    pub(super) fn submit(&self, job: Job) -> io::Result<()> {
        let mut queue = self.shared.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.jobs.push_back(job);
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
                Err(_busy) => {}
            }
        }
        drop(queue);
        self.shared.wake.notify_one();
        Ok(())
    }

    /// Runs a call and waits for it until the deadline; `TimedOut` when it is not back by then.
    /// One that had not begun by then never does.
    pub(super) fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
        deadline: Deadline,
        clock: &dyn Clock,
    ) -> io::Result<T> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let stage = Arc::new(AtomicU8::new(WAITING));
        let (shared, reached) = (Arc::clone(&self.shared), Arc::clone(&stage));
        self.submit(Box::new(move || {
            let begun =
                reached.compare_exchange(WAITING, BEGUN, Ordering::AcqRel, Ordering::Acquire);
            if begun.is_err() {
                return;
            }
            let result = work();
            if reached.swap(OVER, Ordering::AcqRel) == GIVEN_UP {
                shared.stuck.fetch_sub(1, Ordering::Relaxed);
            }
            if sender.send(result).is_err() {
                // The caller's deadline passed; there is nobody to tell.
            }
        }))?;
        loop {
            match receiver.recv_timeout(deadline.remaining(clock)) {
                Ok(result) => return Ok(result),
                Err(mpsc::RecvTimeoutError::Timeout) if !deadline.has_passed(clock) => {}
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    self.shared.stuck.fetch_add(1, Ordering::Relaxed);
                    if stage.swap(GIVEN_UP, Ordering::AcqRel) != BEGUN {
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

impl Shared {
    fn work(&self) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                drop(queue);
                job();
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

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.queue.lock().unwrap_or_else(PoisonError::into_inner).is_closed = true;
        self.shared.wake.notify_all();
    }
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workers").field("threads_max", &self.threads_max).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    use cascade_block::SystemClock;

    use super::*;

    /// An erase that was over removed files that had been written since.
    #[test]
    fn a_call_that_was_given_up_before_it_began_never_begins() {
        let workers = Workers::new(1);
        let (release, hold) = mpsc::channel::<()>();
        workers.submit(Box::new(move || hold.recv().unwrap_or(()))).unwrap();
        let has_begun = Arc::new(AtomicBool::new(false));
        let begins = Arc::clone(&has_begun);
        let soon = Deadline::after(&SystemClock, Duration::from_millis(5));
        let work = move || begins.store(true, Ordering::Release);
        let late = workers.call(work, soon, &SystemClock).unwrap_err();
        assert_eq!((late.kind(), workers.stuck_jobs()), (io::ErrorKind::TimedOut, 0));
        drop(release);
        let later = Deadline::after(&SystemClock, Duration::from_secs(60));
        workers.call(|| (), later, &SystemClock).unwrap();
        assert!(!has_begun.load(Ordering::Acquire));
    }
}
