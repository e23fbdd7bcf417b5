//! A host of a simulated network: whether its process is stopped.

use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use cascade_runtime::{LeafMutex, now, sleep};

/// How often a call of a frozen host looks whether it was thawed.
const THAW_WAIT: Duration = Duration::from_millis(20);

/// A host. Its calls on sockets wait while it is frozen, as those of a process that is stopped.
#[derive(Debug, Default)]
pub(super) struct Host {
    times: LeafMutex<Times>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Times {
    frozen_until: Duration,
    /// All together, as planned.
    frozen: Duration,
}

impl Host {
    fn times(&self) -> MutexGuard<'_, Times> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn freeze(&self, time: Duration) {
        let now = now();
        let mut times = self.times();
        let until = times.frozen_until.max(now + time);
        let longer = until.saturating_sub(times.frozen_until.max(now));
        times.frozen += longer;
        times.frozen_until = until;
    }

    pub(super) fn thaw(&self) {
        let now = now();
        let mut times = self.times();
        let left = times.frozen_until.saturating_sub(now);
        times.frozen -= left;
        times.frozen_until = Duration::ZERO;
    }

    /// How long it was frozen so far, all times together.
    pub(super) fn frozen(&self) -> Duration {
        let now = now();
        let times = self.times();
        times.frozen.saturating_sub(times.frozen_until.saturating_sub(now))
    }

    /// Waits while the host is frozen.
    pub(super) fn wait(&self) {
        loop {
            let until = self.times().frozen_until;
            let left = until.saturating_sub(now());
            if left.is_zero() {
                return;
            }
            // It may be thawed before.
            sleep(left.min(THAW_WAIT));
        }
    }
}
