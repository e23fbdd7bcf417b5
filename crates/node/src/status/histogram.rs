//! A histogram of a status: bounds, counts and a sum.

use serde::{Deserialize, Serialize};

/// Counts of values by bucket.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Histogram {
    /// Inclusive upper bounds, in ascending order.
    pub bounds: Vec<f64>,
    /// Number of values in each bucket. The last bucket is for values above the last bound.
    pub counts: Vec<u64>,
    /// Sum of all values.
    pub sum: f64,
}

impl Histogram {
    /// Number of values.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Adds the values of another histogram with the same bounds.
    pub(crate) fn add(&mut self, other: &Self) {
        if self.counts.is_empty() {
            self.clone_from(other);
            return;
        }
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        self.sum += other.sum;
    }

    /// The mean, or `None` without values.
    #[expect(clippy::cast_precision_loss, reason = "an approximate mean is enough")]
    pub fn mean(&self) -> Option<f64> {
        let count = self.count();
        (count > 0).then(|| self.sum / count as f64)
    }

    /// The upper bound of the bucket with this quantile (0 to 1). Infinite above the last bound,
    /// `None` without values.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rank up to the number of values"
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
    fn a_quantile_is_the_upper_bound_of_its_bucket() {
        let histogram =
            Histogram { bounds: vec![1.0, 2.0, 4.0], counts: vec![50, 49, 0, 1], sum: 200.0 };
        assert_eq!(histogram.quantile(0.5), Some(1.0));
        assert_eq!(histogram.quantile(0.99), Some(2.0));
        assert_eq!(histogram.quantile(1.0), Some(f64::INFINITY));
        assert_eq!(histogram.mean(), Some(2.0));
        assert_eq!(Histogram::default().quantile(0.5), None);
    }
}
