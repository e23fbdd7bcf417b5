//! The plots of the page, as SVG. Colours come from the style sheet of the page.

use std::fmt::Write;

use cascade_block::ByteSize;
use maud::{Markup, html};

use crate::http::page::tier_class;
use crate::samples::{Flow, SLICE_COUNT, Series, TimeSlice};

const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 220.0;
const LEFT: f64 = 72.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 28.0;

/// The flows that are drawn as lines, with their labels.
pub(super) const LINES: &[(Flow, &str)] = &[
    (Flow::Read, "read"),
    (Flow::Put, "put"),
    (Flow::Demoted, "demoted"),
    (Flow::Promoted, "promoted"),
];

/// The CSS class with the colour of a flow.
pub(super) fn flow_class(flow: Flow) -> &'static str {
    match flow {
        Flow::Read => "c-got",
        Flow::Put => "c-put",
        Flow::Demoted => "c-demoted",
        Flow::Promoted => "c-promoted",
        Flow::Evicted => "c-miss",
    }
}

/// The plot of the hit rate over time, stacked by the tier that matched.
pub(super) fn hits(series: &Series) -> Markup {
    let mut areas: Vec<(&str, String)> = Vec::new();
    let mut base = vec![0.0; series.slices.len()];
    for (at, tier) in series.tiers.iter().enumerate() {
        let path = stack(series, &mut base, |slice| slice.matched[at]);
        areas.push((tier_class(tier), path));
    }
    let missed = |slice: &TimeSlice| slice.requested - slice.matched.iter().sum::<f64>();
    areas.push(("c-miss", stack(series, &mut base, missed)));
    let ticks = [0.0, 0.25, 0.5, 0.75, 1.0].map(|share| (share, format!("{:.0} %", share * 100.0)));
    let is_empty = series.slices.iter().all(|slice| slice.requested <= 0.0);
    html! {
        svg.plot viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } role="img" data-plot="hits"
            aria-label="Hit rate by tier, over time" {
            (axes(series, &ticks))
            (gaps(series))
            @for (class, path) in &areas { path class={ "area " (class) } d=(path) {} }
            @if is_empty { (empty_label(series, "no requests in this period")) }
        }
    }
}

/// One layer of a stack: a bar for each time slice, on top of the layers below (`base`).
fn stack(series: &Series, base: &mut [f64], amount: impl Fn(&TimeSlice) -> f64) -> String {
    let mut path = String::new();
    for (at, (slice, base)) in series.slices.iter().zip(base).enumerate() {
        if slice.requested <= 0.0 {
            continue;
        }
        let share = (amount(slice) / slice.requested).clamp(0.0, 1.0 - *base);
        if share > 0.0 {
            let (left, right) = (x(at), x(at + 1));
            let (low, high) = (y(*base), y(*base + share));
            draw(&mut path, format_args!("M{left:.1} {low:.1}H{right:.1}V{high:.1}H{left:.1}Z"));
            *base += share;
        }
    }
    path
}

/// The plot of the flows in bytes per second, over time.
pub(super) fn rates(series: &Series) -> Markup {
    let all = LINES
        .iter()
        .flat_map(|(flow, _)| series.slices.iter().filter_map(move |slice| slice.rate(*flow)));
    let maximum = all.fold(0.0, f64::max);
    let top = axis_top(maximum);
    let ticks = [0.0, 0.25, 0.5, 0.75, 1.0].map(|share| (share, size(share * top)));
    html! {
        svg.plot viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } role="img" data-plot="rates"
            aria-label="Bytes per second read, put, demoted and promoted, over time" {
            (axes(series, &ticks))
            (gaps(series))
            @for (flow, _) in LINES {
                path class={ "line " (flow_class(*flow)) } d=(line(series, *flow, top)) {}
            }
            @if maximum <= 0.0 { (empty_label(series, "no data flow in this period")) }
        }
    }
}

fn line(series: &Series, flow: Flow, top: f64) -> String {
    let mut path = String::new();
    let mut is_drawing = false;
    for (at, slice) in series.slices.iter().enumerate() {
        // A slice without samples is a gap in the line.
        let Some(rate) = slice.rate(flow) else {
            is_drawing = false;
            continue;
        };
        let (from, to, height) = (x(at), x(at + 1), y(rate / top));
        let pen = if is_drawing { 'L' } else { 'M' };
        draw(&mut path, format_args!("{pen}{from:.1} {height:.1}H{to:.1}"));
        is_drawing = true;
    }
    path
}

fn axes(series: &Series, ticks: &[(f64, String)]) -> Markup {
    let span = series.span_s;
    let times = [(0.0, span), (0.5, span / 2.0), (1.0, 0.0)];
    let right = WIDTH - RIGHT;
    html! {
        @for (share, label) in ticks {
            line.grid x1=(LEFT) x2=(right) y1=(y(*share)) y2=(y(*share)) {}
            text.tick x=(LEFT - 6.0) y=(y(*share) + 4.0) text-anchor="end" { (label) }
        }
        @for (share, ago) in times {
            @let anchor = if share > 0.9 { "end" } else { "middle" };
            text.tick x=(LEFT + share * (right - LEFT)) y=(HEIGHT - 8.0) text-anchor=(anchor) {
                @if ago <= 0.0 { "now" }
                @else if ago < 120.0 { (format!("{ago:.0} s ago")) }
                @else { (format!("{:.0} min ago", ago / 60.0)) }
            }
        }
    }
}

/// The time slices without samples, as grey areas.
fn gaps(series: &Series) -> Markup {
    let slices = series.slices.iter().map(|slice| slice.sampled_s > 0.0).enumerate();
    let runs: Vec<_> = slices
        .collect::<Vec<_>>()
        .chunk_by(|one, next| one.1 == next.1)
        .filter(|run| !run[0].1)
        .map(|run| (run[0].0, run.len()))
        .collect();
    html! {
        @for (from, length) in runs {
            @let (left, right) = (x(from), x(from + length));
            rect.gap x=(format!("{left:.1}")) y=(TOP) width=(format!("{:.1}", right - left))
                height=(HEIGHT - TOP - BOTTOM) {
                title { "no samples: neither a page nor a scraper asked the node" }
            }
        }
    }
}

/// The label of a plot without data.
fn empty_label(series: &Series, reason: &str) -> Markup {
    let has_samples = series.slices.iter().any(|slice| slice.sampled_s > 0.0);
    let reason = if has_samples { reason } else { "no samples yet" };
    html! {
        text.quiet x=((LEFT + WIDTH - RIGHT) / 2.0) y=((TOP + HEIGHT - BOTTOM) / 2.0)
            text-anchor="middle" { (reason) }
    }
}

/// Horizontal position of the start of a time slice.
#[expect(clippy::cast_precision_loss, reason = "an index below sixty")]
fn x(at: usize) -> f64 {
    LEFT + (WIDTH - LEFT - RIGHT) * at as f64 / SLICE_COUNT as f64
}

/// Vertical position of a share of the axis.
fn y(share: f64) -> f64 {
    HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share.clamp(0.0, 1.0)
}

/// The top of the axis: the next power of two, so that it rarely changes and its quarters are
/// round.
fn axis_top(maximum: f64) -> f64 {
    if maximum < 4096.0 { 4096.0 } else { maximum.log2().ceil().exp2() }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes for display")]
fn size(bytes: f64) -> String {
    if bytes <= 0.0 { "0".to_owned() } else { ByteSize(bytes.round() as u64).to_string() }
}

fn draw(path: &mut String, step: std::fmt::Arguments<'_>) {
    path.write_fmt(step).expect("writing to a String cannot fail");
}
