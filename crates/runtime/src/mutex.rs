//! A mutex with a scheduling point before each lock and after each unlock in a world.
//!
//! Over a futex (`futex.rs`), because `std`'s has no lock that waits until a deadline. As `std`'s
//! it is poisoned by a panic of the thread that holds it.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LockResult, PoisonError, TryLockError, TryLockResult};

use crate::futex::{FutexGuard, FutexMutex, try_lock_for};
use crate::release::{Release, address_of};
use crate::simulated::{self, Attempt, LockKind, World};
use crate::{Clock, Deadline};

/// A mutual exclusion lock with the names, results and poisoning of [`std::sync::Mutex`], and with
/// a lock that waits until a deadline.
#[derive(Default)]
pub struct Mutex<T: ?Sized> {
    /// Written only under the lock.
    is_poisoned: AtomicBool,
    inner: FutexMutex<T>,
}

// Who reads the value after a panic is told by the poison.
impl<T: ?Sized> UnwindSafe for Mutex<T> {}
impl<T: ?Sized> RefUnwindSafe for Mutex<T> {}

/// Unlocks the mutex when dropped.
///
/// It has no `Drop` of its own, so that a condition variable can take it apart.
#[must_use = "the mutex is unlocked at once if the guard is not kept"]
pub struct MutexGuard<'a, T: ?Sized> {
    // Fields are dropped in this order: note a panic, unlock, then tell the world.
    pub(crate) poison: Poison<'a>,
    pub(crate) inner: FutexGuard<'a, T>,
    pub(crate) release: Release<'a, Mutex<T>>,
}

/// Poisons the mutex if it is dropped by a panic that began after the lock.
pub(crate) struct Poison<'a> {
    flag: &'a AtomicBool,
    was_panicking: bool,
}

impl Drop for Poison<'_> {
    #[inline]
    fn drop(&mut self) {
        if !self.was_panicking && std::thread::panicking() {
            // Relaxed: the lock orders it.
            self.flag.store(true, Ordering::Relaxed);
        }
    }
}

impl<T> Mutex<T> {
    /// An unlocked mutex.
    #[inline]
    pub const fn new(value: T) -> Self {
        Self { is_poisoned: AtomicBool::new(false), inner: FutexMutex::new(value) }
    }

    /// The value.
    pub fn into_inner(self) -> LockResult<T> {
        let is_poisoned = self.is_poisoned();
        poisoned_if(is_poisoned, self.inner.into_inner())
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
        self.guard(self.inner.lock())
    }

    /// Waits for the lock until the deadline by this clock. Returns `None` if it passes first; a
    /// lock that is free is taken also after it.
    #[inline]
    #[track_caller]
    pub fn lock_until(
        &self,
        deadline: Deadline,
        clock: &dyn Clock,
    ) -> Option<LockResult<MutexGuard<'_, T>>> {
        match self.try_lock() {
            Ok(guard) => Some(Ok(guard)),
            Err(TryLockError::Poisoned(poisoned)) => Some(Err(poisoned)),
            Err(TryLockError::WouldBlock) => self.wait_until(deadline, clock),
        }
    }

    /// The lock if it is free.
    #[inline]
    #[track_caller]
    pub fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
        if let Some(world) = simulated::current() {
            world.point();
            return self.try_lock_in(world);
        }
        self.try_guard(self.inner.try_lock())
    }

    /// Whether a thread has panicked while it held the lock.
    #[inline]
    pub fn is_poisoned(&self) -> bool {
        self.is_poisoned.load(Ordering::Relaxed)
    }

    /// The value, without locking.
    pub fn get_mut(&mut self) -> LockResult<&mut T> {
        let is_poisoned = self.is_poisoned();
        poisoned_if(is_poisoned, self.inner.get_mut())
    }

    #[cold]
    #[track_caller]
    fn wait_until(
        &self,
        deadline: Deadline,
        clock: &dyn Clock,
    ) -> Option<LockResult<MutexGuard<'_, T>>> {
        loop {
            let left = deadline.remaining(clock);
            if left.is_zero() {
                return None;
            }
            let time = clock.wait_at_most(left);
            let Some(world) = simulated::current() else {
                if let Some(inner) = try_lock_for(&self.inner, time) {
                    return Some(self.guard(inner));
                }
                continue;
            };
            let lock = address_of(self);
            match self.try_lock_in(world) {
                Ok(guard) => return Some(Ok(guard)),
                Err(TryLockError::Poisoned(poisoned)) => return Some(Err(poisoned)),
                Err(TryLockError::WouldBlock) => {}
            }
            if let Attempt::HeldOutside = world.wait_for_lock(LockKind::Mutex, lock, Some(time))
                && let Some(inner) = try_lock_for(&self.inner, time)
            {
                let locked = self.guard(inner);
                world.acquired(lock);
                return Some(locked);
            }
        }
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
            if let Attempt::HeldOutside = world.wait_for_lock(LockKind::Mutex, lock, None) {
                let locked = self.guard(self.inner.lock());
                world.acquired(lock);
                return locked;
            }
        }
    }

    #[cold]
    #[track_caller]
    fn try_lock_in(&self, world: &World) -> TryLockResult<MutexGuard<'_, T>> {
        let tried = self.try_guard(self.inner.try_lock());
        if !matches!(tried, Err(TryLockError::WouldBlock)) {
            world.acquired(address_of(self));
        }
        tried
    }

    #[inline]
    fn guard<'a>(&'a self, inner: FutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        let flag = &self.is_poisoned;
        let poison = Poison { flag, was_panicking: std::thread::panicking() };
        MutexGuard { poison, inner, release: Release(self) }.checked()
    }

    #[inline]
    fn try_guard<'a>(
        &'a self,
        tried: Option<FutexGuard<'a, T>>,
    ) -> TryLockResult<MutexGuard<'a, T>> {
        let Some(inner) = tried else { return Err(TryLockError::WouldBlock) };
        Ok(self.guard(inner)?)
    }
}

impl<T: ?Sized> MutexGuard<'_, T> {
    /// The guard, as an error if the mutex is poisoned.
    #[inline]
    pub(crate) fn checked(self) -> LockResult<Self> {
        poisoned_if(self.poison.flag.load(Ordering::Relaxed), self)
    }
}

#[inline]
fn poisoned_if<T>(is_poisoned: bool, value: T) -> LockResult<T> {
    if is_poisoned { Err(PoisonError::new(value)) } else { Ok(value) }
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
