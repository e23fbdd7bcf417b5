//! Assembles the plan of a replay from its options, and the result from the measurements.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use cascade_block::Geometry;
use cascade_kv_bench::model_config::ModelConfig;
use cascade_replay::ceilings::{DramStudy, unbounded_cache_hits};
use cascade_replay::counts::{ReplayCounts, RequestRecord};
use cascade_replay::environment::Environment;
use cascade_replay::kernel_io::KernelIo;
use cascade_replay::result::{
    LatencyFacts, PayloadFacts, ReplayResult, RunFacts, StoreSeconds, TimeSlice, TraceFacts, ratio,
};
use cascade_replay::run::RunOutcome;
use cascade_replay::study::reuse_distances;
use cascade_replay::trace::{ReadOptions, Times, Trace, TraceError};
use cascade_replay::workload::Workload;
use cascade_store::StoreStats;

use crate::replay::args::TimeUnitChoice;
use crate::{Count, Failure, ReplayArgs};

/// The model whose block size is reported when the payload is scaled down.
const REFERENCE_MODEL: &str = "llama3.1-8b";
/// Time slices in the plot of hits.
const TIME_SLICES: u32 = 60;

/// The options of a replay with its trace and sizes.
#[derive(Debug)]
pub(super) struct Plan<'a> {
    args: &'a ReplayArgs,
    trace: Trace,
    /// Why its times may be of another unit.
    pub(super) time_note: Option<String>,
    payload: PayloadFacts,
    block_bytes: usize,
    /// Number of warm-up requests.
    pub(super) warm_up: usize,
}

/// The measurements of a replay through a store.
#[derive(Debug)]
pub(super) struct Measured {
    /// Counts and times.
    pub(super) outcome: RunOutcome,
    /// Duration of the last flush.
    pub(super) flush: Duration,
    /// Blocks in the file tier before the replay.
    pub(super) started_with_blocks: u64,
    /// The store's statistics.
    pub(super) stats: StoreStats,
    /// What the kernel counted, if there is a file tier.
    pub(super) kernel_io: Option<KernelIo>,
}

impl<'a> Plan<'a> {
    /// Reads the traces and computes the sizes.
    pub(super) fn new(args: &'a ReplayArgs) -> Result<Self, Failure> {
        let mut trace = read_trace(args)?;
        if let Some(limit) = args.limit {
            trace.requests.truncate(usize::try_from(limit.get()).unwrap_or(usize::MAX));
        }
        let time_note = if args.time_unit.is_none() { trace.time_note() } else { None };
        let payload = payload_facts(args, trace.block_tokens)?;
        if !args.metadata_only && args.dram < payload.block_bytes {
            return Err(Failure::usage(
                format!(
                    "--dram {} is smaller than one block of {} bytes",
                    args.dram, payload.block_bytes
                ),
                "raise --dram, or lower --block-bytes",
            ));
        }
        let block_bytes = usize::try_from(payload.block_bytes).unwrap_or(usize::MAX);
        let warm_up = args.warm_up.of(trace.requests.len());
        Ok(Self { args, trace, time_note, payload, block_bytes, warm_up })
    }

    /// The requests with keys for a store.
    pub(super) fn workload(&self) -> Workload {
        Workload::new(&self.trace, self.block_bytes)
    }

    /// The result of a replay through a store.
    pub(super) fn result(&self, measured: &Measured, environment: Environment) -> ReplayResult {
        let counts = &measured.outcome.counts;
        let mut result = self.common_result(counts, environment);
        result.seconds = (measured.outcome.took + measured.flush).as_secs_f64();
        result.store_seconds = StoreSeconds {
            lookup: counts.time.lookup.as_secs_f64(),
            read: counts.time.read.as_secs_f64(),
            put: counts.time.put.as_secs_f64(),
            flush: measured.flush.as_secs_f64(),
            checking: counts.checking.as_secs_f64(),
        };
        let read = counts.read_by_tier.iter();
        result.latency = Some(LatencyFacts {
            lookup: counts.lookup.summary(),
            read: read
                .clone()
                .map(|(tier, all)| named_pair(tier, all.latencies.summary()))
                .collect(),
            read_bytes_per_second: read
                .map(|(tier, all)| {
                    named_pair(tier, ratio(all.bytes as f64, all.time.as_secs_f64()))
                })
                .collect(),
            put: counts.put.summary(),
        });
        result.run.was_stopped = measured.outcome.was_stopped;
        result.run.started_with_blocks = measured.started_with_blocks;
        result.files_bytes = self.args.files.as_ref().map_or(0, |_| self.args.files_capacity);
        let counters = &measured.stats.counters;
        if self.args.files.is_some() {
            result.bytes_written_down.insert("files".to_owned(), counters.demoted_bytes);
        }
        result.store = store_counters(&measured.stats);
        result.kernel_io = measured.kernel_io;
        result
    }

    /// The result of a replay of keys only.
    pub(super) fn without_payload(&self, environment: Environment) -> ReplayResult {
        let study = self.study();
        let mut counts = ReplayCounts::default();
        let outcomes = self.trace.requests.iter().zip(study.hits_by_request());
        for (index, (request, hits)) in outcomes.enumerate().skip(self.warm_up) {
            let blocks = request.blocks.len() as u64;
            let hits = vec![("dram", hits)];
            counts.blocks_requested += blocks;
            counts.count_hits(&hits);
            counts.requests.push(RequestRecord { index, at: request.at, blocks, hits });
        }
        self.common_result(&counts, environment)
    }

    /// Blocks that fit into DRAM.
    fn dram_blocks(&self) -> u64 {
        let fitting = self.args.dram / self.payload.block_bytes;
        let blocks = self.args.dram_blocks.map_or(fitting, Count::get);
        if self.args.metadata_only { blocks } else { blocks.min(fitting) }
    }

    fn study(&self) -> DramStudy<'_> {
        DramStudy {
            trace: &self.trace,
            policy: self.args.policy.kind(),
            dram_blocks: self.dram_blocks(),
            admits_partial: self.args.admit_partial,
        }
    }

    /// The part of the result that replays with and without a store share.
    fn common_result(&self, counts: &ReplayCounts, environment: Environment) -> ReplayResult {
        let args = self.args;
        let unbounded = unbounded_cache_hits(&self.trace);
        let (mut ceilings, dram_sweep) = self.study().ceilings(self.payload.block_bytes);
        // Only counted requests, so that this ceiling compares with the hit rate after a warm-up.
        let hits = counts.requests.iter().map(|request| unbounded[request.index]);
        ceilings.unbounded = ratio(hits.sum::<u64>() as f64, counts.blocks_requested as f64);
        let hits = counts.blocks_hit();
        ReplayResult {
            requests: counts.requests.len() as u64,
            blocks_requested: counts.blocks_requested,
            blocks_hit: hits,
            hit_rate: ratio(hits as f64, counts.blocks_requested as f64),
            hits_by_tier: named(&counts.hits_by_tier),
            bytes_read: counts.bytes_read,
            bytes_written: counts.bytes_written,
            wrong_blocks: counts.wrong_blocks,
            policy: args.policy.name(),
            dram_bytes: args.dram,
            files_bytes: 0,
            seconds: 0.0,
            trace: self.trace_facts(),
            payload: self.payload.clone(),
            run: RunFacts {
                pipeline: if args.metadata_only { "Dram" } else { args.pipeline() }.to_owned(),
                dram_blocks: self.dram_blocks(),
                files: args.files.as_ref().map(|path| path.display().to_string()),
                threads: args.threads,
                speed: args.speed,
                warm_up_requests: self.warm_up as u64,
                was_stopped: false,
                metadata_only: args.metadata_only,
                started_with_blocks: 0,
            },
            store_seconds: StoreSeconds::default(),
            latency: None,
            puts: named(&counts.puts),
            wrong_examples: counts.wrong_examples.iter().map(ToString::to_string).collect(),
            failures: counts.failures.clone(),
            ceilings,
            bytes_written_down: BTreeMap::new(),
            kernel_io: None,
            timeline: timeline(&counts.requests, &unbounded),
            reuse: reuse_distances(&self.trace),
            dram_sweep,
            store: BTreeMap::new(),
            environment,
        }
    }

    fn trace_facts(&self) -> TraceFacts {
        let trace = &self.trace;
        let skipped = trace.import.rows_skipped.iter();
        TraceFacts {
            name: trace.name.clone(),
            files: self.args.traces.iter().map(|path| path.display().to_string()).collect(),
            requests: trace.requests.len() as u64,
            block_references: trace.block_count(),
            unique_blocks: unique_blocks(trace),
            block_tokens: trace.block_tokens,
            seconds: trace.requests.last().map_or(0.0, |request| request.at.as_secs_f64()),
            format: trace.import.format_names(),
            rows_read: trace.import.rows_read,
            rows_skipped: skipped.map(|(reason, count)| (reason.text(), *count)).collect(),
            rows_out_of_order: trace.import.rows_out_of_order,
            times: trace.import.times.map_or("none", Times::name),
            times_text: trace.import.times.map(Times::text).unwrap_or_default(),
            sharing: trace.import.sharing(),
            time_note: self.time_note.clone(),
        }
    }
}

fn read_trace(args: &ReplayArgs) -> Result<Trace, Failure> {
    let first = args.traces[0].file_stem().unwrap_or(args.traces[0].as_os_str()).to_string_lossy();
    let name = match args.traces.len() {
        1 => first.into_owned(),
        many => format!("{first} and {} more", many - 1),
    };
    let options = ReadOptions {
        format: args.format.format(),
        time_unit: args.time_unit.map(TimeUnitChoice::unit),
        rows_max: None,
        keeps_failed: false,
    };
    Trace::read_files(&name, &args.traces, options).map_err(|error| Failure::Read {
        path: match &error {
            TraceError::Read { path, .. } => path.clone(),
            _ => args.traces[0].clone(),
        },
        advice: "docs/traces.md describes the formats".to_owned(),
        source: Box::new(error),
    })
}

/// Number of unique blocks of the requests after `--limit`.
fn unique_blocks(trace: &Trace) -> u64 {
    let blocks = trace.requests.iter().flat_map(|request| &request.blocks);
    blocks.collect::<HashSet<_>>().len() as u64
}

/// The block size in this replay and of the model.
fn payload_facts(args: &ReplayArgs, block_tokens: u32) -> Result<PayloadFacts, Failure> {
    let (model, geometry) = model(args)?;
    let model_block_bytes = geometry.block_bytes(u64::from(block_tokens));
    let has_model = args.model.is_some() || args.model_config.is_some();
    let block_bytes = if has_model { model_block_bytes } else { args.block_bytes };
    Ok(PayloadFacts {
        block_bytes,
        model,
        model_block_bytes,
        scale: ratio(model_block_bytes as f64, block_bytes as f64),
    })
}

/// The model with its name.
fn model(args: &ReplayArgs) -> Result<(String, Geometry), Failure> {
    if let Some(path) = &args.model_config {
        let found = ModelConfig::read(path, args.model.as_deref())?;
        return Ok((found.name, found.geometry));
    }
    let name = args.model.as_deref().unwrap_or(REFERENCE_MODEL);
    let geometry = Geometry::by_name(name).map_err(|unknown| {
        Failure::usage(format!("--model {name}: {unknown}"), "give one of these names")
    })?;
    Ok((geometry.name.to_owned(), geometry))
}

fn named_pair<T>(name: &str, value: T) -> (String, T) {
    (name.to_owned(), value)
}

fn named(counts: &BTreeMap<&'static str, u64>) -> BTreeMap<String, u64> {
    counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
}

/// Hits over the time of the trace, in slices of equal length.
fn timeline(requests: &[RequestRecord], unbounded: &[u64]) -> Vec<TimeSlice> {
    let (Some(first), Some(last)) = (requests.first(), requests.last()) else { return Vec::new() };
    let length = (last.at.saturating_sub(first.at) / TIME_SLICES).max(Duration::from_millis(1));
    let mut slices: Vec<TimeSlice> = Vec::new();
    for request in requests {
        let since = request.at.saturating_sub(first.at).as_nanos() / length.as_nanos();
        let at = usize::try_from(since).expect("at most sixty").min(TIME_SLICES as usize - 1);
        while slices.len() <= at {
            let from = first.at + length * u32::try_from(slices.len()).expect("at most sixty");
            slices.push(TimeSlice {
                from_seconds: from.as_secs_f64(),
                to_seconds: (from + length).as_secs_f64(),
                blocks: 0,
                hits: BTreeMap::new(),
                unbounded: 0,
            });
        }
        slices[at].blocks += request.blocks;
        slices[at].unbounded += unbounded[request.index];
        for (tier, count) in &request.hits {
            *slices[at].hits.entry((*tier).to_owned()).or_default() += count;
        }
    }
    slices
}

/// The store's counters by name.
fn store_counters(stats: &StoreStats) -> BTreeMap<String, u64> {
    let counters = &stats.counters;
    let named = [
        ("gets", counters.gets),
        ("hits", counters.hits),
        ("misses", counters.misses),
        ("evicted_blocks", counters.evicted_blocks),
        ("lost_blocks", counters.lost_blocks),
        ("demoted_blocks", counters.demoted_blocks),
        ("demoted_bytes", counters.demoted_bytes),
        ("promoted_blocks", counters.promoted_blocks),
        ("promoted_bytes", counters.promoted_bytes),
        ("demote_failures", counters.demote_failures),
        ("reclaimed_blocks", counters.reclaimed_blocks),
        ("damaged_blocks", counters.damaged_blocks),
        ("keys", stats.keys),
        ("contents", stats.contents),
        ("content_bytes", stats.content_bytes),
        ("dram_blocks", stats.dram_blocks),
        ("dram_bytes", stats.dram_bytes),
        ("pool_huge_bytes", stats.pool.huge_bytes as u64),
        ("pool_reserved_bytes", stats.pool.reserved_bytes as u64),
    ];
    named.map(|(name, value)| (name.to_owned(), value)).into()
}
