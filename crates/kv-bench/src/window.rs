//! The window of a measurement: what moved within it counts, what moved after it does not.

use std::time::Duration;

/// A span of time by the clock of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Its start.
    pub start: Duration,
    /// Its end.
    pub end: Duration,
}

impl Window {
    /// The part of an operation's bytes that counts: the part of its time within the window. The
    /// original counts all bytes of requests that end after it, and divides by the window.
    pub fn clip(&self, bytes: u64, began: Duration, ended: Duration) -> u64 {
        let (from, to) = (began.max(self.start), ended.min(self.end));
        if from > to {
            return 0;
        }
        let took = ended.saturating_sub(began);
        if took.is_zero() || (from == began && to == ended) {
            return bytes;
        }
        let share = to.saturating_sub(from).as_secs_f64() / took.as_secs_f64();
        part(bytes, share)
    }

    /// The last time that belongs to it.
    pub fn last(&self) -> Duration {
        self.end.saturating_sub(Duration::from_nanos(1)).max(self.start)
    }

    /// Its length in seconds.
    pub fn seconds(&self) -> f64 {
        self.end.saturating_sub(self.start).as_secs_f64()
    }
}

/// A share of an amount.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a part of an amount: not negative, and rounded"
)]
pub(crate) fn part(amount: u64, share: f64) -> u64 {
    ((amount as f64 * share).round() as u64).min(amount)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn an_operation_counts_by_its_time_within_the_window() {
        let window = Window { start: at(100), end: at(200) };
        for (began, ended, counted) in [
            (100, 200, 1000),
            (120, 180, 1000),
            (150, 250, 500),
            (190, 290, 100),
            (50, 150, 500),
            (0, 400, 250),
            (200, 300, 0),
            (201, 300, 0),
            (10, 90, 0),
            (150, 150, 1000),
        ] {
            assert_eq!(window.clip(1000, at(began), at(ended)), counted, "{began} to {ended}");
        }
        assert!((window.seconds() - 0.1).abs() < 1e-12);
    }
}
