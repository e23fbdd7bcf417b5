//! A lock that is waited for no longer than a deadline.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use cascade_block::{Clock, Deadline};

/// Guards a value that is held during I/O, so that a hung disk does not hang the next caller.
#[derive(Debug)]
pub(crate) struct TimedMutex<T> {
    is_taken: Mutex<bool>,
    freed: Condvar,
    value: Mutex<T>,
}

/// Holds the mutex until dropped.
#[derive(Debug)]
pub(crate) struct TimedMutexGuard<'a, T> {
    mutex: &'a TimedMutex<T>,
    value: MutexGuard<'a, T>,
}

impl<T> TimedMutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { is_taken: Mutex::new(false), freed: Condvar::new(), value: Mutex::new(value) }
    }

    /// Waits for the value; nothing if the deadline passes first.
    pub(crate) fn lock(
        &self,
        deadline: Deadline,
        clock: &dyn Clock,
    ) -> Option<TimedMutexGuard<'_, T>> {
        let mut is_taken = self.is_taken.lock().unwrap_or_else(PoisonError::into_inner);
        while *is_taken {
            let left = deadline.remaining(clock);
            if left.is_zero() {
                return None;
            }
            is_taken =
                self.freed.wait_timeout(is_taken, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        *is_taken = true;
        drop(is_taken);
        // Never contended: only who set `is_taken` gets here.
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
        *self.mutex.is_taken.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.mutex.freed.notify_one();
    }
}
