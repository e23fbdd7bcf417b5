//! A limit of the rate at which bytes are written or read in the background.

use std::time::Duration;

use crate::shared::StoreCore;

/// A rate limiter: each batch delays the next one by its bytes divided by the rate.
pub(crate) struct RateLimiter {
    bytes_per_second: Option<u64>,
    /// When the next batch may start.
    next_start: Duration,
}

impl RateLimiter {
    pub(crate) fn new(core: &StoreCore) -> Self {
        Self {
            bytes_per_second: core.config.mover_bytes_per_second,
            next_start: core.clock.monotonic(),
        }
    }

    pub(crate) fn wait_for(&mut self, core: &StoreCore, bytes: u64) {
        let Some(rate) = self.bytes_per_second else { return };
        loop {
            let now = core.clock.monotonic();
            if now >= self.next_start {
                // From now, not from the planned start: idle time gives no credit for a later
                // burst.
                let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(rate);
                self.next_start =
                    now + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
                return;
            }
            let state = core.lock();
            if state.is_closed {
                return;
            }
            // New work ends the pause early: the loop then checks the time again.
            core.pause(state, self.next_start.saturating_sub(now));
        }
    }
}
