//! The last ten minutes, kept while somebody looks.
//!
//! There is no timer: whoever asks for a status leaves a sample behind, at most one a second. A
//! page that is open fills it, a scraper fills it coarsely, and an idle node is not woken.

#![expect(clippy::cast_precision_loss, reason = "figures for plots")]

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use crate::status::Status;

/// What is older is forgotten.
const SPAN_MS: u64 = 600_000;
/// Samples closer than this are one.
const INTERVAL_MS: u64 = 900;
/// The shortest time that a plot shows.
const PLOT_MS_MIN: u64 = 60_000;
/// Pieces that a plot is made of.
pub(crate) const PIECES: usize = 60;

/// A bounded memory of samples.
#[derive(Debug, Default)]
pub(crate) struct Samples(Mutex<VecDeque<Sample>>);

/// Counters at one moment, summed over tenants.
#[derive(Debug, Clone, PartialEq)]
struct Sample {
    at_ms: u64,
    tier_matches: Vec<(String, u64)>,
    requested: u64,
    /// Bytes: got, put, demoted, promoted, evicted.
    moved: [u64; Flow::ALL.len()],
}

/// A stream of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flow {
    Got,
    Put,
    Demoted,
    Promoted,
    Evicted,
}

impl Flow {
    pub(crate) const ALL: [Self; 5] =
        [Self::Got, Self::Put, Self::Demoted, Self::Promoted, Self::Evicted];
}

/// What happened in equal pieces of time up to now.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Series {
    /// How much time it covers.
    pub(crate) span_s: f64,
    /// Tiers, fast to slow.
    pub(crate) tiers: Vec<String>,
    /// The pieces, old to new.
    pub(crate) pieces: Vec<Piece>,
}

/// What happened in one piece of time.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Piece {
    /// Seconds of it that samples cover.
    pub(crate) known_s: f64,
    /// Blocks requested.
    pub(crate) requested: f64,
    /// Of these, matched, by tier.
    pub(crate) matched: Vec<f64>,
    /// Bytes by flow.
    pub(crate) moved: [f64; Flow::ALL.len()],
}

impl Piece {
    /// Bytes a second of a flow; none where nothing was sampled.
    pub(crate) fn rate(&self, flow: Flow) -> Option<f64> {
        (self.known_s > 0.0).then(|| self.moved[flow as usize] / self.known_s)
    }
}

impl Samples {
    /// Remembers a status, unless one was remembered just now.
    pub(crate) fn note(&self, status: &Status) {
        let at_ms = status.node.at_unix_ms;
        let mut samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let last_ms = samples.back().map(|sample| sample.at_ms);
        // A clock that was set back starts anew: times have to rise.
        if last_ms.is_some_and(|last_ms| at_ms < last_ms) {
            samples.clear();
        } else if last_ms.is_some_and(|last_ms| at_ms - last_ms < INTERVAL_MS) {
            return;
        }
        samples.push_back(Sample::of(status));
        // One sample from before the span stays: it is where the first piece begins.
        while samples.get(1).is_some_and(|second| second.at_ms + SPAN_MS < at_ms) {
            samples.pop_front();
        }
    }

    /// What the samples say of the time up to the last of them.
    pub(crate) fn series(&self) -> Series {
        let samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (Some(first), Some(last)) = (samples.front(), samples.back()) else {
            return Series::default();
        };
        let span_ms = (last.at_ms - first.at_ms).clamp(PLOT_MS_MIN, SPAN_MS);
        let tiers: Vec<String> = last.tier_matches.iter().map(|(name, _)| name.clone()).collect();
        let piece = || Piece { matched: vec![0.0; tiers.len()], ..Piece::default() };
        let mut pieces: Vec<Piece> = (0..PIECES).map(|_| piece()).collect();
        let begin_ms = last.at_ms as f64 - span_ms as f64;
        let piece_ms = span_ms as f64 / PIECES as f64;
        for (old, new) in samples.iter().zip(samples.iter().skip(1)) {
            let (from, to) = (old.at_ms as f64 - begin_ms, new.at_ms as f64 - begin_ms);
            for (at, piece) in pieces.iter_mut().enumerate() {
                let low = (at as f64 * piece_ms).max(from);
                let high = ((at + 1) as f64 * piece_ms).min(to);
                if high > low {
                    piece.add(old, new, &tiers, (high - low) / (to - from), (high - low) / 1e3);
                }
            }
        }
        Series { span_s: span_ms as f64 / 1e3, tiers, pieces }
    }
}

impl Piece {
    /// Adds the share of what happened between two samples that falls into this piece.
    fn add(&mut self, old: &Sample, new: &Sample, tiers: &[String], share: f64, known_s: f64) {
        let part = |old: u64, new: u64| new.saturating_sub(old) as f64 * share;
        self.known_s += known_s;
        self.requested += part(old.requested, new.requested);
        for (matched, tier) in self.matched.iter_mut().zip(tiers) {
            *matched += part(old.matched(tier), new.matched(tier));
        }
        for (at, moved) in self.moved.iter_mut().enumerate() {
            *moved += part(old.moved[at], new.moved[at]);
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
            Flow::Got => sum(|tenant| tenant.gets.bytes),
            Flow::Put => sum(|tenant| tenant.puts.bytes),
            Flow::Demoted => sum(|tenant| tenant.mover.demoted_bytes),
            Flow::Promoted => sum(|tenant| tenant.mover.promoted_bytes),
            Flow::Evicted => sum(|tenant| tenant.evictions.bytes),
        };
        Self {
            at_ms: status.node.at_unix_ms,
            tier_matches,
            requested: sum(|tenant| tenant.hit_rate.requested_blocks),
            moved: Flow::ALL.map(flow),
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
        let requested: f64 = series.pieces.iter().map(|piece| piece.requested).sum();
        let matched: f64 = series.pieces.iter().map(|piece| piece.matched[0]).sum();
        (requested.round(), matched.round())
    }

    #[test]
    fn what_happened_between_samples_is_spread_over_the_time_between_them() {
        let samples = Samples::default();
        samples.note(&status(100, 0, 0, 0));
        samples.note(&status(110, 100, 50, 1000));
        samples.note(&status(120, 100, 50, 1000));
        let series = samples.series();
        assert_eq!(series.span_s.to_bits(), 60f64.to_bits());
        assert_eq!(total(&series), (100.0, 50.0));
        let last = &series.pieces[PIECES - 1];
        assert_eq!(last.rate(Flow::Got), Some(0.0), "sampled, and nothing happened");
        let busy = series.pieces[PIECES - 15].rate(Flow::Got).unwrap();
        assert!((busy - 100.0).abs() < 1e-6, "1000 bytes in 10 s: {busy}");
        assert_eq!(series.pieces[0].rate(Flow::Got), None, "nobody looked then");
    }

    #[test]
    fn it_is_bounded_and_forgets_what_is_older_than_its_span() {
        let samples = Samples::default();
        for at_s in 0..5000 {
            samples.note(&status(1000 + at_s, at_s, 0, 0));
            samples.note(&status(1000 + at_s, at_s, 0, 0));
        }
        assert_eq!(samples.0.lock().unwrap().len(), 602);
        let series = samples.series();
        assert_eq!(total(&series).0.to_bits(), 600f64.to_bits());
    }

    #[test]
    fn a_clock_that_is_set_back_starts_anew() {
        let samples = Samples::default();
        samples.note(&status(1000, 10, 0, 0));
        samples.note(&status(10, 20, 0, 0));
        samples.note(&status(12, 30, 0, 0));
        assert_eq!(total(&samples.series()).0.to_bits(), 10f64.to_bits());
    }
}
