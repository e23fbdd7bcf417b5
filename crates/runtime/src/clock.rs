//! Clocks: a trait, so that tests control time where a world would be too much.

use std::fmt;
use std::sync::PoisonError;
use std::time::Duration;

use crate::LeafMutex;

/// Poll interval of waits by a clock that does not advance by itself.
const POLL: Duration = Duration::from_millis(5);

/// A source of time. All code that waits or records times takes one.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Time since an arbitrary fixed point; never goes back.
    fn monotonic(&self) -> Duration;

    /// Milliseconds since 1970 UTC, for timestamps that outlive the process.
    fn unix_ms(&self) -> u64;

    /// How long to wait before reading this clock again, when `left` remains until a deadline by
    /// it. A clock that another thread advances is polled.
    fn wait_at_most(&self, left: Duration) -> Duration {
        left.min(POLL)
    }
}

/// The machine's clock, or the world's on a thread of a world.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn monotonic(&self) -> Duration {
        crate::now()
    }

    fn unix_ms(&self) -> u64 {
        crate::unix_ms()
    }

    fn wait_at_most(&self, left: Duration) -> Duration {
        left
    }
}

/// A clock that advances only by its methods.
#[derive(Debug, Default)]
pub struct ManualClock {
    now: LeafMutex<Duration>,
}

impl ManualClock {
    /// Moves the clock forward.
    pub fn advance(&self, by: Duration) {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        *now += by;
    }

    /// Moves the clock to a time since its start; earlier times are ignored.
    pub fn set(&self, to: Duration) {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        *now = to.max(*now);
    }
}

impl Clock for ManualClock {
    fn monotonic(&self) -> Duration {
        *self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unix_ms(&self) -> u64 {
        u64::try_from(self.monotonic().as_millis()).unwrap_or(u64::MAX)
    }
}

/// The monotonic time at which a call times out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline(Duration);

impl Deadline {
    /// A deadline `timeout` from now.
    pub fn after(clock: &dyn Clock, timeout: Duration) -> Self {
        Self(clock.monotonic().saturating_add(timeout))
    }

    /// A deadline at a monotonic time of the clock.
    pub const fn at(time: Duration) -> Self {
        Self(time)
    }

    /// The monotonic time of the deadline.
    pub fn time(self) -> Duration {
        self.0
    }

    /// Time until the deadline; zero once it has passed.
    pub fn remaining(&self, clock: &dyn Clock) -> Duration {
        self.0.saturating_sub(clock.monotonic())
    }

    /// Whether the deadline has passed.
    pub fn has_passed(&self, clock: &dyn Clock) -> bool {
        self.remaining(clock).is_zero()
    }
}
