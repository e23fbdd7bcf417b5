//! A mutex with a `lock` that waits until a deadline at most.

use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;

use crate::{Clock, Condvar, Deadline, Mutex, MutexGuard};

/// Guards a value that is locked during I/O, so that a hung disk does not block later callers
/// beyond their deadlines.
#[derive(Debug, Default)]
pub struct DeadlineMutex<T> {
    /// A flag beside `value`, because `std::sync::Mutex` has no lock with a time-out.
    is_locked: Mutex<bool>,
    unlocked: Condvar,
    value: Mutex<T>,
}

/// Unlocks the mutex when dropped.
#[derive(Debug)]
#[must_use = "the mutex is unlocked at once if the guard is not kept"]
pub struct DeadlineMutexGuard<'a, T> {
    mutex: &'a DeadlineMutex<T>,
    value: MutexGuard<'a, T>,
}

impl<T> DeadlineMutex<T> {
    /// An unlocked mutex.
    pub const fn new(value: T) -> Self {
        Self { is_locked: Mutex::new(false), unlocked: Condvar::new(), value: Mutex::new(value) }
    }

    /// Waits for the lock. Returns `None` if the deadline passes first.
    #[track_caller]
    pub fn lock(&self, deadline: Deadline, clock: &dyn Clock) -> Option<DeadlineMutexGuard<'_, T>> {
        let mut is_locked = self.is_locked.lock().unwrap_or_else(PoisonError::into_inner);
        while *is_locked {
            if deadline.has_passed(clock) {
                return None;
            }
            let waited = self.unlocked.wait_until(is_locked, deadline, clock);
            is_locked = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *is_locked = true;
        drop(is_locked);
        // Waits at most for the previous guard, which unlocks `value` right after it cleared
        // `is_locked`.
        let value = self.value.lock().unwrap_or_else(PoisonError::into_inner);
        Some(DeadlineMutexGuard { mutex: self, value })
    }
}

impl<T> Deref for DeadlineMutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for DeadlineMutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for DeadlineMutexGuard<'_, T> {
    fn drop(&mut self) {
        *self.mutex.is_locked.lock().unwrap_or_else(PoisonError::into_inner) = false;
        // One waiter is enough. If its time passes at this moment, it still sees the flag before it
        // gives up.
        self.mutex.unlocked.notify_one();
    }
}
