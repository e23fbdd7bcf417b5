//! A mutex with a `lock` that waits until a deadline at most.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use cascade_runtime::{Clock, Deadline};

/// Guards a value that is locked during I/O, so that a hung disk does not block later callers
/// beyond their deadlines.
#[derive(Debug)]
pub(crate) struct TimedMutex<T> {
    /// A flag beside `value`, because `std::sync::Mutex` has no lock with a time-out.
    is_locked: Mutex<bool>,
    unlocked: Condvar,
    value: Mutex<T>,
}

/// Unlocks the mutex when dropped.
#[derive(Debug)]
pub(crate) struct TimedMutexGuard<'a, T> {
    mutex: &'a TimedMutex<T>,
    value: MutexGuard<'a, T>,
}

impl<T: Default> Default for TimedMutex<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> TimedMutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { is_locked: Mutex::new(false), unlocked: Condvar::new(), value: Mutex::new(value) }
    }

    /// Locks the mutex. Returns `None` if the deadline passes first.
    pub(crate) fn lock(
        &self,
        deadline: Deadline,
        clock: &dyn Clock,
    ) -> Option<TimedMutexGuard<'_, T>> {
        let mut is_locked = self.is_locked.lock().unwrap_or_else(PoisonError::into_inner);
        while *is_locked {
            let left = deadline.remaining(clock);
            if left.is_zero() {
                return None;
            }
            is_locked = self
                .unlocked
                .wait_timeout(is_locked, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        *is_locked = true;
        drop(is_locked);
        // Waits at most for the previous guard, which unlocks `value` right after it cleared
        // `is_locked`.
        let value = self.value.lock().unwrap_or_else(PoisonError::into_inner);
        Some(TimedMutexGuard { mutex: self, value })
    }
}

impl<T> Deref for TimedMutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for TimedMutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for TimedMutexGuard<'_, T> {
    fn drop(&mut self) {
        *self.mutex.is_locked.lock().unwrap_or_else(PoisonError::into_inner) = false;
        // One waiter is enough. If its time passes at this moment, it still sees the flag before it
        // gives up.
        self.mutex.unlocked.notify_one();
    }
}
