//! Latencies in a histogram of fixed size, whatever the length of the run.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

/// Upper bound: a day in microseconds, the longest run.
const CEILING_US: u64 = 86_400_000_000;

/// A histogram of latencies from a microsecond to a day with three significant digits.
#[derive(Debug, Clone)]
pub struct LatencyHistogram {
    histogram: Histogram<u64>,
    /// Exact, unlike the sum of the buckets.
    sum: Duration,
}

/// Percentiles of a histogram in milliseconds. Zero without samples; `count` tells.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Percentiles {
    /// Number of samples.
    pub count: u64,
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 95th percentile.
    pub p95: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
    /// 99.99th percentile.
    pub p9999: f64,
    /// Maximum.
    pub max: f64,
}

impl Default for LatencyHistogram {
    fn default() -> Self {
        let histogram = Histogram::new_with_bounds(1, CEILING_US, 3);
        let histogram = histogram.expect("a microsecond to a day at three digits is a valid range");
        Self { histogram, sum: Duration::ZERO }
    }
}

impl LatencyHistogram {
    /// Records one latency.
    pub fn record(&mut self, latency: Duration) {
        let us = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
        self.histogram.saturating_record(us);
        self.sum += latency;
    }

    /// Adds all latencies of another histogram.
    ///
    /// # Panics
    /// Never: all histograms have the same range.
    pub fn add(&mut self, other: &Self) {
        let added = self.histogram.add(&other.histogram);
        added.expect("all histograms have the same range");
        self.sum += other.sum;
    }

    /// Number of latencies.
    pub fn count(&self) -> u64 {
        self.histogram.len()
    }

    /// Sum of the latencies.
    pub fn sum(&self) -> Duration {
        self.sum
    }

    /// The latency at a quantile from 0 to 1 in milliseconds. `None` without samples.
    pub fn ms_at(&self, quantile: f64) -> Option<f64> {
        let us = self.histogram.value_at_quantile(quantile);
        (self.count() > 0).then_some(us as f64 / 1e3)
    }

    /// The share of latencies up to this one. `None` without samples.
    pub fn share_within(&self, latency: Duration) -> Option<f64> {
        let us = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
        let within = self.histogram.count_between(0, us);
        (self.count() > 0).then(|| within as f64 / self.count() as f64)
    }

    /// The usual percentiles.
    pub fn percentiles(&self) -> Percentiles {
        let at = |quantile| self.ms_at(quantile).unwrap_or(0.0);
        let count = self.count();
        Percentiles {
            count,
            mean: self.sum.as_secs_f64() * 1e3 / (count.max(1) as f64),
            p50: at(0.5),
            p95: at(0.95),
            p99: at(0.99),
            p999: at(0.999),
            p9999: at(0.9999),
            max: self.histogram.max() as f64 / 1e3,
        }
    }

    /// Upper bounds of logarithmic steps in milliseconds, with the share of latencies up to each.
    pub fn cumulative(&self) -> Vec<(f64, f64)> {
        let total = self.count().max(1) as f64;
        let mut sum = 0;
        let steps = self.histogram.iter_log(10, std::f64::consts::SQRT_2);
        let points = steps.map(|step| {
            sum += step.count_since_last_iteration();
            (step.value_iterated_to() as f64 / 1e3, sum as f64 / total)
        });
        // From the fastest latency on.
        points.skip_while(|(_, share)| *share <= 0.0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_of_known_latencies_are_right_to_a_tenth_of_a_percent() {
        let mut histogram = LatencyHistogram::default();
        (1..=10_000).for_each(|ms| histogram.record(Duration::from_millis(ms)));
        let all = histogram.percentiles();
        let near = |found: f64, right: f64| (found / right - 1.0).abs() < 1.1e-3;
        assert_eq!(all.count, 10_000);
        for (found, right) in [
            (all.mean, 5000.5),
            (all.p50, 5000.0),
            (all.p95, 9500.0),
            (all.p99, 9900.0),
            (all.p999, 9990.0),
            (all.p9999, 9999.0),
            (all.max, 10_000.0),
        ] {
            assert!(near(found, right), "{found} instead of {right}");
        }
        let within = histogram.share_within(Duration::from_millis(2500)).unwrap();
        assert!((within - 0.25).abs() < 1e-3, "{within}");
        let cumulative = histogram.cumulative();
        assert!((cumulative.last().unwrap().1 - 1.0).abs() < 1e-9);
        assert!(cumulative[0].0 >= 1.0 && cumulative[0].1 > 0.0, "{cumulative:?}");
    }

    #[test]
    fn no_sample_is_no_latency() {
        let empty = LatencyHistogram::default();
        assert_eq!((empty.ms_at(0.95), empty.share_within(Duration::MAX)), (None, None));
        assert_eq!(empty.percentiles().count, 0);
    }

    #[test]
    fn a_request_of_minutes_is_not_cut() {
        let mut histogram = LatencyHistogram::default();
        histogram.record(Duration::from_secs(463));
        assert!((histogram.ms_at(0.95).unwrap() / 463_000.0 - 1.0).abs() < 1.1e-3);
    }
}
