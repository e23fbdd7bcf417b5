//! Locks in a world: who holds which, and who waits.

use std::panic::Location;
use std::time::Duration;

use super::World;
use super::threads::Held;
use super::wait::{LockKind, Reason};

/// What to do after a lock was not free.
pub(crate) enum Attempt {
    /// It was released, or the time is over: try again.
    Again,
    /// No thread of this world holds it, so another OS thread does: wait for it as usual.
    HeldOutside,
}

impl World {
    /// The running thread has locked.
    #[track_caller]
    pub(crate) fn acquired(&self, lock: usize) {
        let location = Location::caller();
        self.with(self.current.get(), |thread| thread.held.push(Held { lock, location }));
    }

    /// The running thread has unlocked. One of those who wait for the lock may run now.
    #[cold]
    pub(crate) fn released(&self, lock: usize) {
        let is_runnable = self.with(self.current.get(), |thread| {
            if let Some(at) = thread.held.iter().rposition(|held| held.lock == lock) {
                thread.held.remove(at);
            }
            thread.is_runnable()
        });
        self.wake_for_lock(lock);
        // Not while the thread begins to wait for a notification.
        if is_runnable {
            self.point();
        }
    }

    /// Waits until a lock is released that was not free, at most for `time` if that is given.
    #[track_caller]
    pub(crate) fn wait_for_lock(
        &self,
        kind: LockKind,
        lock: usize,
        time: Option<Duration>,
    ) -> Attempt {
        let is_held = {
            let threads = self.threads.borrow();
            threads.iter().any(|thread| thread.held.iter().any(|held| held.lock == lock))
        };
        if !is_held {
            return Attempt::HeldOutside;
        }
        self.wait(Reason::Lock(kind, lock), time);
        Attempt::Again
    }

    /// Whether a thread waits to write: then readers wait too.
    pub(crate) fn has_waiting_writer(&self, lock: usize) -> bool {
        let waiting = self.waiting.borrow();
        waiting.locks.iter().any(|(kind, on, _)| *kind == LockKind::Write && *on == lock)
    }
}
