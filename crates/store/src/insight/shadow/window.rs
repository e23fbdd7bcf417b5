//! Counts since the start and over a recent window that moves in halves.

use std::time::Duration;

use super::SIZES;

/// Half of the window: recent counts cover the last 15 to 30 minutes. That is long enough to smooth
/// a busy minute and short enough to exclude yesterday's traffic.
const HALF: Duration = Duration::from_secs(15 * 60);

/// Blocks requested, blocks matched in the tier, and blocks missed by its shadows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct WindowCounts {
    pub(super) requested: u64,
    pub(super) matched: u64,
    /// By size; each sampled block counts for all blocks that it represents.
    pub(super) missed: [u64; SIZES.len()],
}

impl WindowCounts {
    fn add(&mut self, other: &Self) {
        self.requested += other.requested;
        self.matched += other.matched;
        for (sum, more) in self.missed.iter_mut().zip(other.missed) {
            *sum += more;
        }
    }
}

/// Counts of two half windows and since the start.
#[derive(Debug, Default)]
pub(super) struct Window {
    all: WindowCounts,
    current: WindowCounts,
    before: WindowCounts,
    current_since: Duration,
}

impl Window {
    pub(super) fn add(&mut self, now: Duration, counts: &WindowCounts) {
        let age = now.saturating_sub(self.current_since);
        if age >= HALF {
            // `before` is the half that ends now. After two halves, `current` ended before that one
            // began.
            self.before = if age < 2 * HALF { self.current } else { WindowCounts::default() };
            self.current = WindowCounts::default();
            self.current_since = now;
        }
        self.current.add(counts);
        self.all.add(counts);
    }

    pub(super) fn all(&self) -> WindowCounts {
        self.all
    }

    pub(super) fn recent(&self) -> WindowCounts {
        let mut recent = self.before;
        recent.add(&self.current);
        recent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recent_counts_expire_and_total_counts_do_not() {
        let mut window = Window::default();
        let one = WindowCounts { requested: 1, matched: 1, missed: [0, 1, 2] };
        let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
        window.add(minutes(1), &one);
        window.add(minutes(16), &one);
        assert_eq!(window.recent().requested, 2);
        window.add(minutes(32), &one);
        assert_eq!((window.recent().requested, window.recent().missed[2]), (2, 4));
        window.add(minutes(300), &one);
        assert_eq!((window.recent().requested, window.all().requested), (1, 4));
    }
}
