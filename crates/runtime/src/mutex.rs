//! A mutex: `std`'s, with a scheduling point before each lock and after each unlock in a world.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{LockResult, PoisonError, TryLockError, TryLockResult};

use crate::release::{Release, address_of};
use crate::simulated::{self, Attempt, LockKind, World};

/// A mutual exclusion lock with the names, results and poisoning of [`std::sync::Mutex`].
#[derive(Default)]
#[repr(transparent)]
pub struct Mutex<T: ?Sized>(std::sync::Mutex<T>);

/// Unlocks the mutex when dropped.
///
/// It has no `Drop` of its own, so that a condition variable can take it apart.
#[must_use = "the mutex is unlocked at once if the guard is not kept"]
pub struct MutexGuard<'a, T: ?Sized> {
    // Fields are dropped in this order: unlock first, then tell the world.
    pub(crate) inner: std::sync::MutexGuard<'a, T>,
    pub(crate) release: Release<'a, Mutex<T>>,
}

impl<T> Mutex<T> {
    /// An unlocked mutex.
    #[inline]
    pub const fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }

    /// The value.
    pub fn into_inner(self) -> LockResult<T> {
        self.0.into_inner()
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Waits for the lock.
    #[inline]
    #[track_caller]
    pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        if let Some(world) = simulated::current() {
            world.point();
            return self.lock_in(world);
        }
        self.guard_result(self.0.lock())
    }

    /// The lock if it is free.
    #[inline]
    #[track_caller]
    pub fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
        if let Some(world) = simulated::current() {
            world.point();
            return self.try_lock_in(world);
        }
        self.try_guard(self.0.try_lock())
    }

    /// Whether a thread has panicked while it held the lock.
    #[inline]
    pub fn is_poisoned(&self) -> bool {
        self.0.is_poisoned()
    }

    /// The value, without locking.
    pub fn get_mut(&mut self) -> LockResult<&mut T> {
        self.0.get_mut()
    }

    /// Locks in a world, without a scheduling point unless it has to wait.
    #[cold]
    #[track_caller]
    pub(crate) fn lock_in(&self, world: &World) -> LockResult<MutexGuard<'_, T>> {
        let lock = address_of(self);
        loop {
            match self.try_lock_in(world) {
                Ok(guard) => return Ok(guard),
                Err(TryLockError::Poisoned(poisoned)) => return Err(poisoned),
                Err(TryLockError::WouldBlock) => {}
            }
            if let Attempt::HeldOutside = world.wait_for_lock(LockKind::Mutex, lock) {
                let locked = self.guard_result(self.0.lock());
                world.acquired(lock);
                return locked;
            }
        }
    }

    #[cold]
    #[track_caller]
    fn try_lock_in(&self, world: &World) -> TryLockResult<MutexGuard<'_, T>> {
        let tried = self.try_guard(self.0.try_lock());
        if !matches!(tried, Err(TryLockError::WouldBlock)) {
            world.acquired(address_of(self));
        }
        tried
    }

    #[inline]
    fn guard<'a>(&'a self, inner: std::sync::MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        MutexGuard { inner, release: Release(self) }
    }

    #[inline]
    fn guard_result<'a>(
        &'a self,
        locked: LockResult<std::sync::MutexGuard<'a, T>>,
    ) -> LockResult<MutexGuard<'a, T>> {
        match locked {
            Ok(inner) => Ok(self.guard(inner)),
            Err(poisoned) => Err(PoisonError::new(self.guard(poisoned.into_inner()))),
        }
    }

    #[inline]
    fn try_guard<'a>(
        &'a self,
        tried: TryLockResult<std::sync::MutexGuard<'a, T>>,
    ) -> TryLockResult<MutexGuard<'a, T>> {
        match tried {
            Ok(inner) => Ok(self.guard(inner)),
            Err(TryLockError::Poisoned(poisoned)) => {
                Err(PoisonError::new(self.guard(poisoned.into_inner())).into())
            }
            Err(TryLockError::WouldBlock) => Err(TryLockError::WouldBlock),
        }
    }
}

impl<T> From<T> for Mutex<T> {
    fn from(value: T) -> Self {
        Self::new(value)
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Mutex");
        match self.try_lock() {
            Ok(guard) => shown.field("data", &&*guard),
            Err(TryLockError::Poisoned(poisoned)) => shown.field("data", &&**poisoned.get_ref()),
            Err(TryLockError::WouldBlock) => shown.field("data", &format_args!("<locked>")),
        };
        shown.field("poisoned", &self.is_poisoned()).finish()
    }
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for MutexGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
