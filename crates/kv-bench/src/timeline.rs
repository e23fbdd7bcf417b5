//! Bytes and tokens over time, in a bounded number of slices of equal length.

use std::time::Duration;

use serde::Serialize;

/// Most slices. At the limit two become one, so that a day needs no more memory than a minute.
const SLICES_MAX: usize = 240;
/// Length of a slice at first.
const FIRST_LENGTH: Duration = Duration::from_millis(250);

/// What happened in a slice of the run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Slice {
    /// Bytes read from the store.
    pub read_bytes: u64,
    /// Bytes written to it.
    pub written_bytes: u64,
    /// Tokens of requests that ended in it.
    pub tokens: u64,
}

/// The slices of a run.
#[derive(Debug, Clone)]
pub struct Timeline {
    slices: Vec<Slice>,
    length: Duration,
}

impl Default for Timeline {
    fn default() -> Self {
        Self { slices: Vec::new(), length: FIRST_LENGTH }
    }
}

impl Timeline {
    /// Adds to the slice at a time since the start of the run.
    pub fn add(&mut self, at: Duration, what: Slice) {
        while at.as_nanos() / self.length.as_nanos() >= SLICES_MAX as u128 {
            self.length *= 2;
            self.slices = self.slices.chunks(2).map(merged).collect();
        }
        let index = usize::try_from(at.as_nanos() / self.length.as_nanos()).unwrap_or(SLICES_MAX);
        if self.slices.len() <= index {
            self.slices.resize(index + 1, Slice::default());
        }
        self.slices[index] = merged(&[self.slices[index], what]);
    }

    /// Spreads what moved from one time to another over the slices between them.
    pub fn spread(&mut self, from: Duration, to: Duration, what: Slice) {
        // Makes room for the last slice, so that the length does not change below.
        self.add(to, Slice::default());
        let whole = to.saturating_sub(from).as_secs_f64();
        let (mut at, mut before) = (from, Slice::default());
        while at < to {
            let next = u32::try_from(at.as_nanos() / self.length.as_nanos()).unwrap_or(u32::MAX);
            let end = self.length.saturating_mul(next.saturating_add(1)).min(to);
            let until = what.share(end.saturating_sub(from).as_secs_f64() / whole);
            self.add(at, until.less(before));
            (at, before) = (end, until);
        }
        self.add(to, what.less(before));
    }

    /// The slices, with the end of each in seconds since the start of the run.
    pub fn slices(&self) -> Vec<(f64, Slice)> {
        let ends = (1..).map(|at| self.length.as_secs_f64() * f64::from(at));
        ends.zip(self.slices.iter().copied()).collect()
    }

    /// Length of a slice in seconds.
    pub fn slice_seconds(&self) -> f64 {
        self.length.as_secs_f64()
    }
}

impl Slice {
    fn share(self, share: f64) -> Self {
        let part = |amount| crate::window::part(amount, share);
        Self {
            read_bytes: part(self.read_bytes),
            written_bytes: part(self.written_bytes),
            tokens: part(self.tokens),
        }
    }

    fn less(self, other: Self) -> Self {
        Self {
            read_bytes: self.read_bytes.saturating_sub(other.read_bytes),
            written_bytes: self.written_bytes.saturating_sub(other.written_bytes),
            tokens: self.tokens.saturating_sub(other.tokens),
        }
    }
}

fn merged(slices: &[Slice]) -> Slice {
    slices.iter().fold(Slice::default(), |sum, it| Slice {
        read_bytes: sum.read_bytes + it.read_bytes,
        written_bytes: sum.written_bytes + it.written_bytes,
        tokens: sum.tokens + it.tokens,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_long_is_spread_over_its_time() {
        let mut timeline = Timeline::default();
        let what = Slice { read_bytes: 1001, ..Slice::default() };
        timeline.spread(Duration::from_millis(125), Duration::from_millis(1125), what);
        let bytes: Vec<_> = timeline.slices().iter().map(|(_, it)| it.read_bytes).collect();
        assert_eq!(bytes.iter().sum::<u64>(), 1001);
        assert_eq!(bytes, [125, 250, 251, 250, 125]);
        let mut timeline = Timeline::default();
        timeline.spread(Duration::ZERO, Duration::ZERO, what);
        assert_eq!(timeline.slices()[0].1, what);
    }

    #[test]
    fn a_long_run_has_longer_slices_and_the_same_sums() {
        let mut timeline = Timeline::default();
        for second in 0..3600 {
            let what = Slice { read_bytes: 3, written_bytes: 2, tokens: 1 };
            timeline.add(Duration::from_secs(second), what);
        }
        let slices = timeline.slices();
        assert!(slices.len() <= SLICES_MAX && slices.len() > SLICES_MAX / 2 - 1);
        assert!((timeline.slice_seconds() - 16.0).abs() < 1e-9);
        assert_eq!(slices.iter().map(|(_, it)| it.read_bytes).sum::<u64>(), 3 * 3600);
        assert_eq!(slices.iter().map(|(_, it)| it.tokens).sum::<u64>(), 3600);
        assert_eq!(slices[0].1.written_bytes, 32);
    }
}
