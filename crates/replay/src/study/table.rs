//! The table of a study: all policies and the optimum over all traces and capacities.

use std::fmt::Write as _;
use std::time::Duration;

use cascade_store::eviction::{Arc, Lru, Policy, PrefixCost, S3Fifo, Waterfall};
use serde::Serialize;

use super::{HintSet, StudyOptions, optimum, replay_metadata};
use crate::trace::Trace;

/// A policy in a study.
#[derive(Debug, Clone, Copy)]
pub struct StudiedPolicy {
    /// Name of its row.
    pub name: &'static str,
    /// Creates the policy.
    pub make: fn() -> Box<dyn Policy>,
    /// Whether the gain of prefix-cost is measured against it.
    pub is_baseline: bool,
}

/// All policies, baselines first.
pub fn studied_policies() -> Vec<StudiedPolicy> {
    let of = |name, make: fn() -> Box<dyn Policy>, is_baseline| StudiedPolicy {
        name,
        make,
        is_baseline,
    };
    vec![
        of("lru", || Box::new(Lru::default()), true),
        of("s3fifo", || Box::new(S3Fifo::default()), true),
        of("s3fifo, one use", || Box::new(S3Fifo::promoting_at(1)), true),
        of("arc", || Box::new(Arc::default()), true),
        of("waterfall", || Box::new(Waterfall::default()), false),
        of("prefix-cost", || Box::new(PrefixCost::default()), false),
    ]
}

/// The sets of hints that prefix-cost is studied with.
fn hint_sets() -> Vec<(&'static str, HintSet)> {
    let none = HintSet::default();
    let seconds = |seconds| Some(Duration::from_secs(seconds));
    vec![
        ("no hints", none),
        ("end of session, at once", HintSet { session_end_after: seconds(0), ..none }),
        ("end of session, 60 s late", HintSet { session_end_after: seconds(60), ..none }),
        ("look-ahead 5 s", HintSet { lookahead: seconds(5), ..none }),
        ("look-ahead 30 s", HintSet { lookahead: seconds(30), ..none }),
        ("stop reason", HintSet { stop: true, ..none }),
    ]
}

/// Hit rates of one policy at each capacity.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PolicyRow {
    /// Name of the policy or of the hints.
    pub name: String,
    /// Hit rate in percent, for each capacity.
    pub hit_percent: Vec<f64>,
}

/// The results of one trace.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TraceTable {
    /// Name of the trace.
    pub trace: String,
    /// Its requests.
    pub requests: u64,
    /// Blocks of all requests.
    pub blocks_requested: u64,
    /// Unique blocks; capacities are shares of them.
    pub unique_blocks: u64,
    /// One row per policy; the last one is the optimum.
    pub policies: Vec<PolicyRow>,
    /// Prefix-cost with hints.
    pub hints: Vec<PolicyRow>,
    /// Gain of prefix-cost over the best baseline at each capacity, in percent of its hit rate.
    pub gain_percent: Vec<f64>,
}

/// The results of a study.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StudyTable {
    /// Capacities in percent of the unique blocks of a trace.
    pub size_percent: Vec<u64>,
    /// One table per trace.
    pub traces: Vec<TraceTable>,
    /// Mean gain over all traces at each capacity.
    pub mean_gain_percent: Vec<f64>,
}

/// Replays every trace with every policy at every capacity (percent of the trace's unique blocks).
pub fn study_table(traces: &[Trace], size_percent: &[u64]) -> StudyTable {
    let tables: Vec<_> = traces.iter().map(|trace| trace_table(trace, size_percent)).collect();
    let mean = |size: usize| mean(tables.iter().map(|table| table.gain_percent[size]));
    let mean_gain_percent = (0..size_percent.len()).map(mean).collect();
    StudyTable { size_percent: size_percent.to_vec(), traces: tables, mean_gain_percent }
}

fn trace_table(trace: &Trace, size_percent: &[u64]) -> TraceTable {
    let capacities: Vec<u64> =
        size_percent.iter().map(|percent| (trace.unique_blocks * percent / 100).max(1)).collect();
    let row = |name: &str, make: fn() -> Box<dyn Policy>, hints: HintSet| {
        let options = StudyOptions { hints, ..StudyOptions::default() };
        let percent =
            |capacity: &u64| 100.0 * replay_metadata(trace, make(), *capacity, &options).hit_rate();
        PolicyRow { name: name.to_owned(), hit_percent: capacities.iter().map(percent).collect() }
    };
    let mut policies = Vec::new();
    let mut best = vec![0.0_f64; capacities.len()];
    let mut gain_percent = vec![0.0; capacities.len()];
    for policy in studied_policies() {
        let row = row(policy.name, policy.make, HintSet::default());
        // Baselines come first, so `best` is complete when prefix-cost is compared with it.
        for (size, hits) in row.hit_percent.iter().enumerate() {
            if policy.is_baseline {
                best[size] = best[size].max(*hits);
            } else if policy.name == "prefix-cost" && best[size] > 0.0 {
                gain_percent[size] = 100.0 * (hits / best[size] - 1.0);
            }
        }
        policies.push(row);
    }
    let optimum =
        capacities.iter().map(|capacity| 100.0 * optimum(trace, *capacity).hit_rate()).collect();
    policies.push(PolicyRow { name: "optimum (Belady)".to_owned(), hit_percent: optimum });
    let has_stops = trace.requests.iter().any(|request| request.stop.is_some());
    let hint_sets = hint_sets().into_iter().filter(|(_, set)| !set.stop || has_stops);
    TraceTable {
        trace: trace.name.clone(),
        requests: trace.requests.len() as u64,
        blocks_requested: trace.block_count(),
        unique_blocks: trace.unique_blocks,
        policies,
        hints: hint_sets
            .map(|(name, set)| row(name, || Box::new(PrefixCost::default()), set))
            .collect(),
        gain_percent,
    }
}

impl StudyTable {
    /// The study as tables in Markdown.
    pub fn markdown(&self) -> String {
        let mut text = String::new();
        for table in &self.traces {
            let TraceTable { trace, requests, blocks_requested, unique_blocks, .. } = table;
            push(
                &mut text,
                &format!(
                    "### {trace}\n\n{requests} requests, {blocks_requested} blocks requested, \
                     {unique_blocks} unique. Hit rate in percent of the blocks requested, by \
                     capacity in percent of the unique blocks:\n"
                ),
            );
            self.header(&mut text, "policy");
            table
                .policies
                .iter()
                .for_each(|row| push_row(&mut text, &row.name, &row.hit_percent, 2));
            push_row(
                &mut text,
                "**prefix-cost over the best baseline, %**",
                &table.gain_percent,
                1,
            );
            push(&mut text, "\nWith hints (prefix-cost):\n");
            self.header(&mut text, "hint");
            table.hints.iter().for_each(|row| push_row(&mut text, &row.name, &row.hit_percent, 2));
            push(&mut text, "");
        }
        push(&mut text, "### Mean gain of prefix-cost over the best baseline at each capacity\n");
        self.header(&mut text, "");
        push_row(&mut text, "mean of the traces, %", &self.mean_gain_percent, 1);
        text
    }

    fn header(&self, text: &mut String, first: &str) {
        let sizes: String = self
            .size_percent
            .iter()
            .fold(String::new(), |sizes, size| sizes + &format!(" {size} % |"));
        push(text, &format!("| {first} |{sizes}"));
        push(text, &format!("|---|{}", "---|".repeat(self.size_percent.len())));
    }
}

fn push(text: &mut String, line: &str) {
    text.push_str(line);
    text.push('\n');
}

fn push_row(text: &mut String, name: &str, values: &[f64], digits: usize) {
    let mut line = format!("| {name} |");
    for value in values {
        write!(line, " {value:.digits$} |").expect("writing to a String does not fail");
    }
    push(text, &line);
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (count, sum) = values.fold((0_u32, 0.0), |(count, sum), value| (count + 1, sum + value));
    if count == 0 { 0.0 } else { sum / f64::from(count) }
}
