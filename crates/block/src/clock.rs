//! Where time comes from, so that tests and the simulator own it.

use std::fmt;
use std::sync::Mutex;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A source of time. Everything that waits or stamps takes one.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Time since an arbitrary fixed point; never goes back.
    fn monotonic(&self) -> Duration;

    /// Milliseconds since 1970 UTC, for stamps that outlive the process.
    fn unix_ms(&self) -> u64;
}

/// The machine's clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[expect(clippy::disallowed_methods, reason = "this is the clock that others take")]
    fn monotonic(&self) -> Duration {
        use std::sync::OnceLock;
        use std::time::Instant;
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed()
    }

    #[expect(clippy::disallowed_methods, reason = "this is the clock that others take")]
    fn unix_ms(&self) -> u64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    }
}

/// A clock that moves only when told to.
#[derive(Debug, Default)]
pub struct ManualClock {
    now: Mutex<Duration>,
}

impl ManualClock {
    /// Moves the clock forward.
    pub fn advance(&self, by: Duration) {
        let mut now = self.now.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *now += by;
    }

    /// Moves the clock to a time since its start; earlier times are ignored.
    pub fn set(&self, to: Duration) {
        let mut now = self.now.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *now = to.max(*now);
    }
}

impl Clock for ManualClock {
    fn monotonic(&self) -> Duration {
        *self.now.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn unix_ms(&self) -> u64 {
        u64::try_from(self.monotonic().as_millis()).unwrap_or(u64::MAX)
    }
}

/// The point on a clock's monotonic scale at which a call gives up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline(Duration);

impl Deadline {
    /// A deadline that lies `timeout` from now.
    pub fn after(clock: &dyn Clock, timeout: Duration) -> Self {
        Self(clock.monotonic().saturating_add(timeout))
    }

    /// What is left of it; zero once it has passed.
    pub fn remaining(&self, clock: &dyn Clock) -> Duration {
        self.0.saturating_sub(clock.monotonic())
    }

    /// Whether it has passed.
    pub fn has_passed(&self, clock: &dyn Clock) -> bool {
        self.remaining(clock).is_zero()
    }
}
