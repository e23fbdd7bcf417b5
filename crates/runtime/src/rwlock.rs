//! A reader-writer lock: `std`'s, with scheduling points in a world.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{LockResult, PoisonError, TryLockError, TryLockResult};

use crate::release::{Release, address_of};
use crate::simulated::{self, Attempt, LockKind, World};

/// A reader-writer lock with the names, results and poisoning of [`std::sync::RwLock`].
///
/// As with `std` on Linux, a reader waits while a writer waits. So a thread that reads twice at
/// once can deadlock, and does in a world.
#[derive(Default)]
#[repr(transparent)]
pub struct RwLock<T: ?Sized>(std::sync::RwLock<T>);

/// Ends the reading when dropped.
#[must_use = "the lock is released at once if the guard is not kept"]
pub struct RwLockReadGuard<'a, T: ?Sized> {
    // Fields are dropped in this order: unlock first, then tell the world.
    inner: std::sync::RwLockReadGuard<'a, T>,
    #[expect(dead_code, reason = "its drop tells the world")]
    release: Release<'a, RwLock<T>>,
}

/// Ends the writing when dropped.
#[must_use = "the lock is released at once if the guard is not kept"]
pub struct RwLockWriteGuard<'a, T: ?Sized> {
    // Fields are dropped in this order: unlock first, then tell the world.
    inner: std::sync::RwLockWriteGuard<'a, T>,
    #[expect(dead_code, reason = "its drop tells the world")]
    release: Release<'a, RwLock<T>>,
}

impl<T> RwLock<T> {
    /// An unlocked lock.
    #[inline]
    pub const fn new(value: T) -> Self {
        Self(std::sync::RwLock::new(value))
    }

    /// The value.
    pub fn into_inner(self) -> LockResult<T> {
        self.0.into_inner()
    }
}

impl<T: ?Sized> RwLock<T> {
    /// Waits until no thread writes or waits to write.
    #[inline]
    #[track_caller]
    pub fn read(&self) -> LockResult<RwLockReadGuard<'_, T>> {
        if let Some(world) = simulated::current() {
            world.point();
            return self.read_in(world);
        }
        self.read_result(self.0.read())
    }

    /// Waits until no thread reads or writes.
    #[inline]
    #[track_caller]
    pub fn write(&self) -> LockResult<RwLockWriteGuard<'_, T>> {
        if let Some(world) = simulated::current() {
            world.point();
            return self.write_in(world);
        }
        self.write_result(self.0.write())
    }

    /// Whether a thread has panicked while it wrote.
    #[inline]
    pub fn is_poisoned(&self) -> bool {
        self.0.is_poisoned()
    }

    /// The value, without locking.
    pub fn get_mut(&mut self) -> LockResult<&mut T> {
        self.0.get_mut()
    }

    #[cold]
    #[track_caller]
    fn read_in(&self, world: &World) -> LockResult<RwLockReadGuard<'_, T>> {
        let lock = address_of(self);
        loop {
            let tried = if world.has_waiting_writer(lock) {
                Err(TryLockError::WouldBlock)
            } else {
                self.0.try_read()
            };
            if let Some(locked) = end_of(tried) {
                world.acquired(lock);
                return self.read_result(locked);
            }
            if let Attempt::HeldOutside = world.wait_for_lock(LockKind::Read, lock, None) {
                let locked = self.read_result(self.0.read());
                world.acquired(lock);
                return locked;
            }
        }
    }

    #[cold]
    #[track_caller]
    fn write_in(&self, world: &World) -> LockResult<RwLockWriteGuard<'_, T>> {
        let lock = address_of(self);
        loop {
            if let Some(locked) = end_of(self.0.try_write()) {
                world.acquired(lock);
                return self.write_result(locked);
            }
            if let Attempt::HeldOutside = world.wait_for_lock(LockKind::Write, lock, None) {
                let locked = self.write_result(self.0.write());
                world.acquired(lock);
                return locked;
            }
        }
    }

    #[inline]
    fn read_result<'a>(
        &'a self,
        locked: LockResult<std::sync::RwLockReadGuard<'a, T>>,
    ) -> LockResult<RwLockReadGuard<'a, T>> {
        let guard = |inner| RwLockReadGuard { inner, release: Release(self) };
        match locked {
            Ok(inner) => Ok(guard(inner)),
            Err(poisoned) => Err(PoisonError::new(guard(poisoned.into_inner()))),
        }
    }

    #[inline]
    fn write_result<'a>(
        &'a self,
        locked: LockResult<std::sync::RwLockWriteGuard<'a, T>>,
    ) -> LockResult<RwLockWriteGuard<'a, T>> {
        let guard = |inner| RwLockWriteGuard { inner, release: Release(self) };
        match locked {
            Ok(inner) => Ok(guard(inner)),
            Err(poisoned) => Err(PoisonError::new(guard(poisoned.into_inner()))),
        }
    }
}

/// The result of an attempt, none if the lock was taken.
fn end_of<G>(tried: TryLockResult<G>) -> Option<LockResult<G>> {
    match tried {
        Ok(guard) => Some(Ok(guard)),
        Err(TryLockError::Poisoned(poisoned)) => Some(Err(poisoned)),
        Err(TryLockError::WouldBlock) => None,
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for RwLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RwLock").field(&&self.0).finish()
    }
}

impl<T: ?Sized> Deref for RwLockReadGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: ?Sized> Deref for RwLockWriteGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: ?Sized> DerefMut for RwLockWriteGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for RwLockReadGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for RwLockWriteGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
