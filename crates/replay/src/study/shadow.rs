//! Predictions of shadow caches, compared with measurements of stores of those sizes.
//!
//! Every figure comes from a real store with real puts and lookups. Only the payload is small.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

use cascade_block::BlockKey;
use cascade_store::{
    CallOptions, FilesConfig, PolicyKind, Put, Request, Store, StoreConfig, StoreError, StoreStats,
    TierName, WritePolicy,
};
use serde::Serialize;

use super::ratio;
use crate::random::SplitMix64;
use crate::trace::{Trace, TraceRequest};

/// Bytes of a block in DRAM: the smallest slab of the pool.
const DRAM_BLOCK_BYTES: u64 = 64;
/// Bytes of a block with a file tier: one page.
const FILES_BLOCK_BYTES: u64 = 4096;
/// Size of a segment of the studied file tier.
const SEGMENT_BYTES: u64 = 1 << 20;
/// Capacity of DRAM above the studied file tier, in percent of the trace's unique blocks.
const DRAM_PERCENT: u64 = 2;

/// The figures of one trace at one capacity of one tier.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ShadowRow {
    /// Name of the trace.
    pub trace: String,
    /// The tier whose capacity changes.
    pub tier: TierName,
    /// Its capacity in percent of the trace's unique blocks.
    pub size_percent: u64,
    /// The shadow caches simulate one block in this many.
    pub sampled_one_in: u64,
    /// Hit rate at this capacity, in percent.
    pub hit_percent: f64,
    /// Hit rate of the shadow cache of this capacity, in percent, for each sample.
    pub simulated_percent: Vec<f64>,
    /// The figures at 1.5 and at 2 times this capacity.
    pub larger: Vec<ShadowCell>,
    /// Memory of shadow caches, history and hot prefixes in bytes; the maximum of all samples.
    pub memory_bytes: u64,
}

/// The figures at one larger capacity.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ShadowCell {
    /// The larger capacity in percent of the smaller one.
    pub capacity_percent: u64,
    /// Hit rate of a store of the larger capacity, in percent.
    pub measured_percent: f64,
    /// Hit rate that the smaller store predicted, in percent, for each sample.
    pub predicted_percent: Vec<f64>,
}

impl ShadowCell {
    /// The largest difference between predicted and measured hit rate, in percentage points.
    pub fn error_points(&self) -> f64 {
        let errors = self.predicted_percent.iter();
        errors.map(|predicted| (predicted - self.measured_percent).abs()).fold(0.0, f64::max)
    }
}

/// The studied tier.
#[derive(Debug, Clone, Copy)]
pub enum ShadowTier<'a> {
    /// DRAM alone.
    Dram,
    /// A file tier behind a small DRAM tier. It uses and removes `replay` in this directory.
    Files(&'a Path),
}

/// Replays a trace at one capacity to predict the hit rates at larger ones, once per sample, and
/// then replays it at the larger ones.
///
/// # Errors
/// As [`Store::open`].
pub fn shadow_row(
    trace: &Trace,
    policy: PolicyKind,
    tier: ShadowTier<'_>,
    size_percent: u64,
    samples: u64,
) -> Result<ShadowRow, StoreError> {
    let name = match tier {
        ShadowTier::Dram => "dram",
        ShadowTier::Files(_) => "files",
    };
    let run = |percent: u64, sample: u64| {
        let config = store_config(trace, policy, tier, size_percent * percent);
        replay(trace, config, sample)
    };
    let mut row = ShadowRow {
        trace: trace.name.clone(),
        tier: name,
        size_percent,
        sampled_one_in: 0,
        hit_percent: 0.0,
        simulated_percent: Vec::new(),
        larger: Vec::new(),
        memory_bytes: 0,
    };
    let mut predicted: [Vec<f64>; 2] = Default::default();
    for sample in 0..samples {
        let stats = run(100, sample)?;
        let of_tier = stats.shadows.iter().filter(|figure| figure.tier == name);
        for (at, figure) in of_tier.enumerate() {
            row.sampled_one_in = figure.sampled_one_in;
            // The first shadow cache has the capacity of the tier itself.
            if at == 0 {
                row.simulated_percent.push(100.0 * figure.since_start.simulated_hit_rate());
            } else {
                predicted[at - 1].push(100.0 * figure.since_start.predicted_hit_rate());
            }
        }
        row.hit_percent = hit_percent(&stats);
        row.memory_bytes = row.memory_bytes.max(stats.insight_bytes);
    }
    for (capacity_percent, predicted_percent) in [150, 200].into_iter().zip(predicted) {
        let measured_percent = hit_percent(&run(capacity_percent, 0)?);
        row.larger.push(ShadowCell { capacity_percent, measured_percent, predicted_percent });
    }
    Ok(row)
}

fn hit_percent(stats: &StoreStats) -> f64 {
    100.0 * ratio(stats.counters.blocks_matched, stats.counters.blocks_requested)
}

/// The store of a replay. The capacity of the studied tier is `hundredths` / 10,000 of the unique
/// blocks of the trace.
fn store_config(
    trace: &Trace,
    policy: PolicyKind,
    tier: ShadowTier<'_>,
    hundredths: u64,
) -> StoreConfig {
    let blocks = (trace.unique_blocks * hundredths / 10_000).max(1);
    let config = StoreConfig { policy, huge_pages: false, ..StoreConfig::default() };
    match tier {
        ShadowTier::Dram => StoreConfig {
            dram_bytes: (2 * blocks * DRAM_BLOCK_BYTES).max(4 << 20),
            dram_blocks: Some(blocks),
            ..config
        },
        ShadowTier::Files(directory) => StoreConfig {
            pipeline: "Dram|Files".to_owned(),
            // With write-back, the hit rate would depend on the speed of the machine.
            write: WritePolicy::Through,
            dram_bytes: (trace.unique_blocks * DRAM_PERCENT / 100 * FILES_BLOCK_BYTES).max(4 << 20),
            files: Some(FilesConfig {
                capacity_bytes: (blocks * FILES_BLOCK_BYTES).max(4 * SEGMENT_BYTES),
                segment_bytes: SEGMENT_BYTES,
                direct: false,
                ..FilesConfig::new(directory.join("replay"))
            }),
            ..config
        },
    }
}

/// Replays a whole trace, one request after the other. The sample selects the keys.
fn replay(trace: &Trace, config: StoreConfig, sample: u64) -> Result<StoreStats, StoreError> {
    let has_files = config.files.is_some();
    let bytes = if has_files { FILES_BLOCK_BYTES } else { DRAM_BLOCK_BYTES };
    let payload = vec![0_u8; usize::try_from(bytes).expect("a page at most")];
    let directory = config.files.as_ref().map(|files| files.directory.clone());
    directory.as_deref().map_or(Ok(()), remove)?;
    let store = Store::open(config)?;
    for request in &trace.requests {
        let keys: Vec<_> = request.blocks.iter().map(|block| key(*block, sample)).collect();
        let lookup = Request {
            partial_tail: request.partial_tail,
            at: Some(request.at),
            ..Request::new(&keys)
        };
        let matched = store.lookup_prefix(&lookup).tiers.len();
        // An engine would read the matched blocks.
        drop(store.view(&keys[..matched], CallOptions::default()));
        drop(store.put(&missing(request, &keys, matched, &payload), CallOptions::default()));
    }
    let stats = store.stats();
    drop(store);
    directory.as_deref().map_or(Ok(()), remove)?;
    Ok(stats)
}

/// Removes the directory of a replay, before it and after it.
fn remove(directory: &Path) -> Result<(), StoreError> {
    match std::fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(StoreError::Tier {
            tier: "files",
            operation: "remove its directory",
            source: Arc::new(error),
        }),
        _ => Ok(()),
    }
}

fn missing<'a>(
    request: &TraceRequest,
    keys: &'a [BlockKey],
    matched: usize,
    payload: &'a [u8],
) -> Vec<Put<'a>> {
    let put = |at: usize| Put {
        parent: at.checked_sub(1).map(|before| keys[before]),
        is_partial: request.partial_tail && at + 1 == keys.len(),
        ..Put::new(keys[at], payload)
    };
    (matched..keys.len()).map(put).collect()
}

/// The key of a block in a sample, as uniform as a hash. Each sample has other keys, and with them
/// the shadow caches simulate other blocks.
fn key(block: u64, sample: u64) -> BlockKey {
    let mut bytes = [0; 32];
    let seed = block ^ sample.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17);
    let mut random = SplitMix64(seed);
    for word in bytes.as_chunks_mut::<8>().0 {
        *word = random.next_u64().to_le_bytes();
    }
    BlockKey::from_bytes(bytes)
}

/// The rows as a table in Markdown.
pub fn shadow_markdown(rows: &[ShadowRow]) -> String {
    let mut text = String::from(
        "| trace | tier | capacity | sampled one in | hit rate | simulated | larger by | measured \
         | predicted | error |\n|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for row in rows {
        for cell in &row.larger {
            writeln!(
                text,
                "| {} | {} | {} % | {} | {:.2} | {} | +{} % | {:.2} | {} | {:.2} |",
                row.trace,
                row.tier,
                row.size_percent,
                row.sampled_one_in,
                row.hit_percent,
                range(&row.simulated_percent),
                cell.capacity_percent - 100,
                cell.measured_percent,
                range(&cell.predicted_percent),
                cell.error_points(),
            )
            .expect("writing to a String does not fail");
        }
    }
    text
}

fn range(values: &[f64]) -> String {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if values.len() == 1 { format!("{most:.2}") } else { format!("{least:.2} to {most:.2}") }
}
