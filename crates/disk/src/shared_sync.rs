//! One sync for all who wait for one: those who come during a sync share the next.

use std::sync::PoisonError;

use cascade_runtime::{Clock, Condvar, Deadline, Mutex, MutexGuard};

use crate::DiskError;

/// Lets one caller sync at a time, for all who came before it began.
#[derive(Debug, Default)]
pub(crate) struct SharedSync {
    rounds: Mutex<Rounds>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct Rounds {
    /// Number of rounds that have begun.
    begun: u64,
    is_running: bool,
    /// Callers that wait for a round of another one.
    waiting: usize,
    /// The number and the result of the last round that says something to all who waited for it.
    last: Option<(u64, Result<(), DiskError>)>,
}

/// A round of this caller. Also ends if the sync panics, without a result.
struct Round<'a> {
    shared: &'a SharedSync,
    number: u64,
    result: Option<Result<(), DiskError>>,
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        let mut rounds = self.shared.lock();
        rounds.is_running = false;
        if let Some(result) = self.result.take() {
            rounds.last = Some((self.number, result));
        }
        drop(rounds);
        self.shared.ended.notify_all();
    }
}

impl SharedSync {
    fn lock(&self) -> MutexGuard<'_, Rounds> {
        self.rounds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the result of a sync that began after this call, made by this thread or by another.
    /// `late` is the error of a caller whose deadline passes while it waits.
    ///
    /// An error is shared, too: what a failed sync has lost, no later one can save. Not so a
    /// time-out, since each caller has a deadline of its own.
    pub(crate) fn run(
        &self,
        deadline: Deadline,
        clock: &dyn Clock,
        late: impl FnOnce() -> DiskError,
        sync: impl FnOnce() -> Result<(), DiskError>,
    ) -> Result<(), DiskError> {
        let mut rounds = self.lock();
        // A round that has begun may have passed by what this caller wrote.
        let first = rounds.begun + 1;
        while rounds.is_running {
            if deadline.has_passed(clock) {
                return Err(late());
            }
            rounds.waiting += 1;
            let waited = self.ended.wait_until(rounds, deadline, clock);
            rounds = waited.unwrap_or_else(PoisonError::into_inner).0;
            rounds.waiting -= 1;
            if let Some((_, result)) = rounds.last.as_ref().filter(|(number, _)| *number >= first) {
                return result.clone();
            }
        }
        rounds.begun += 1;
        rounds.is_running = true;
        let mut round = Round { shared: self, number: rounds.begun, result: None };
        drop(rounds);
        let result = sync();
        if !matches!(result, Err(DiskError::Timeout { .. })) {
            round.result = Some(result.clone());
        }
        drop(round);
        result
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::path::{Path, PathBuf};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, mpsc};
    use std::time::Duration;

    use cascade_runtime::{SystemClock, thread};

    use super::*;

    fn late() -> DiskError {
        DiskError::Timeout { operation: "sync", path: PathBuf::new() }
    }

    fn run(
        shared: &SharedSync,
        sync: impl FnOnce() -> Result<(), DiskError>,
    ) -> Result<(), DiskError> {
        let deadline = Deadline::after(&SystemClock, Duration::from_secs(60));
        shared.run(deadline, &SystemClock, late, sync)
    }

    fn wait_until(what: &str, condition: impl Fn() -> bool) {
        let limit = Deadline::after(&SystemClock, Duration::from_secs(60));
        while !condition() {
            assert!(!limit.has_passed(&SystemClock), "timed out waiting until {what}");
            thread::yield_now();
        }
    }

    /// Makes a first sync, lets five callers come during it, and returns the number of syncs and
    /// the results of the five. `next` is the result of a sync by the number of those before it.
    fn five_during_one(
        next: fn(usize) -> Result<(), DiskError>,
    ) -> (usize, Vec<Result<(), DiskError>>) {
        let (shared, syncs) = (Arc::<SharedSync>::default(), Arc::<AtomicUsize>::default());
        let (go, wait) = mpsc::channel();
        let (its, count) = (Arc::clone(&shared), Arc::clone(&syncs));
        let first = thread::spawn(move || {
            run(&its, || {
                count.fetch_add(1, Ordering::Relaxed);
                wait.recv().map_err(|_| late())
            })
        });
        wait_until("the first sync runs", || shared.lock().is_running);
        let others: Vec<_> = (0..5)
            .map(|_| {
                let (its, count) = (Arc::clone(&shared), Arc::clone(&syncs));
                thread::spawn(move || run(&its, || next(count.fetch_add(1, Ordering::Relaxed))))
            })
            .collect();
        wait_until("the others wait for it", || shared.lock().waiting == 5);
        go.send(()).expect("the first sync waits");
        assert!(first.join().expect("no panic").is_ok());
        let results = others.into_iter().map(|other| other.join().expect("no panic")).collect();
        (syncs.load(Ordering::Relaxed), results)
    }

    /// Each of several callers of flush made a sync and a checkpoint of its own, one after the
    /// other.
    #[test]
    fn callers_that_come_during_a_sync_share_the_next() {
        let (syncs, results) = five_during_one(|_| Ok(()));
        assert_eq!(syncs, 2, "the first had begun before they came");
        assert!(results.iter().all(Result::is_ok));
    }

    #[test]
    fn a_failed_sync_fails_for_all_who_waited_for_it() {
        let (syncs, results) = five_during_one(|_| {
            Err(DiskError::from_io("sync", Path::new("device"), io::Error::other("it failed")))
        });
        assert_eq!(syncs, 2);
        assert!(results.iter().all(|result| matches!(result, Err(DiskError::Io { .. }))));
    }

    #[test]
    fn a_sync_that_is_late_for_its_caller_is_made_again_for_the_others() {
        let (syncs, results) =
            five_during_one(|before| if before == 1 { Err(late()) } else { Ok(()) });
        assert_eq!(syncs, 3);
        let timed_out = results.iter().filter(|result| result.is_err()).count();
        assert_eq!(timed_out, 1, "the caller that made it");
    }

    #[test]
    fn a_caller_waits_until_its_own_deadline() {
        let shared = SharedSync::default();
        let outer = run(&shared, || {
            let inner = shared.run(Deadline::at(Duration::ZERO), &SystemClock, late, || Ok(()));
            assert!(matches!(inner, Err(DiskError::Timeout { .. })));
            Ok(())
        });
        assert!(outer.is_ok());
    }

    #[test]
    fn a_sync_that_panics_ends() {
        let shared = Arc::<SharedSync>::default();
        let its = Arc::clone(&shared);
        let panicked = thread::spawn(move || run(&its, || panic!("on purpose"))).join();
        assert!(panicked.is_err());
        assert!(run(&shared, || Ok(())).is_ok());
    }
}
