//! Delays requests until their recorded time divided by the speed, or until the replay stops.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use cascade_runtime::Clock;

/// Poll interval of the stop flag while a worker waits.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The start time of each request.
#[derive(Debug)]
pub struct Pace<'a> {
    clock: &'a dyn Clock,
    began: Duration,
    speed: f64,
}

impl<'a> Pace<'a> {
    /// Starts now. Speed 0 never waits, 1 is real time, 60 is one minute per second.
    pub fn new(clock: &'a dyn Clock, speed: f64) -> Self {
        Self { clock, began: clock.monotonic(), speed }
    }

    /// Waits for the arrival of a request. False if `is_stopped` was set before it.
    pub fn wait_until(&self, arrival: Duration, is_stopped: &AtomicBool) -> bool {
        if self.speed <= 0.0 {
            return true;
        }
        // With a speed close to zero, the wait may exceed the range of Duration: wait for ever.
        let wait = Duration::try_from_secs_f64(arrival.as_secs_f64() / self.speed);
        let due = self.began.saturating_add(wait.unwrap_or(Duration::MAX));
        loop {
            if is_stopped.load(Ordering::Relaxed) {
                return false;
            }
            let left = due.saturating_sub(self.clock.monotonic());
            if left.is_zero() {
                return true;
            }
            thread::park_timeout(left.min(POLL_INTERVAL));
        }
    }
}

#[cfg(test)]
mod tests {
    use cascade_runtime::{ManualClock, SystemClock};

    use super::*;

    #[test]
    fn a_stopped_replay_does_not_wait() {
        let clock = ManualClock::default();
        let pace = Pace::new(&clock, 1.0);
        assert!(!pace.wait_until(Duration::from_secs(3600), &AtomicBool::new(true)));
    }

    #[test]
    fn a_request_waits_for_its_time_divided_by_the_speed() {
        let pace = Pace::new(&SystemClock, 100.0);
        let began = SystemClock.monotonic();
        assert!(pace.wait_until(Duration::from_secs(2), &AtomicBool::new(false)));
        assert!(SystemClock.monotonic().saturating_sub(began) >= Duration::from_millis(20));
        assert!(Pace::new(&SystemClock, 0.0).wait_until(Duration::MAX, &AtomicBool::new(false)));
    }
}
