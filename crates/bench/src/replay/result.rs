//! The result of a replay as programs read it; the summary and the page are made from it.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::environment::Environment;
use crate::latency::LatencySummary;
use crate::study::ReuseDistances;

/// Everything that is known after a replay. Names and units are part of the contract.
#[derive(Debug, Clone, Serialize)]
pub struct ReplayResult {
    /// Requests that were counted.
    pub requests: u64,
    /// Blocks that they asked for.
    pub blocks_requested: u64,
    /// Blocks that were there, unbroken from the start of the request.
    pub blocks_hit: u64,
    /// `blocks_hit` over `blocks_requested`, from 0 to 1.
    pub hit_rate: f64,
    /// `blocks_hit` by the tier that gave the block.
    pub hits_by_tier: BTreeMap<String, u64>,
    /// Payload bytes that the store gave.
    pub bytes_read: u64,
    /// Payload bytes that the store took.
    pub bytes_written: u64,
    /// Blocks whose bytes were not what had been stored, in the warm-up too.
    pub wrong_blocks: u64,
    /// What chose the victims.
    pub policy: String,
    /// Capacity of the DRAM tier.
    pub dram_bytes: u64,
    /// Capacity of the file tier; 0 without one.
    pub files_bytes: u64,
    /// From the first counted request until all is written down.
    pub seconds: f64,

    /// What was replayed.
    pub trace: TraceFacts,
    /// What a block's payload was.
    pub payload: PayloadFacts,
    /// How it was replayed.
    pub run: RunFacts,
    /// Time inside calls of the store, all workers together; checking bytes is not part of it.
    pub store_seconds: StoreSeconds,
    /// Latencies by call. None with `--metadata-only`.
    pub latency: Option<LatencyFacts>,
    /// What became of the blocks that were put.
    pub puts: BTreeMap<String, u64>,
    /// The first wrong blocks, described.
    pub wrong_examples: Vec<String>,
    /// Failures of the store by message. Each such block counted as a miss.
    pub failures: BTreeMap<String, u64>,
    /// What other caches would have hit.
    pub ceilings: Ceilings,
    /// Bytes that each tier below DRAM was given to write.
    pub bytes_written_down: BTreeMap<String, u64>,
    /// Hits over the trace's time.
    pub timeline: Vec<TimeSlice>,
    /// How far apart uses of a block lie.
    pub reuse: ReuseDistances,
    /// Hit rates of DRAM alone at several sizes, from metadata.
    pub dram_sweep: Vec<SweepPoint>,
    /// The store's own counters.
    pub store: BTreeMap<String, u64>,
    /// What it ran on.
    pub environment: Environment,
}

/// What was replayed.
#[derive(Debug, Clone, Serialize)]
pub struct TraceFacts {
    /// Its name.
    pub name: String,
    /// Its files.
    pub files: Vec<String>,
    /// Requests of the trace, after `--limit`.
    pub requests: u64,
    /// Blocks that they ask for.
    pub block_references: u64,
    /// Different blocks.
    pub unique_blocks: u64,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Recorded time from first to last request.
    pub seconds: f64,
}

/// What a block's payload was.
#[derive(Debug, Clone, Serialize)]
pub struct PayloadFacts {
    /// Bytes of a block in this run.
    pub block_bytes: u64,
    /// The model that the true size is told for.
    pub model: String,
    /// Bytes that this model's block would have.
    pub model_block_bytes: u64,
    /// The latter over the former; 1 is the true size.
    pub scale: f64,
}

/// How it was replayed.
#[derive(Debug, Clone, Serialize)]
pub struct RunFacts {
    /// Tiers from fast to slow.
    pub pipeline: String,
    /// Blocks that fit into DRAM.
    pub dram_blocks: u64,
    /// Directory of the file tier.
    pub files: Option<String>,
    /// Workers.
    pub threads: u16,
    /// 0 as fast as possible, 1 real time.
    pub speed: f64,
    /// Requests before counting began.
    pub warm_up_requests: u64,
    /// Whether it was interrupted: everything here is of the part that ran.
    pub was_stopped: bool,
    /// Whether no payload was moved.
    pub metadata_only: bool,
    /// Blocks that were in the file tier before.
    pub started_with_blocks: u64,
}

/// Time inside the store, and beside it.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct StoreSeconds {
    /// Lookups.
    pub lookup: f64,
    /// Reads.
    pub read: f64,
    /// Puts.
    pub put: f64,
    /// Waiting at the end until all was written down.
    pub flush: f64,
    /// Making and checking payload: not the cache's time.
    pub checking: f64,
}

/// Latencies by call.
#[derive(Debug, Clone, Serialize)]
pub struct LatencyFacts {
    /// One a request.
    pub lookup: LatencySummary,
    /// One a batch of hits, by the slowest tier in it.
    pub read: BTreeMap<String, LatencySummary>,
    /// Bytes a second of those batches. DRAM hands out views, so its figure is not a copy's.
    pub read_bytes_per_second: BTreeMap<String, f64>,
    /// One a batch.
    pub put: LatencySummary,
}

/// Hit rates of other caches on the same requests, from 0 to 1.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Ceilings {
    /// A cache without limit.
    pub endless: f64,
    /// Belady's optimum with DRAM of this size: knows the future.
    pub optimum: Option<f64>,
    /// This policy with DRAM alone.
    pub dram_alone: Option<f64>,
    /// This policy with twice the DRAM, alone.
    pub dram_doubled: Option<f64>,
}

/// Some part of the trace's time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TimeSlice {
    /// Where it begins, in the trace's time.
    pub from_seconds: f64,
    /// Where it ends.
    pub to_seconds: f64,
    /// Blocks asked for.
    pub blocks: u64,
    /// Blocks hit, by tier.
    pub hits: BTreeMap<String, u64>,
    /// Blocks that a cache without limit would have hit.
    pub endless: u64,
}

/// One size of DRAM.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct SweepPoint {
    /// Blocks that fit.
    pub dram_blocks: u64,
    /// Bytes that they take in this run.
    pub dram_bytes: u64,
    /// What this policy hits, from 0 to 1.
    pub hit_rate: f64,
    /// What Belady's optimum hits.
    pub optimum: f64,
}

impl ReplayResult {
    /// Bytes a second that puts took, in time inside the store; 0 without puts.
    pub fn write_bytes_per_second(&self) -> f64 {
        ratio(self.bytes_written as f64, self.store_seconds.put)
    }

    /// Tiers that gave hits, and those of the pipeline that gave none, from fast to slow.
    pub fn tiers(&self) -> Vec<String> {
        let stages = self.run.pipeline.split('|').map(|stage| stage.trim().to_lowercase());
        let mut tiers: Vec<String> =
            stages.filter(|stage| !matches!(stage.as_str(), "empty" | "")).collect();
        for tier in self.hits_by_tier.keys() {
            if !tiers.contains(tier) {
                tiers.push(tier.clone());
            }
        }
        tiers
    }
}

/// A share or rate; 0 of nothing is 0.
pub fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}
