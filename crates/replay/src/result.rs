//! The result of a replay: the JSON output. The summary and the report are made from it.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::environment::Environment;
use crate::kernel_io::KernelIo;
use crate::latency::LatencySummary;
use crate::study::ReuseDistances;

/// The result of a replay. Programs read it, so the names and units of its fields are stable.
#[derive(Debug, Clone, Serialize)]
pub struct ReplayResult {
    /// Requests after the warm-up.
    pub requests: u64,
    /// Blocks of these requests.
    pub blocks_requested: u64,
    /// Leading blocks of these requests that were hits.
    pub blocks_hit: u64,
    /// `blocks_hit` over `blocks_requested`, from 0 to 1.
    pub hit_rate: f64,
    /// `blocks_hit` by the tier of the block.
    pub hits_by_tier: BTreeMap<String, u64>,
    /// Payload bytes read from the store.
    pub bytes_read: u64,
    /// Payload bytes that the store accepted.
    pub bytes_written: u64,
    /// Blocks with wrong bytes, including those of the warm-up.
    pub wrong_blocks: u64,
    /// Eviction policy.
    pub policy: String,
    /// Capacity of the DRAM tier.
    pub dram_bytes: u64,
    /// Capacity of the file tier; 0 without one.
    pub files_bytes: u64,
    /// Wall time from the first counted request until all pending blocks were written.
    pub seconds: f64,

    /// The trace.
    pub trace: TraceFacts,
    /// The payload of a block.
    pub payload: PayloadFacts,
    /// The options of the replay.
    pub run: RunFacts,
    /// Time inside calls of the store, summed over all workers, without the check of the bytes.
    pub store_seconds: StoreSeconds,
    /// Latencies by call. None with `--metadata-only`.
    pub latency: Option<LatencyFacts>,
    /// Blocks put, by outcome.
    pub puts: BTreeMap<String, u64>,
    /// Descriptions of the first wrong blocks.
    pub wrong_examples: Vec<String>,
    /// Failures of the store by message. Each failed block counts as a miss.
    pub failures: BTreeMap<String, u64>,
    /// Hit rates of other caches.
    pub ceilings: Ceilings,
    /// Payload bytes written to each tier below DRAM, with those of the warm-up.
    pub bytes_written_down: BTreeMap<String, u64>,
    /// What the kernel read from and wrote to disks, from the opening of the store to the last
    /// flush. None without a file tier, and where the kernel does not tell.
    pub kernel_io: Option<KernelIo>,
    /// Hits over the time of the trace.
    pub timeline: Vec<TimeSlice>,
    /// Reuse distances of the blocks.
    pub reuse: ReuseDistances,
    /// Hit rates of DRAM alone at several capacities, from keys only.
    pub dram_sweep: Vec<SweepPoint>,
    /// The store's counters.
    pub store: BTreeMap<String, u64>,
    /// The machine and the build.
    pub environment: Environment,
}

/// The trace of a replay.
#[derive(Debug, Clone, Serialize)]
pub struct TraceFacts {
    /// Its name.
    pub name: String,
    /// Its files.
    pub files: Vec<String>,
    /// Requests after `--limit`.
    pub requests: u64,
    /// Blocks of these requests.
    pub block_references: u64,
    /// Unique blocks of these requests.
    pub unique_blocks: u64,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Recorded time until the last request.
    pub seconds: f64,
    /// Its formats, such as `mooncake`.
    pub format: String,
    /// Rows that became requests: lines, rows of CSV, elements of an array, sessions or
    /// conversations.
    pub rows_read: u64,
    /// Rows that did not, by reason.
    pub rows_skipped: BTreeMap<&'static str, u64>,
    /// Rows with an earlier time than the row before them; requests are sorted by time.
    pub rows_out_of_order: u64,
    /// What its times are: `seconds`, `milliseconds`, `microseconds`, `dates` or `none`.
    pub times: &'static str,
    /// The same, with the rule that decided.
    #[serde(skip)]
    pub times_text: String,
    /// Which requests share blocks, in a sentence.
    pub sharing: String,
    /// Why the times may be of another unit than was assumed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_note: Option<String>,
}

/// The payload of a block.
#[derive(Debug, Clone, Serialize)]
pub struct PayloadFacts {
    /// Bytes of a block in this replay.
    pub block_bytes: u64,
    /// The model whose block size is the reference.
    pub model: String,
    /// Bytes of a block of this model.
    pub model_block_bytes: u64,
    /// `model_block_bytes` over `block_bytes`; 1 is the true size.
    pub scale: f64,
}

/// The options of a replay.
#[derive(Debug, Clone, Serialize)]
pub struct RunFacts {
    /// Tiers from fast to slow.
    pub pipeline: String,
    /// Blocks that fit into DRAM.
    pub dram_blocks: u64,
    /// Directory of the file tier.
    pub files: Option<String>,
    /// Worker threads.
    pub threads: u16,
    /// Speed: 0 is as fast as possible, 1 is real time.
    pub speed: f64,
    /// Requests of the warm-up.
    pub warm_up_requests: u64,
    /// Whether it was interrupted. Then the result covers only the requests until then.
    pub was_stopped: bool,
    /// Whether only keys were replayed, without payload.
    pub metadata_only: bool,
    /// Blocks in the file tier before the replay.
    pub started_with_blocks: u64,
}

/// Time inside calls of the store, and for the payload.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct StoreSeconds {
    /// Lookups.
    pub lookup: f64,
    /// Reads.
    pub read: f64,
    /// Puts.
    pub put: f64,
    /// The last flush.
    pub flush: f64,
    /// Making and checking payload, outside the store.
    pub checking: f64,
}

/// Latencies by call.
#[derive(Debug, Clone, Serialize)]
pub struct LatencyFacts {
    /// Lookups, one per request.
    pub lookup: LatencySummary,
    /// Reads, one per batch of hits, by the slowest tier of the batch.
    pub read: BTreeMap<String, LatencySummary>,
    /// Bytes per second of these batches. DRAM returns views, so its value is not a copy rate.
    pub read_bytes_per_second: BTreeMap<String, f64>,
    /// Puts, one per batch.
    pub put: LatencySummary,
}

/// Hit rates of other caches on the same requests, from 0 to 1.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Ceilings {
    /// An unbounded cache.
    #[serde(rename = "endless")]
    pub unbounded: f64,
    /// Belady's optimum with DRAM of this capacity.
    pub optimum: Option<f64>,
    /// This policy with DRAM alone.
    pub dram_alone: Option<f64>,
    /// This policy with DRAM alone, of twice the capacity.
    pub dram_doubled: Option<f64>,
}

/// A slice of the trace's time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TimeSlice {
    /// Its start, in seconds since the start of the trace.
    pub from_seconds: f64,
    /// Its end.
    pub to_seconds: f64,
    /// Blocks requested.
    pub blocks: u64,
    /// Blocks hit, by tier.
    pub hits: BTreeMap<String, u64>,
    /// Blocks that an unbounded cache hits.
    #[serde(rename = "endless")]
    pub unbounded: u64,
}

/// Hit rates at one capacity of DRAM.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct SweepPoint {
    /// Capacity in blocks.
    pub dram_blocks: u64,
    /// Capacity in bytes, at the block size of this replay.
    pub dram_bytes: u64,
    /// Hit rate of this policy, from 0 to 1.
    pub hit_rate: f64,
    /// Hit rate of Belady's optimum.
    pub optimum: f64,
}

impl ReplayResult {
    /// Bytes put per second of time inside the store; 0 without puts.
    pub fn write_bytes_per_second(&self) -> f64 {
        ratio(self.bytes_written as f64, self.store_seconds.put)
    }

    /// The tiers of the pipeline from fast to slow, then other tiers with hits.
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

/// `part` over `whole`; 0 if `whole` is 0.
pub fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}
