//! From options to a plan, and from what was measured to the result.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use cascade_block::Geometry;
use cascade_store::Stats;

use crate::cli::{Count, Failure, ReplayArgs};
use crate::environment::Environment;
use crate::replay::ceilings::{Study, endless_cache_hits};
use crate::replay::result::{
    LatencyFacts, PayloadFacts, ReplayResult, RunFacts, StoreSeconds, TimeSlice, TraceFacts, ratio,
};
use crate::replay::run::RunOutcome;
use crate::replay::tally::{RequestRecord, Tally};
use crate::replay::workload::Workload;
use crate::study::reuse_distances;
use crate::trace::{Trace, TraceError};

/// The model whose true block size is told when the payload is scaled down.
const REFERENCE_MODEL: &str = "llama3.1-8b";
/// Parts of the trace's time in the plot of hits.
const TIME_SLICES: u32 = 60;

/// What will be replayed and how.
#[derive(Debug)]
pub struct Plan<'a> {
    args: &'a ReplayArgs,
    trace: Trace,
    payload: PayloadFacts,
    block_bytes: usize,
    /// Requests before counting begins.
    pub warm_up: usize,
}

/// What a replay through a store gave.
#[derive(Debug)]
pub struct Measured {
    /// Counts and times.
    pub outcome: RunOutcome,
    /// How long the end waited until all was written down.
    pub flush: Duration,
    /// Blocks that the file tier had before.
    pub started_with_blocks: u64,
    /// The store's own counters.
    pub stats: Stats,
}

impl<'a> Plan<'a> {
    /// Reads the traces and settles sizes.
    pub fn new(args: &'a ReplayArgs) -> Result<Self, Failure> {
        let mut trace = read_trace(args)?;
        if let Some(limit) = args.limit {
            trace.requests.truncate(usize::try_from(limit.get()).unwrap_or(usize::MAX));
        }
        let payload = payload_facts(args, trace.block_tokens)?;
        if !args.metadata_only && args.dram < payload.block_bytes {
            return Err(Failure::usage(
                format!("--dram {} holds no block of {} bytes", args.dram, payload.block_bytes),
                "raise --dram, or lower --block-bytes",
            ));
        }
        let block_bytes = usize::try_from(payload.block_bytes).unwrap_or(usize::MAX);
        let warm_up = args.warm_up.of(trace.requests.len());
        Ok(Self { args, trace, payload, block_bytes, warm_up })
    }

    /// The requests as a store sees them.
    pub fn workload(&self) -> Workload {
        Workload::new(&self.trace, self.block_bytes)
    }

    /// The result of a replay through a store.
    pub fn result(&self, measured: &Measured, environment: Environment) -> ReplayResult {
        let tally = &measured.outcome.tally;
        let mut result = self.frame(tally, environment);
        result.seconds = (measured.outcome.took + measured.flush).as_secs_f64();
        result.store_seconds = StoreSeconds {
            lookup: tally.time.lookup.as_secs_f64(),
            read: tally.time.read.as_secs_f64(),
            put: tally.time.put.as_secs_f64(),
            flush: measured.flush.as_secs_f64(),
            checking: tally.checking.as_secs_f64(),
        };
        let read = tally.read_by_tier.iter();
        result.latency = Some(LatencyFacts {
            lookup: tally.lookup.summary(),
            read: read
                .clone()
                .map(|(tier, all)| named_pair(tier, all.latencies.summary()))
                .collect(),
            read_bytes_per_second: read
                .map(|(tier, all)| {
                    named_pair(tier, ratio(all.bytes as f64, all.time.as_secs_f64()))
                })
                .collect(),
            put: tally.put.summary(),
        });
        result.run.was_stopped = measured.outcome.was_stopped;
        result.run.started_with_blocks = measured.started_with_blocks;
        result.files_bytes = self.args.files.as_ref().map_or(0, |_| self.args.files_capacity);
        let counters = &measured.stats.counters;
        if self.args.files.is_some() {
            result.bytes_written_down.insert("files".to_owned(), counters.demoted_bytes);
        }
        result.store = store_counters(&measured.stats);
        result
    }

    /// The result of placement alone.
    pub fn without_payload(&self, environment: Environment) -> ReplayResult {
        let study = self.study();
        let mut tally = Tally::default();
        let outcomes = self.trace.requests.iter().zip(study.hits_by_request());
        for (index, (request, hits)) in outcomes.enumerate().skip(self.warm_up) {
            let blocks = request.blocks.len() as u64;
            let hits = vec![("dram", hits)];
            tally.blocks_requested += blocks;
            tally.count_hits(&hits);
            tally.requests.push(RequestRecord { index, at: request.at, blocks, hits });
        }
        self.frame(&tally, environment)
    }

    /// Blocks that fit into DRAM.
    fn dram_blocks(&self) -> u64 {
        let fitting = self.args.dram / self.payload.block_bytes;
        let blocks = self.args.dram_blocks.map_or(fitting, Count::get);
        if self.args.metadata_only { blocks } else { blocks.min(fitting) }
    }

    fn study(&self) -> Study<'_> {
        Study {
            trace: &self.trace,
            policy: self.args.policy.kind(),
            dram_blocks: self.dram_blocks(),
            admits_partial: self.args.admit_partial,
        }
    }

    /// All that does not depend on a store.
    fn frame(&self, tally: &Tally, environment: Environment) -> ReplayResult {
        let args = self.args;
        let endless = endless_cache_hits(&self.trace);
        let (mut ceilings, dram_sweep) = self.study().ceilings(self.payload.block_bytes);
        let counted = || tally.requests.iter().map(|request| endless[request.index]);
        ceilings.endless = ratio(counted().sum::<u64>() as f64, tally.blocks_requested as f64);
        let hits = tally.blocks_hit();
        ReplayResult {
            requests: tally.requests.len() as u64,
            blocks_requested: tally.blocks_requested,
            blocks_hit: hits,
            hit_rate: ratio(hits as f64, tally.blocks_requested as f64),
            hits_by_tier: named(&tally.hits_by_tier),
            bytes_read: tally.bytes_read,
            bytes_written: tally.bytes_written,
            wrong_blocks: tally.wrong_blocks,
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
            puts: named(&tally.puts),
            wrong_examples: tally.wrong_examples.iter().map(ToString::to_string).collect(),
            failures: tally.failures.clone(),
            ceilings,
            bytes_written_down: BTreeMap::new(),
            timeline: timeline(&tally.requests, &endless),
            reuse: reuse_distances(&self.trace),
            dram_sweep,
            store: BTreeMap::new(),
            environment,
        }
    }

    fn trace_facts(&self) -> TraceFacts {
        let trace = &self.trace;
        TraceFacts {
            name: trace.name.clone(),
            files: self.args.traces.iter().map(|path| path.display().to_string()).collect(),
            requests: trace.requests.len() as u64,
            block_references: trace.block_count(),
            unique_blocks: unique_blocks(trace),
            block_tokens: trace.block_tokens,
            seconds: trace.requests.last().map_or(0.0, |request| request.at.as_secs_f64()),
        }
    }
}

fn read_trace(args: &ReplayArgs) -> Result<Trace, Failure> {
    let read = match args.traces.as_slice() {
        [one] => Trace::read(one),
        many => {
            let first = many[0].file_stem().unwrap_or(many[0].as_os_str()).to_string_lossy();
            Trace::read_files(&format!("{first} and {} more", many.len() - 1), many)
        }
    };
    read.map_err(|error| Failure::Read {
        path: match &error {
            TraceError::Read { path, .. } => path.clone(),
            _ => args.traces[0].clone(),
        },
        advice: "give a trace in Mooncake's JSONL format or recorded agent sessions".to_owned(),
        source: Box::new(error),
    })
}

/// Different blocks among the requests that are left after `--limit`.
fn unique_blocks(trace: &Trace) -> u64 {
    let blocks = trace.requests.iter().flat_map(|request| &request.blocks);
    blocks.collect::<HashSet<_>>().len() as u64
}

/// How large a block is here, and how large it would be in production.
fn payload_facts(args: &ReplayArgs, block_tokens: u32) -> Result<PayloadFacts, Failure> {
    let name = args.model.as_deref().unwrap_or(REFERENCE_MODEL);
    let geometry = Geometry::by_name(name).map_err(|unknown| {
        Failure::usage(format!("--model {name}: {unknown}"), "name one of them")
    })?;
    let model_block_bytes = geometry.block_bytes(u64::from(block_tokens));
    let block_bytes = if args.model.is_some() { model_block_bytes } else { args.block_bytes };
    Ok(PayloadFacts {
        block_bytes,
        model: geometry.name.to_owned(),
        model_block_bytes,
        scale: ratio(model_block_bytes as f64, block_bytes as f64),
    })
}

fn named_pair<T>(name: &str, value: T) -> (String, T) {
    (name.to_owned(), value)
}

fn named(counts: &BTreeMap<&'static str, u64>) -> BTreeMap<String, u64> {
    counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
}

/// Hits over the trace's time, in equal parts.
fn timeline(requests: &[RequestRecord], endless: &[u64]) -> Vec<TimeSlice> {
    let (Some(first), Some(last)) = (requests.first(), requests.last()) else { return Vec::new() };
    let length = (last.at.saturating_sub(first.at) / TIME_SLICES).max(Duration::from_millis(1));
    let mut slices: Vec<TimeSlice> = Vec::new();
    for request in requests {
        let since = request.at.saturating_sub(first.at).as_nanos() / length.as_nanos();
        let at = usize::try_from(since).expect("a part of sixty").min(TIME_SLICES as usize - 1);
        while slices.len() <= at {
            let from = first.at + length * u32::try_from(slices.len()).expect("at most sixty");
            slices.push(TimeSlice {
                from_seconds: from.as_secs_f64(),
                to_seconds: (from + length).as_secs_f64(),
                blocks: 0,
                hits: BTreeMap::new(),
                endless: 0,
            });
        }
        slices[at].blocks += request.blocks;
        slices[at].endless += endless[request.index];
        for (tier, count) in &request.hits {
            *slices[at].hits.entry((*tier).to_owned()).or_default() += count;
        }
    }
    slices
}

/// The store's counters by name.
fn store_counters(stats: &Stats) -> BTreeMap<String, u64> {
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
