//! A lock and a condition variable over the kernel's futexes.
//!
//! All their state is in the words below. A library that keeps its waiting threads in a table of
//! the process does not survive a `fork`: the child has the table, not the threads, and its new
//! threads get the memory of the old ones. Wake-ups were lost in children that way. The algorithms
//! are those of `std`, whose lock has no wait with a time limit.
#![expect(unsafe_code, reason = "implements the contract of lock_api for the lock below")]

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use lock_api::{GuardSend, RawMutex};
use rustix::io::Errno;
use rustix::thread::futex::{Flags, Timespec, wait, wake};

const UNLOCKED: u32 = 0;
const LOCKED: u32 = 1;
/// Locked, and a thread may wait.
const CONTENDED: u32 = 2;

/// How long a thread reads a lock that is held before it waits in the kernel: about as long as it
/// takes to be woken up there, on another processor of a virtual machine.
const SPIN_TIME: Duration = Duration::from_micros(20);
/// Reads between two looks at the time.
const READS_PER_LOOK: u32 = 64;
/// Most looks at the time, which stands still in a simulated world.
const LOOKS_MAX: u32 = 64;

/// The state of a lock.
#[derive(Debug)]
pub(crate) struct RawLock(AtomicU32);

/// A lock that protects a value.
pub(crate) type FutexMutex<T> = lock_api::Mutex<RawLock, T>;
/// Unlocks a [`FutexMutex`] when dropped.
pub(crate) type FutexGuard<'a, T> = lock_api::MutexGuard<'a, RawLock, T>;

// SAFETY: only the thread that changes the word from `UNLOCKED` has the lock, until it sets the
// word to `UNLOCKED` again; acquire and release order what it does in between.
unsafe impl RawMutex for RawLock {
    const INIT: Self = Self(AtomicU32::new(UNLOCKED));

    type GuardMarker = GuardSend;

    #[inline]
    fn lock(&self) {
        if !self.try_lock() {
            self.lock_contended(None);
        }
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.0.compare_exchange(UNLOCKED, LOCKED, Acquire, Relaxed).is_ok()
    }

    #[inline]
    unsafe fn unlock(&self) {
        if self.0.swap(UNLOCKED, Release) == CONTENDED {
            wake_threads(&self.0, 1);
        }
    }

    #[inline]
    fn is_locked(&self) -> bool {
        self.0.load(Relaxed) != UNLOCKED
    }
}

impl RawLock {
    /// Waits for the lock, until this time of the monotonic clock if there is one. Returns whether
    /// the thread has it.
    #[cold]
    fn lock_contended(&self, until: Option<Duration>) -> bool {
        if self.spin(LOCKED) {
            return true;
        }
        loop {
            // Before the look at the time: a thread that was woken up and leaves without the lock
            // must let the next unlock wake another one.
            if self.0.swap(CONTENDED, Acquire) == UNLOCKED {
                return true;
            }
            let left = until.map(|until| until.saturating_sub(crate::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return false;
            }
            wait_while(&self.0, CONTENDED, left);
            // Other threads may wait still, so that the next unlock has to wake one.
            if self.spin(CONTENDED) {
                return true;
            }
        }
    }

    /// Tries to set the word from `UNLOCKED` to `locked` for a short time, as locks are held for a
    /// short time. Also while other threads wait in the kernel: if each thread that finds such a
    /// lock waited there too, threads that take turns would pay for a wake-up each time.
    fn spin(&self, locked: u32) -> bool {
        let began = crate::now();
        for _ in 0..LOOKS_MAX {
            for _ in 0..READS_PER_LOOK {
                let is_free = self.0.load(Relaxed) == UNLOCKED;
                let take = || self.0.compare_exchange(UNLOCKED, locked, Acquire, Relaxed);
                if is_free && take().is_ok() {
                    return true;
                }
                std::hint::spin_loop();
            }
            if crate::now().saturating_sub(began) >= SPIN_TIME {
                break;
            }
        }
        false
    }
}

/// Waits for a lock, at most for `time`.
pub(crate) fn try_lock_for<T: ?Sized>(
    mutex: &FutexMutex<T>,
    time: Duration,
) -> Option<FutexGuard<'_, T>> {
    if let Some(guard) = mutex.try_lock() {
        return Some(guard);
    }
    let until = crate::now().saturating_add(time);
    // SAFETY: only the functions of the lock's contract are called.
    let raw = unsafe { mutex.raw() };
    // SAFETY: this thread has just got the lock, and no guard of it exists.
    raw.lock_contended(Some(until)).then(|| unsafe { mutex.make_guard_unchecked() })
}

/// A condition variable for a [`FutexMutex`].
#[derive(Debug, Default)]
pub(crate) struct FutexCondvar {
    /// The number of notifications.
    notified: AtomicU32,
    /// Threads that wait, or are about to.
    waiting: AtomicU32,
}

impl FutexCondvar {
    pub(crate) const fn new() -> Self {
        Self { notified: AtomicU32::new(0), waiting: AtomicU32::new(0) }
    }

    /// Waits for a notification, at most for `time` if there is one. Returns whether the time was
    /// over.
    pub(crate) fn wait<T: ?Sized>(
        &self,
        guard: &mut FutexGuard<'_, T>,
        time: Option<Duration>,
    ) -> bool {
        // Both under the lock: who changes the condition under it, and then notifies, finds this
        // thread counted, and changes the number that it waits for.
        self.waiting.fetch_add(1, SeqCst);
        let seen = self.notified.load(Relaxed);
        let is_over = FutexGuard::unlocked(guard, || !wait_while(&self.notified, seen, time));
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        is_over
    }

    pub(crate) fn notify_one(&self) {
        self.notify(1);
    }

    pub(crate) fn notify_all(&self) {
        self.notify(i32::MAX.unsigned_abs());
    }

    fn notify(&self, threads: u32) {
        self.notified.fetch_add(1, SeqCst);
        if self.waiting.load(SeqCst) > 0 {
            wake_threads(&self.notified, threads);
        }
    }
}

/// Waits until the word is another one, a wake-up, or the time is over. Returns false if the time
/// was over. Spurious wake-ups happen.
fn wait_while(word: &AtomicU32, value: u32, time: Option<Duration>) -> bool {
    // A time that is too long for the kernel has no end.
    let time = time.and_then(|time| {
        let seconds = i64::try_from(time.as_secs()).ok()?;
        Some(Timespec { tv_sec: seconds, tv_nsec: time.subsec_nanos().into() })
    });
    !matches!(wait(word, Flags::PRIVATE, value, time.as_ref()), Err(Errno::TIMEDOUT))
}

fn wake_threads(word: &AtomicU32, threads: u32) {
    let woken = wake(word, Flags::PRIVATE, threads);
    debug_assert!(woken.is_ok(), "the word is aligned and mapped");
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread::spawn;

    use super::*;

    #[test]
    fn a_lock_is_held_by_one_thread_at_a_time() {
        let value = Arc::new(FutexMutex::new(0_u64));
        let add = |value: Arc<FutexMutex<u64>>| {
            move || {
                for at in 0..20_000_u64 {
                    // Some waits end before the lock is free, and some threads are woken by then.
                    let time = Duration::from_nanos(at % 50_000);
                    let mut guard = match try_lock_for(&value, time) {
                        Some(guard) if at % 3 == 0 => guard,
                        Some(guard) => {
                            drop(guard);
                            value.lock()
                        }
                        None => value.lock(),
                    };
                    let before = *guard;
                    std::hint::black_box(before);
                    *guard = before + 1;
                }
            }
        };
        let threads: Vec<_> = (0..4).map(|_| spawn(add(Arc::clone(&value)))).collect();
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(*value.lock(), 80_000);
    }

    #[test]
    fn a_wait_for_a_lock_ends_at_its_time() {
        let value = FutexMutex::new(());
        let held = value.lock();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| try_lock_for(&value, Duration::from_millis(20)).is_some());
            assert!(!waiting.join().unwrap());
        });
        drop(held);
        assert!(try_lock_for(&value, Duration::ZERO).is_some());
        assert!(!value.is_locked());
    }

    #[test]
    fn each_notification_reaches_a_waiting_thread() {
        const ROUNDS: u64 = 5_000;
        let shared = Arc::new((FutexMutex::new(0_u64), FutexCondvar::new()));
        // Two threads take turns; a lost wake-up ends none of them.
        let take_turns = |own: u64| {
            let shared = Arc::clone(&shared);
            move || {
                let (turn, changed) = &*shared;
                for _ in 0..ROUNDS {
                    let mut guard = turn.lock();
                    while *guard % 2 != own {
                        changed.wait(&mut guard, None);
                    }
                    *guard += 1;
                    drop(guard);
                    changed.notify_one();
                }
            }
        };
        let threads = [spawn(take_turns(0)), spawn(take_turns(1))];
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(*shared.0.lock(), 2 * ROUNDS);
    }

    #[test]
    fn a_wait_for_a_notification_ends_at_its_time() {
        let (value, changed) = (FutexMutex::new(()), FutexCondvar::new());
        let mut guard = value.lock();
        assert!(changed.wait(&mut guard, Some(Duration::from_millis(5))));
        assert!(changed.wait(&mut guard, Some(Duration::ZERO)));
        assert_eq!(changed.waiting.load(SeqCst), 0);
        changed.notify_all();
    }
}
