//! A histogram as it is told: bounds, counts and a sum.

use serde::{Deserialize, Serialize};

/// How often values fell between bounds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Histogram {
    /// Upper bounds, each included, rising.
    pub bounds: Vec<f64>,
    /// Values at or below each bound and above the one before; the last is for what is above all.
    pub counts: Vec<u64>,
    /// All values added up.
    pub sum: f64,
}

impl Histogram {
    /// How many values there were.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The mean, or none without values.
    #[expect(clippy::cast_precision_loss, reason = "a mean of so many values is no more exact")]
    pub fn mean(&self) -> Option<f64> {
        let count = self.count();
        (count > 0).then(|| self.sum / count as f64)
    }

    /// The bound that this share of the values (0 to 1) does not exceed; infinite above the last
    /// bound, none without values.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rank among values that were counted"
    )]
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let count = self.count();
        if count == 0 {
            return None;
        }
        let rank = ((count as f64 * share).ceil() as u64).clamp(1, count);
        let mut seen = 0;
        for (at, bucket) in self.counts.iter().enumerate() {
            seen += bucket;
            if seen >= rank {
                return Some(self.bounds.get(at).copied().unwrap_or(f64::INFINITY));
            }
        }
        Some(f64::INFINITY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_the_bound_that_covers_it() {
        let histogram =
            Histogram { bounds: vec![1.0, 2.0, 4.0], counts: vec![50, 49, 0, 1], sum: 200.0 };
        assert_eq!(histogram.quantile(0.5), Some(1.0));
        assert_eq!(histogram.quantile(0.99), Some(2.0));
        assert_eq!(histogram.quantile(1.0), Some(f64::INFINITY));
        assert_eq!(histogram.mean(), Some(2.0));
        assert_eq!(Histogram::default().quantile(0.5), None);
    }
}
