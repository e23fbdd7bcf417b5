//! The options of `cascade bench kv` for recorded requests: names are those of the original.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use cascade_kv_bench::recorded::Recorded;
use cascade_kv_bench::validation::ValidationTrace;
use clap::Args;

use crate::Failure;

/// Conversations of a data set, unless --max-conversations says otherwise.
const CONVERSATIONS_MAX: u64 = 500;

/// Recorded requests in the place of generated ones.
#[derive(Debug, Args)]
pub(super) struct TraceArgs {
    /// Replay the arrivals and lengths of a BurstGPT trace; --num-users does not count.
    #[arg(long, help_heading = "Traces")]
    pub(super) use_burst_trace: bool,
    /// The trace of --use-burst-trace: a CSV file, or a directory of them.
    #[arg(long, value_name = "FILE", help_heading = "Traces")]
    burst_trace_path: Option<PathBuf>,
    /// Divide the times of the trace by X; 0: all requests are due at once [default: 1].
    #[arg(long, value_name = "X", help_heading = "Traces", allow_negative_numbers = true)]
    pub(super) trace_speedup: Option<f64>,
    /// End after N passes through the trace or the data set; 0: when the window ends [default: 0].
    #[arg(long, value_name = "N", help_heading = "Traces")]
    pub(super) replay_cycles: Option<u64>,
    /// Replay the conversations of a ShareGPT data set (JSON); a turn has at most 8,192 tokens.
    #[arg(long, value_name = "FILE", help_heading = "Traces")]
    pub(super) dataset_path: Option<PathBuf>,
    /// Read at most N conversations of the data set [default: 500].
    #[arg(long, value_name = "N", help_heading = "Traces")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    max_conversations: Option<u64>,
    /// Compare the hit rate with that of a trace: JSON with `cache_hit`, `read_bytes`,
    /// `write_bytes`, `context_tokens` and `generation_tokens` for each request.
    #[arg(long, value_name = "FILE", help_heading = "Traces")]
    validation_trace: Option<PathBuf>,
}

impl TraceArgs {
    /// Refuses options that have no effect, or contradict each other. `others` are the names of
    /// those that were given for generated requests.
    pub(super) fn check(&self, others: &[&str]) -> Result<(), Failure> {
        let needs = |name: &str, other: &str| {
            let advice = format!("add {other}, or leave {name} out");
            Err(Failure::usage(format!("{name} has no effect without {other}"), advice))
        };
        match (self.use_burst_trace, &self.burst_trace_path) {
            (true, None) => {
                return Err(Failure::usage(
                    "--use-burst-trace needs a trace",
                    "add --burst-trace-path FILE with BurstGPT_1.csv, which is in release v1.2 of \
                     https://github.com/HPMLL/BurstGPT (CC-BY-4.0)",
                ));
            }
            (false, Some(_)) => return needs("--burst-trace-path", "--use-burst-trace"),
            _ => {}
        }
        let has_data_set = self.dataset_path.is_some();
        if self.trace_speedup.is_some() && !self.use_burst_trace {
            return needs("--trace-speedup", "--use-burst-trace");
        }
        if self.max_conversations.is_some() && !has_data_set {
            return needs("--max-conversations", "--dataset-path");
        }
        if !self.use_burst_trace && !has_data_set {
            return match self.replay_cycles {
                Some(_) => needs("--replay-cycles", "--use-burst-trace or --dataset-path"),
                None => Ok(()),
            };
        }
        let speedup = self.trace_speedup.unwrap_or(1.0);
        if !(0.0..=1e9).contains(&speedup) {
            return Err(Failure::usage(
                format!("--trace-speedup {speedup} is not a factor"),
                "give a number from 0 up: 1 is real time, 60 is one minute per second, 0 is all \
                 requests at once",
            ));
        }
        self.check_others(others)
    }

    /// Refuses options that recorded requests leave without effect.
    fn check_others(&self, others: &[&str]) -> Result<(), Failure> {
        let this = if self.use_burst_trace { "--use-burst-trace" } else { "--dataset-path" };
        let other = others.iter().find_map(|other| {
            let reason = match *other {
                "--enable-rag" => "the recorded requests read no documents",
                "--enable-autoscaling" => "more users would not ask more of what is recorded",
                "--decode-only" => "the contexts of recorded requests are not stored",
                "--request-rate" if self.use_burst_trace => "the trace says when requests arrive",
                _ => return None,
            };
            Some((*other, reason))
        });
        let has_both = self.use_burst_trace && self.dataset_path.is_some();
        let both = has_both.then_some(("--dataset-path", "a run has one kind of requests"));
        match both.or(other) {
            None => Ok(()),
            Some((other, reason)) => Err(Failure::usage(
                format!("{this} and {other} contradict each other: {reason}"),
                "leave one of them out",
            )),
        }
    }

    /// Reads the recorded requests, if there are any.
    pub(super) fn recorded(&self, is_compatible: bool) -> Result<Option<Arc<Recorded>>, Failure> {
        let cycles = self.replay_cycles.filter(|cycles| *cycles > 0);
        let recorded = if let Some(path) = self.trace() {
            let speedup = self.trace_speedup.unwrap_or(1.0);
            Recorded::burst_trace(path, speedup, cycles, is_compatible)?
        } else if let Some(path) = &self.dataset_path {
            let most = self.max_conversations.unwrap_or(CONVERSATIONS_MAX);
            Recorded::data_set(path, most, cycles, is_compatible)?
        } else {
            return Ok(None);
        };
        Ok(Some(Arc::new(recorded)))
    }

    /// Whether requests are recorded, and not generated.
    pub(super) fn has_recorded(&self) -> bool {
        self.use_burst_trace || self.dataset_path.is_some()
    }

    fn trace(&self) -> Option<&Path> {
        self.burst_trace_path.as_deref().filter(|_| self.use_burst_trace)
    }

    /// Reads the trace to compare with, if there is one.
    pub(super) fn validation(&self) -> Result<Option<ValidationTrace>, Failure> {
        let trace = self.validation_trace.as_deref().map(ValidationTrace::read);
        Ok(trace.transpose()?)
    }
}
