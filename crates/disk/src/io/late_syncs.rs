//! Syncs whose caller has gone at its deadline.

use std::io;
use std::sync::{Arc, PoisonError};

use cascade_runtime::{CallLimit, Calls, Deadline, Mutex, MutexGuard};

use super::io_error;

/// Syncs of one file or directory that run although their caller has gone at its deadline. The
/// kernel reports what it has lost to one sync only: without this, a late sync would take the error
/// with it, and the next one would succeed.
#[derive(Debug, Default)]
pub struct LateSyncs(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    running: u64,
    /// One has failed, and no caller knows.
    has_failed: bool,
}

impl LateSyncs {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The caller of a sync in flight goes: [`Self::end`] follows.
    pub(super) fn begin(&self) {
        self.state().running += 1;
    }

    /// A sync that its caller has left has ended.
    pub(super) fn end(&self, has_failed: bool) {
        let mut state = self.state();
        // A ring that a panic drops has not left its syncs.
        state.running = state.running.saturating_sub(1);
        state.has_failed |= has_failed;
    }

    /// The result of a sync that succeeded in time: an error if a late one has failed before, which
    /// is then reported, or is still running.
    pub(super) fn result(&self) -> io::Result<()> {
        let mut state = self.state();
        if std::mem::take(&mut state.has_failed) {
            return Err(io::Error::other("an earlier sync has failed after its deadline"));
        }
        if state.running > 0 { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
    }

    /// Makes a sync on a worker thread and waits for its result until the deadline.
    pub(super) fn call(
        self: &Arc<Self>,
        workers: &Calls,
        deadline: Deadline,
        sync: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> io::Result<()> {
        let made = MadeSync { syncs: Arc::clone(self), progress: Arc::default() };
        let progress = Arc::clone(&made.progress);
        let late = |(result, made): (io::Result<()>, MadeSync)| {
            made.syncs.state().has_failed |= result.is_err();
        };
        let limit = CallLimit::until(deadline);
        match workers.call(limit, move || (sync(), made), late) {
            Ok((result, _made)) => result.and_then(|()| self.result()),
            Err(error) => {
                let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
                if !progress.has_ended {
                    progress.is_left = true;
                    self.begin();
                }
                Err(io_error(error))
            }
        }
    }
}

/// A sync that a worker makes, until this is dropped: by its caller with the result, or by who
/// drops the result or the work.
struct MadeSync {
    syncs: Arc<LateSyncs>,
    progress: Arc<Mutex<Progress>>,
}

#[derive(Default)]
struct Progress {
    /// Its caller has gone before it ended.
    is_left: bool,
    has_ended: bool,
}

impl Drop for MadeSync {
    fn drop(&mut self) {
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress.has_ended = true;
        if progress.is_left {
            self.syncs.end(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use cascade_runtime::{SystemClock, thread};

    use super::*;
    use crate::conformance::deadline;

    /// One thread, so that calls run one after the other.
    fn workers() -> Calls {
        Calls::new("test", 1, Arc::new(SystemClock))
    }

    fn short() -> Deadline {
        Deadline::after(&SystemClock, Duration::from_millis(1))
    }

    #[test]
    fn the_error_of_a_late_sync_of_a_directory_is_reported_by_the_next_one() {
        for has_failed in [true, false] {
            let (workers, syncs) = (workers(), Arc::<LateSyncs>::default());
            let (begun, has_begun) = mpsc::channel();
            let (go, wait) = mpsc::channel::<()>();
            let wait = Arc::new(Mutex::new(wait));
            // One whose caller goes before it has begun is never made.
            while has_begun.try_recv().is_err() {
                let (begun, wait) = (begun.clone(), Arc::clone(&wait));
                let late = syncs.call(&workers, short(), move || {
                    begun.send(()).unwrap();
                    wait.lock().unwrap().recv().unwrap();
                    if has_failed { Err(io::ErrorKind::Other.into()) } else { Ok(()) }
                });
                assert_eq!(late.unwrap_err().kind(), io::ErrorKind::TimedOut);
            }
            assert_eq!(syncs.result().unwrap_err().kind(), io::ErrorKind::TimedOut, "it runs");
            go.send(()).unwrap();
            assert_eq!(syncs.call(&workers, deadline(), || Ok(())).is_err(), has_failed);
            syncs.call(&workers, deadline(), || Ok(())).unwrap();
        }
    }

    #[test]
    fn a_sync_that_never_began_has_lost_nothing() {
        let (workers, syncs) = (workers(), Arc::<LateSyncs>::default());
        let (go, wait) = mpsc::channel::<()>();
        workers.submit(move || wait.recv().unwrap()).unwrap();
        let late = syncs.call(&workers, short(), || Err(io::ErrorKind::Other.into()));
        assert_eq!(late.unwrap_err().kind(), io::ErrorKind::TimedOut);
        go.send(()).unwrap();
        syncs.call(&workers, deadline(), || Ok(())).unwrap();
    }

    /// One that ran beside another's counted as late.
    #[test]
    fn syncs_of_callers_that_wait_delay_no_other() {
        let workers = Arc::new(Calls::new("test", 2, Arc::new(SystemClock)));
        let syncs = Arc::<LateSyncs>::default();
        let (begun, has_begun) = mpsc::channel();
        let (go, wait) = mpsc::channel::<()>();
        let (others, its) = (Arc::clone(&workers), Arc::clone(&syncs));
        let caller = thread::spawn(move || {
            its.call(&others, deadline(), move || {
                begun.send(()).unwrap();
                wait.recv().unwrap();
                Ok(())
            })
        });
        has_begun.recv().unwrap();
        syncs.call(&workers, deadline(), || Ok(())).unwrap();
        go.send(()).unwrap();
        caller.join().unwrap().unwrap();
    }

    #[test]
    fn an_error_in_time_is_reported_once() {
        let (workers, syncs) = (workers(), Arc::<LateSyncs>::default());
        let failed = syncs.call(&workers, deadline(), || Err(io::ErrorKind::Other.into()));
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::Other);
        syncs.call(&workers, deadline(), || Ok(())).unwrap();
    }
}
