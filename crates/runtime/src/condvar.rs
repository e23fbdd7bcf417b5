//! A condition variable: over a futex, or one whose waits are scheduled and timed by the world.

use std::fmt;
use std::sync::{LockResult, PoisonError};
use std::time::Duration;

use crate::futex::FutexCondvar;
use crate::release::address_of;
use crate::simulated::{self, World};
use crate::{Clock, Deadline, MutexGuard};

/// A condition variable with the names and results of [`std::sync::Condvar`].
#[derive(Default)]
#[repr(transparent)]
pub struct Condvar(FutexCondvar);

/// Whether a wait ended because its time was over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitTimeoutResult(bool);

type Waited<'a, T> = (MutexGuard<'a, T>, WaitTimeoutResult);

impl WaitTimeoutResult {
    /// Whether the wait ended because its time was over.
    pub fn timed_out(self) -> bool {
        self.0
    }
}

impl Condvar {
    /// A condition variable without waiting threads.
    #[inline]
    pub const fn new() -> Self {
        Self(FutexCondvar::new())
    }

    /// Waits until notified. Spurious wake-ups happen.
    #[inline]
    #[track_caller]
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        if let Some(world) = simulated::current() {
            let waited = self.wait_in(world, guard, None);
            return waited.map(first).map_err(|it| PoisonError::new(first(it.into_inner())));
        }
        let mut guard = guard;
        self.0.wait(&mut guard.inner, None);
        guard.checked()
    }

    /// Waits until notified, at most for `time`. Spurious wake-ups happen.
    #[inline]
    #[track_caller]
    pub fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        time: Duration,
    ) -> LockResult<Waited<'a, T>> {
        if let Some(world) = simulated::current() {
            return self.wait_in(world, guard, Some(time));
        }
        let mut guard = guard;
        let waited = WaitTimeoutResult(self.0.wait(&mut guard.inner, Some(time)));
        match guard.checked() {
            Ok(guard) => Ok((guard, waited)),
            Err(poisoned) => Err(PoisonError::new((poisoned.into_inner(), waited))),
        }
    }

    /// Waits while the condition holds, at most for `time`.
    #[track_caller]
    pub fn wait_timeout_while<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        time: Duration,
        mut condition: impl FnMut(&mut T) -> bool,
    ) -> LockResult<Waited<'a, T>> {
        let until = crate::now().saturating_add(time);
        while condition(&mut guard) {
            let left = until.saturating_sub(crate::now());
            if left.is_zero() {
                return Ok((guard, WaitTimeoutResult(true)));
            }
            guard = self.wait_timeout(guard, left).map(first).map_err(without_time_out)?;
        }
        Ok((guard, WaitTimeoutResult(false)))
    }

    /// Waits until notified or until the deadline by this clock. Spurious wake-ups happen.
    #[track_caller]
    pub fn wait_until<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        deadline: Deadline,
        clock: &dyn Clock,
    ) -> LockResult<Waited<'a, T>> {
        let time = clock.wait_at_most(deadline.remaining(clock));
        let passed = || WaitTimeoutResult(deadline.has_passed(clock));
        match self.wait_timeout(guard, time) {
            Ok((guard, _)) => Ok((guard, passed())),
            Err(poisoned) => Err(PoisonError::new((first(poisoned.into_inner()), passed()))),
        }
    }

    /// Wakes one thread that waits.
    #[inline]
    pub fn notify_one(&self) {
        if let Some(world) = simulated::current() {
            return world.notify(address_of(self), false);
        }
        self.0.notify_one();
    }

    /// Wakes all threads that wait.
    #[inline]
    pub fn notify_all(&self) {
        if let Some(world) = simulated::current() {
            return world.notify(address_of(self), true);
        }
        self.0.notify_all();
    }

    #[cold]
    #[track_caller]
    fn wait_in<'a, T>(
        &self,
        world: &World,
        guard: MutexGuard<'a, T>,
        time: Option<Duration>,
    ) -> LockResult<Waited<'a, T>> {
        let mutex = guard.release.0;
        // Waiting begins before the unlock, and no other thread runs in between: this makes a wait
        // atomic. The unlock does not switch while the thread is registered as waiting.
        world.begin_wait_for_notification(address_of(self), time);
        drop(guard);
        let waited = WaitTimeoutResult(world.end_wait());
        match mutex.lock_in(world) {
            Ok(guard) => Ok((guard, waited)),
            Err(poisoned) => Err(PoisonError::new((poisoned.into_inner(), waited))),
        }
    }
}

fn without_time_out<T>(poisoned: PoisonError<Waited<'_, T>>) -> PoisonError<Waited<'_, T>> {
    PoisonError::new((first(poisoned.into_inner()), WaitTimeoutResult(false)))
}

fn first<T>((guard, _): Waited<'_, T>) -> MutexGuard<'_, T> {
    guard
}

impl fmt::Debug for Condvar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Condvar").finish_non_exhaustive()
    }
}
