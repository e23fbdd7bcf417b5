//! The plots of a replay, each drawn from its result.

use plotters::prelude::*;

use crate::figures::{compact_count, duration};
use crate::report::PlotError;
use crate::report::palette::Hue;
use crate::report::plot::{Axis, HALF, WIDE, failed, svg};
use crate::result::{ReplayResult, SweepPoint, TimeSlice, ratio};

/// Height of the labels below a plot.
const LABELS_HEIGHT: u32 = 42;
/// Width of the labels left of a plot.
const LABELS_WIDTH: u32 = 48;

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the drawing library passes references")]
fn whole_percent(share: &f64) -> String {
    format!("{:.0} %", share * 100.0)
}

fn shares<'a>(most: f64) -> Axis<'a, std::ops::Range<f64>> {
    Axis { range: 0.0..most, title: "", labels: 6, write: &whole_percent, room: LABELS_WIDTH }
}

/// Hit rate over the time of the trace, stacked by tier, with the line of an unbounded cache.
pub(super) fn hits_over_time(result: &ReplayResult) -> Result<String, PlotError> {
    let fail = failed("hits over time");
    let minutes = result.timeline.last().map_or(1.0, |slice| slice.to_seconds / 60.0).max(1e-3);
    let tiers = result.tiers();
    let x = Axis {
        range: 0.0..minutes,
        title: "minutes since the start of the trace",
        labels: 13,
        write: &|minute: &f64| format!("{minute:.0}"),
        room: LABELS_HEIGHT,
    };
    let best =
        result.timeline.iter().map(|slice| ratio(slice.unbounded as f64, slice.blocks as f64));
    let most = (best.fold(0.1, f64::max) * 1.1).min(1.0);
    svg("hits over time", WIDE, x, shares(most), |chart| {
        // The highest sum is drawn first; each lower one covers its part.
        for count in (1..=tiers.len()).rev() {
            let hue = Hue::of_tier(&tiers[count - 1]).marker();
            for run in requested_runs(&result.timeline) {
                let steps = run.iter().flat_map(|slice| {
                    let hits = tiers[..count].iter().filter_map(|tier| slice.hits.get(tier));
                    let share = ratio(hits.sum::<u64>() as f64, slice.blocks as f64);
                    [(slice.from_seconds / 60.0, share), (slice.to_seconds / 60.0, share)]
                });
                let area = AreaSeries::new(steps, 0.0, hue);
                chart.draw_series(area).map_err(|error| fail(&error))?;
            }
        }
        for run in requested_runs(&result.timeline) {
            let unbounded = run.iter().flat_map(|slice| {
                let share = ratio(slice.unbounded as f64, slice.blocks as f64);
                [(slice.from_seconds / 60.0, share), (slice.to_seconds / 60.0, share)]
            });
            let line = LineSeries::new(unbounded, Hue::Best.marker().stroke_width(2));
            chart.draw_series(line).map_err(|error| fail(&error))?;
        }
        Ok(())
    })
}

/// The time slices with requests, in runs: a hit rate without a request is a gap, not zero.
fn requested_runs(timeline: &[TimeSlice]) -> impl Iterator<Item = &[TimeSlice]> {
    let runs = timeline.chunk_by(|one, next| (one.blocks > 0) == (next.blocks > 0));
    runs.filter(|run| run[0].blocks > 0)
}

/// A call, its colour and its latencies.
pub(super) struct LatencyLine<'a> {
    pub(super) name: String,
    pub(super) hue: Hue,
    buckets: &'a [(f64, u64)],
}

/// The lines of the latency plot.
pub(super) fn latency_lines(result: &ReplayResult) -> Vec<LatencyLine<'_>> {
    let Some(latency) = &result.latency else { return Vec::new() };
    let line = |name: String, hue, buckets| LatencyLine { name, hue, buckets };
    let mut lines = vec![line("lookup".to_owned(), Hue::Soft, &latency.lookup.buckets[..])];
    for tier in result.tiers() {
        if let Some(summary) = latency.read.get(&tier) {
            lines.push(line(format!("read, {tier}"), Hue::of_tier(&tier), &summary.buckets));
        }
    }
    lines.push(line("put".to_owned(), Hue::Other, &latency.put.buckets));
    lines.retain(|line| !line.buckets.is_empty());
    lines
}

/// Cumulative distribution of latencies by call.
pub(super) fn latencies(result: &ReplayResult) -> Result<String, PlotError> {
    let fail = failed("latencies");
    let lines = latency_lines(result);
    let bounds = || lines.iter().flat_map(|line| line.buckets.iter().map(|(us, _)| *us));
    let (low, high) = (bounds().fold(f64::MAX, f64::min), bounds().fold(f64::MIN, f64::max));
    let (low, high) = if low < high { (low, high) } else { (1.0, 1e3) };
    let x = Axis {
        range: (low / 1.5..high).log_scale(),
        title: "latency of one call",
        labels: 8,
        write: &|us: &f64| duration(*us),
        room: LABELS_HEIGHT,
    };
    svg("latencies", HALF, x, shares(1.0), |chart| {
        for line in &lines {
            let total: u64 = line.buckets.iter().map(|(_, count)| count).sum();
            let mut sum = 0;
            let curve = line.buckets.iter().map(|(us, count)| {
                sum += count;
                (*us, ratio(sum as f64, total as f64))
            });
            let curve = LineSeries::new(curve, line.hue.marker().stroke_width(2));
            chart.draw_series(curve).map_err(|error| fail(&error))?;
        }
        Ok(())
    })
}

/// The bars of the bytes moved: label, colour and bytes.
fn byte_bars(result: &ReplayResult) -> Vec<(String, Hue, u64)> {
    let block = result.payload.block_bytes;
    let mut bars = vec![("requested".to_owned(), Hue::Miss, result.blocks_requested * block)];
    for tier in result.tiers() {
        let hits = result.hits_by_tier.get(&tier).copied().unwrap_or(0);
        bars.push((format!("read, {tier}"), Hue::of_tier(&tier), hits * block));
    }
    bars.push(("put".to_owned(), Hue::Other, result.bytes_written));
    for (tier, bytes) in &result.bytes_written_down {
        bars.push((format!("written, {tier}"), Hue::of_tier(tier), *bytes));
    }
    bars
}

/// Bytes moved, as bars.
pub(super) fn bytes_moved(result: &ReplayResult) -> Result<String, PlotError> {
    let fail = failed("bytes moved");
    let bars = byte_bars(result);
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let most = bars.iter().map(|(_, _, bytes)| gib(*bytes)).fold(1e-3, f64::max) * 1.16;
    let count = bars.len() as f64;
    let x = Axis {
        range: 0.0..most,
        title: "GiB",
        labels: 8,
        write: &|gib: &f64| format!("{gib:.1}"),
        room: LABELS_HEIGHT,
    };
    let y = Axis { range: 0.0..count, title: "", labels: 1, write: &|_| String::new(), room: 96 };
    svg("bytes moved", HALF, x, y, |chart| {
        let ink = ("sans-serif", 13).into_font().color(&Hue::Ink.marker());
        for (at, (name, hue, bytes)) in bars.iter().enumerate() {
            let middle = count - at as f64 - 0.5;
            let bar = [(0.0, middle - 0.3), (gib(*bytes), middle + 0.3)];
            let bar = Rectangle::new(bar, hue.marker().filled());
            chart.draw_series([bar]).map_err(|error| fail(&error))?;
            let value = EmptyElement::at((gib(*bytes), middle))
                + Text::new(format!("{:.2}", gib(*bytes)), (6, -6), ink.clone());
            chart.draw_series([value]).map_err(|error| fail(&error))?;
            let name =
                EmptyElement::at((0.0, middle)) + Text::new(name.clone(), (-94, -6), ink.clone());
            chart.draw_series([name]).map_err(|error| fail(&error))?;
        }
        Ok(())
    })
}

/// Distribution of reuse distances, with a line at the capacity of DRAM.
pub(super) fn reuse_distances(result: &ReplayResult) -> Result<String, PlotError> {
    let fail = failed("reuse distances");
    let buckets = &result.reuse.uses_by_octave;
    let total: u64 = buckets.iter().sum();
    let heights = buckets.iter().map(|count| ratio(*count as f64, total as f64));
    let most = heights.clone().fold(0.05, f64::max) * 1.15;
    let width = buckets.len().max(1) as f64;
    let x = Axis {
        range: 0.0..width,
        title: "other blocks used in between",
        labels: 10,
        write: &|exponent: &f64| compact_count(power_of_two(*exponent)),
        room: LABELS_HEIGHT,
    };
    svg("reuse distances", HALF, x, shares(most), |chart| {
        let capacity = (result.run.dram_blocks.max(1) as f64).log2();
        for (at, height) in heights.enumerate() {
            let at = at as f64;
            let hue = if at + 0.5 <= capacity { Hue::Dram } else { Hue::Miss };
            let bar = [(at + 0.08, 0.0), (at + 0.92, height)];
            let bar = Rectangle::new(bar, hue.marker().filled());
            chart.draw_series([bar]).map_err(|error| fail(&error))?;
        }
        let line = [(capacity.min(width), 0.0), (capacity.min(width), most)];
        let line = LineSeries::new(line, Hue::Ink.marker());
        chart.draw_series(line).map_err(|error| fail(&error))?;
        Ok(())
    })
}

/// One of the hit rates of a point.
type Rate = fn(&SweepPoint) -> f64;

/// Hit rates of DRAM alone at several capacities.
pub(super) fn dram_sizes(result: &ReplayResult) -> Result<String, PlotError> {
    let fail = failed("DRAM sizes");
    let points = &result.dram_sweep;
    let size = |point: &SweepPoint| (point.dram_blocks.max(1) as f64).log2();
    let (low, high) = (points.iter().map(size).fold(f64::MAX, f64::min), points.iter().map(size));
    let high = high.fold(low + 1.0, f64::max);
    let most = (result.ceilings.unbounded * 1.2).clamp(0.05, 1.0);
    let x = Axis {
        range: low..high,
        title: "blocks that fit into DRAM",
        labels: 8,
        write: &|exponent: &f64| compact_count(power_of_two(*exponent)),
        room: LABELS_HEIGHT,
    };
    svg("DRAM sizes", HALF, x, shares(most), |chart| {
        let level = result.ceilings.unbounded;
        let line = LineSeries::new([(low, level), (high, level)], Hue::Soft.marker());
        chart.draw_series(line).map_err(|error| fail(&error))?;
        let rates: [(Hue, Rate); 2] =
            [(Hue::Best, |point| point.optimum), (Hue::Dram, |point| point.hit_rate)];
        for (hue, rate) in rates {
            let curve = points.iter().map(|point| (size(point), rate(point)));
            let line = LineSeries::new(curve.clone(), hue.marker().stroke_width(2));
            chart.draw_series(line).map_err(|error| fail(&error))?;
            let dots = curve.map(|at| Circle::new(at, 4, hue.marker().filled()));
            chart.draw_series(dots).map_err(|error| fail(&error))?;
        }
        let here = (result.run.dram_blocks.max(1) as f64).log2();
        let line = LineSeries::new([(here, 0.0), (here, most)], Hue::Ink.marker());
        chart.draw_series(line).map_err(|error| fail(&error))?;
        Ok(())
    })
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a label; exponents on an axis are between 0 and 64"
)]
fn power_of_two(exponent: f64) -> u64 {
    exponent.exp2().round() as u64
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// A pause of a trace was drawn as a hit rate of 0 %.
    #[test]
    fn time_without_requests_is_a_gap() {
        let slice = |at: u32, blocks| TimeSlice {
            from_seconds: f64::from(at),
            to_seconds: f64::from(at + 1),
            blocks,
            hits: BTreeMap::new(),
            unbounded: 0,
        };
        let blocks = [0, 4, 4, 0, 0, 2];
        let timeline: Vec<_> = (0..).zip(blocks).map(|(at, blocks)| slice(at, blocks)).collect();
        let runs: Vec<_> = requested_runs(&timeline).map(<[_]>::len).collect();
        assert_eq!(runs, [2, 1]);
    }
}
