//! Latency histograms of fixed size that can be merged, and their summaries.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

/// Upper bound of the histogram: one minute, in nanoseconds. Longer latencies count as this one.
const CEILING_NS: u64 = 60_000_000_000;

/// A histogram of latencies with three significant digits.
#[derive(Debug, Clone)]
pub struct Latencies(Histogram<u64>);

/// Count, percentiles and buckets of a histogram, in microseconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LatencySummary {
    /// Number of recorded latencies.
    pub count: u64,
    /// Median.
    pub us_p50: f64,
    /// 90th percentile.
    pub us_p90: f64,
    /// 99th percentile.
    pub us_p99: f64,
    /// Maximum.
    pub us_max: f64,
    /// Upper bound of each bucket in microseconds and its count, not cumulative.
    pub buckets: Vec<(f64, u64)>,
}

impl Latencies {
    /// An empty histogram.
    pub fn new() -> Self {
        Self::default()
    }

    /// Records one latency.
    pub fn record(&mut self, latency: Duration) {
        let ns = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.0.saturating_record(ns);
    }

    /// Adds another histogram to this one.
    pub fn merge(&mut self, other: &Self) {
        let added = self.0.add(&other.0);
        debug_assert!(added.is_ok(), "all histograms have the same bounds");
    }

    /// The latency at a quantile from 0 to 1, in microseconds.
    pub fn us_at(&self, quantile: f64) -> f64 {
        self.0.value_at_quantile(quantile) as f64 / 1e3
    }

    /// The summary of all recorded latencies.
    pub fn summary(&self) -> LatencySummary {
        let us = |ns: u64| ns as f64 / 1e3;
        let steps = self.0.iter_log(1000, std::f64::consts::SQRT_2);
        LatencySummary {
            count: self.0.len(),
            us_p50: us(self.0.value_at_quantile(0.5)),
            us_p90: us(self.0.value_at_quantile(0.9)),
            us_p99: us(self.0.value_at_quantile(0.99)),
            us_max: us(self.0.max()),
            buckets: steps
                .map(|step| (us(step.value_iterated_to()), step.count_since_last_iteration()))
                .collect(),
        }
    }
}

impl Default for Latencies {
    fn default() -> Self {
        let histogram = Histogram::new_with_bounds(1, CEILING_NS, 3);
        Self(histogram.expect("one nanosecond to a minute at three digits is a valid range"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 15,321 ns were 15.321000000000002 us.
    #[test]
    fn microseconds_have_three_decimals() {
        let mut latencies = Latencies::default();
        latencies.record(Duration::from_nanos(15_321));
        let max = latencies.summary().us_max.to_string();
        assert!(max.split('.').nth(1).is_none_or(|decimals| decimals.len() <= 3), "{max}");
    }

    #[test]
    fn a_merged_histogram_contains_both() {
        let (mut one, mut other) = (Latencies::new(), Latencies::new());
        (0..99).for_each(|_| one.record(Duration::from_micros(10)));
        other.record(Duration::from_millis(5));
        one.merge(&other);
        let summary = one.summary();
        assert_eq!(summary.count, 100);
        assert!((summary.us_p50 - 10.0).abs() < 0.1, "{summary:?}");
        assert!((summary.us_max - 5000.0).abs() < 10.0, "{summary:?}");
        assert_eq!(summary.buckets.iter().map(|(_, count)| count).sum::<u64>(), 100);
    }

    #[test]
    fn a_latency_above_the_upper_bound_is_recorded_without_a_panic() {
        let mut latencies = Latencies::new();
        latencies.record(Duration::MAX);
        latencies.record(Duration::ZERO);
        assert_eq!(latencies.summary().count, 2);
    }
}
