//! A mutex that is locked only with a deadline.

use std::sync::PoisonError;

use crate::{Clock, Deadline, Mutex, MutexGuard};

/// Guards a value that is locked during I/O, so that a hung disk does not block later callers
/// beyond their deadlines. A panic under the lock does not poison it.
#[derive(Debug, Default)]
pub struct DeadlineMutex<T>(Mutex<T>);

/// Unlocks the mutex when dropped.
pub type DeadlineMutexGuard<'a, T> = MutexGuard<'a, T>;

impl<T> DeadlineMutex<T> {
    /// An unlocked mutex.
    pub const fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    /// Waits for the lock. Returns `None` if the deadline passes first.
    #[track_caller]
    pub fn lock(&self, deadline: Deadline, clock: &dyn Clock) -> Option<DeadlineMutexGuard<'_, T>> {
        let locked = self.0.lock_until(deadline, clock)?;
        Some(locked.unwrap_or_else(PoisonError::into_inner))
    }
}
