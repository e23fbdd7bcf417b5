//! History of the last ten minutes, for the plots of the status page.
//!
//! There is no timer, so that an idle node is not woken. Each request for a status adds a sample,
//! at most one per second. An open page samples every second, a scraper at its own interval.

#![expect(clippy::cast_precision_loss, reason = "values for plots")]

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use crate::status::Status;

/// Older samples are dropped.
const SPAN_MS: u64 = 600_000;
/// A sample is ignored if it is closer than this to the one before.
const INTERVAL_MS: u64 = 900;
/// Nothing is known of the time between samples that are further apart: it is a gap in the plots.
/// Scrapers ask at least once a minute.
const GAP_MS: u64 = 75_000;
/// The shortest period of a plot.
const PLOT_MS_MIN: u64 = 60_000;
/// Time slices of a plot.
pub(crate) const SLICE_COUNT: usize = 60;

/// A bounded history of samples.
#[derive(Debug, Default)]
pub(crate) struct Samples(Mutex<VecDeque<Sample>>);

/// Counters at one moment, summed over tenants.
#[derive(Debug, Clone, PartialEq)]
struct Sample {
    at_ms: u64,
    tier_matches: Vec<(String, u64)>,
    requested: u64,
    /// Bytes by flow, in the order of [`Flow::ALL`].
    flow_bytes: [u64; Flow::ALL.len()],
}

/// A flow of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flow {
    Read,
    Put,
    Demoted,
    Promoted,
    Evicted,
}

impl Flow {
    pub(crate) const ALL: [Self; 5] =
        [Self::Read, Self::Put, Self::Demoted, Self::Promoted, Self::Evicted];
}

/// The history in time slices of equal length, up to the last sample.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Series {
    /// Length of the period.
    pub(crate) span_s: f64,
    /// Tiers, fast to slow.
    pub(crate) tiers: Vec<String>,
    /// The slices, old to new.
    pub(crate) slices: Vec<TimeSlice>,
    /// Blocks requested in the period, also between samples that are far apart.
    pub(crate) requested: f64,
    /// Of these, blocks matched.
    pub(crate) matched: f64,
}

/// The counts in one time slice.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct TimeSlice {
    /// Seconds of the slice that lie between samples.
    pub(crate) sampled_s: f64,
    /// Blocks requested.
    pub(crate) requested: f64,
    /// Of these, blocks matched, by tier.
    pub(crate) matched: Vec<f64>,
    /// Bytes by flow.
    pub(crate) flow_bytes: [f64; Flow::ALL.len()],
}

impl TimeSlice {
    /// Rate of a flow in bytes per second. `None` without samples.
    pub(crate) fn rate(&self, flow: Flow) -> Option<f64> {
        (self.sampled_s > 0.0).then(|| self.flow_bytes[flow as usize] / self.sampled_s)
    }
}

impl Samples {
    /// Adds a sample of a status, unless the last one is too recent.
    pub(crate) fn record(&self, status: &Status) {
        let at_ms = status.node.at_unix_ms;
        let mut samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let last_ms = samples.back().map(|sample| sample.at_ms);
        // Times must increase, so the history is dropped if the clock was set back.
        if last_ms.is_some_and(|last_ms| at_ms < last_ms) {
            samples.clear();
        } else if last_ms.is_some_and(|last_ms| at_ms - last_ms < INTERVAL_MS) {
            return;
        }
        samples.push_back(Sample::of(status));
        // One sample from before the span stays, because the first slice begins after it.
        while samples.get(1).is_some_and(|second| second.at_ms + SPAN_MS < at_ms) {
            samples.pop_front();
        }
    }

    /// The history up to the last sample.
    ///
    /// Counts between two samples are spread evenly over the time between them, unless that is too
    /// long to say when they happened.
    pub(crate) fn series(&self) -> Series {
        let samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (Some(first), Some(last)) = (samples.front(), samples.back()) else {
            return Series::default();
        };
        let span_ms = (last.at_ms - first.at_ms).clamp(PLOT_MS_MIN, SPAN_MS);
        let tiers: Vec<String> = last.tier_matches.iter().map(|(name, _)| name.clone()).collect();
        let slice = || TimeSlice { matched: vec![0.0; tiers.len()], ..TimeSlice::default() };
        let mut slices: Vec<TimeSlice> = (0..SLICE_COUNT).map(|_| slice()).collect();
        let begin_ms = last.at_ms as f64 - span_ms as f64;
        let slice_ms = span_ms as f64 / SLICE_COUNT as f64;
        let (mut requested, mut matched) = (0.0, 0.0);
        for (old, new) in samples.iter().zip(samples.iter().skip(1)) {
            let (from, to) = (old.at_ms as f64 - begin_ms, new.at_ms as f64 - begin_ms);
            let share = ((to - from.max(0.0)) / (to - from)).max(0.0);
            requested += new.requested.saturating_sub(old.requested) as f64 * share;
            for tier in &tiers {
                matched += new.matched(tier).saturating_sub(old.matched(tier)) as f64 * share;
            }
            if new.at_ms - old.at_ms > GAP_MS {
                continue;
            }
            for (at, slice) in slices.iter_mut().enumerate() {
                // The overlap of the slice with the time between the samples.
                let low = (at as f64 * slice_ms).max(from);
                let high = ((at + 1) as f64 * slice_ms).min(to);
                if high > low {
                    slice.add(old, new, &tiers, (high - low) / (to - from), (high - low) / 1e3);
                }
            }
        }
        Series { span_s: span_ms as f64 / 1e3, tiers, slices, requested, matched }
    }
}

impl TimeSlice {
    /// Adds a share of the counts between two samples, for the seconds that overlap this slice.
    fn add(&mut self, old: &Sample, new: &Sample, tiers: &[String], share: f64, sampled_s: f64) {
        let part = |old: u64, new: u64| new.saturating_sub(old) as f64 * share;
        self.sampled_s += sampled_s;
        self.requested += part(old.requested, new.requested);
        for (matched, tier) in self.matched.iter_mut().zip(tiers) {
            *matched += part(old.matched(tier), new.matched(tier));
        }
        for (at, bytes) in self.flow_bytes.iter_mut().enumerate() {
            *bytes += part(old.flow_bytes[at], new.flow_bytes[at]);
        }
    }
}

impl Sample {
    fn of(status: &Status) -> Self {
        let mut tier_matches: Vec<(String, u64)> = Vec::new();
        for tier in status.tenants.iter().flat_map(|tenant| &tenant.tiers) {
            match tier_matches.iter_mut().find(|(name, _)| *name == tier.name) {
                Some((_, matched)) => *matched += tier.matched_blocks,
                None => tier_matches.push((tier.name.clone(), tier.matched_blocks)),
            }
        }
        let sum = |of: fn(&crate::status::TenantStatus) -> u64| status.tenants.iter().map(of).sum();
        let flow = |flow| match flow {
            Flow::Read => sum(|tenant| tenant.gets.bytes),
            Flow::Put => sum(|tenant| tenant.puts.bytes),
            Flow::Demoted => sum(|tenant| tenant.mover.demoted_bytes),
            Flow::Promoted => sum(|tenant| tenant.mover.promoted_bytes),
            Flow::Evicted => sum(|tenant| tenant.evictions.bytes),
        };
        Self {
            at_ms: status.node.at_unix_ms,
            tier_matches,
            requested: sum(|tenant| tenant.hit_rate.requested_blocks),
            flow_bytes: Flow::ALL.map(flow),
        }
    }

    fn matched(&self, tier: &str) -> u64 {
        let found = self.tier_matches.iter().find(|(name, _)| name == tier);
        found.map_or(0, |(_, matched)| *matched)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::{TenantStatus, TierStatus};

    fn status(at_s: u64, requested: u64, matched: u64, bytes: u64) -> Status {
        let mut status = Status::default();
        status.node.at_unix_ms = at_s * 1000;
        let name = "dram".to_owned();
        let tier = TierStatus { name, matched_blocks: matched, ..TierStatus::default() };
        let mut tenant = TenantStatus { tiers: vec![tier], ..TenantStatus::default() };
        tenant.hit_rate.requested_blocks = requested;
        tenant.gets.bytes = bytes;
        status.tenants = vec![tenant];
        status
    }

    fn total(series: &Series) -> (f64, f64) {
        let requested: f64 = series.slices.iter().map(|slice| slice.requested).sum();
        let matched: f64 = series.slices.iter().map(|slice| slice.matched[0]).sum();
        (requested.round(), matched.round())
    }

    #[test]
    fn counts_between_samples_are_spread_over_the_time_between_them() {
        let samples = Samples::default();
        samples.record(&status(100, 0, 0, 0));
        samples.record(&status(110, 100, 50, 1000));
        samples.record(&status(120, 100, 50, 1000));
        let series = samples.series();
        assert_eq!(series.span_s.to_bits(), 60f64.to_bits());
        assert_eq!(total(&series), (100.0, 50.0));
        let last = &series.slices[SLICE_COUNT - 1];
        assert_eq!(last.rate(Flow::Read), Some(0.0), "sampled, without reads");
        let busy = series.slices[SLICE_COUNT - 15].rate(Flow::Read).unwrap();
        assert!((busy - 100.0).abs() < 1e-6, "1000 bytes in 10 s: {busy}");
        assert_eq!(series.slices[0].rate(Flow::Read), None, "not sampled");
    }

    /// A page that was opened after nine minutes drew their mean as a level line.
    #[test]
    fn a_long_time_without_samples_is_a_gap() {
        let samples = Samples::default();
        samples.record(&status(1000, 0, 0, 0));
        samples.record(&status(1540, 900, 450, 1 << 30));
        samples.record(&status(1550, 910, 455, 1 << 30));
        let series = samples.series();
        let gap = &series.slices[SLICE_COUNT / 2];
        assert_eq!((gap.sampled_s.to_bits(), gap.rate(Flow::Read)), (0f64.to_bits(), None));
        assert_eq!(total(&series), (10.0, 5.0), "in slices");
        let totals = (series.requested.round(), series.matched.round());
        assert_eq!(totals, (910.0, 455.0), "in the period");
    }

    #[test]
    fn samples_older_than_the_span_are_dropped() {
        let samples = Samples::default();
        for at_s in 0..5000 {
            samples.record(&status(1000 + at_s, at_s, 0, 0));
            samples.record(&status(1000 + at_s, at_s, 0, 0));
        }
        assert_eq!(samples.0.lock().unwrap().len(), 602);
        let series = samples.series();
        assert_eq!(total(&series).0.to_bits(), 600f64.to_bits());
    }

    #[test]
    fn setting_the_clock_back_drops_the_history() {
        let samples = Samples::default();
        samples.record(&status(1000, 10, 0, 0));
        samples.record(&status(10, 20, 0, 0));
        samples.record(&status(12, 30, 0, 0));
        assert_eq!(total(&samples.series()).0.to_bits(), 10f64.to_bits());
    }
}
