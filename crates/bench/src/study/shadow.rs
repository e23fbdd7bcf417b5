//! What shadow caches predict, beside what stores of those sizes then measure.
//!
//! Every figure comes from a real store with real puts and lookups; only the payload is small.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

use cascade_block::BlockKey;
use cascade_store::{
    CallOptions, FilesConfig, PolicyKind, Put, Request, Stats, Store, StoreConfig, StoreError,
    TierName, WritePolicy,
};
use serde::Serialize;

use super::ratio;
use crate::trace::{Trace, TraceRequest};

/// Bytes of a block in DRAM: as few as the pool hands out.
const DRAM_BLOCK_BYTES: u64 = 64;
/// Bytes of a block where there is a file tier: one page.
const FILES_BLOCK_BYTES: u64 = 4096;
/// Blocks of a segment and what stands beside them, in a file tier under study.
const SEGMENT_BYTES: u64 = 1 << 20;
/// Share of a trace's different blocks that DRAM holds above a file tier under study.
const DRAM_PERCENT: u64 = 2;

/// One tier of one trace at one size.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ShadowRow {
    /// The trace.
    pub trace: String,
    /// The tier whose size changes.
    pub tier: TierName,
    /// Its size in percent of the trace's different blocks.
    pub size_percent: u64,
    /// One block in so many was followed.
    pub sampled_one_in: u64,
    /// Hit rate at this size, in percent.
    pub hit_percent: f64,
    /// What the shadow of this very size said, in percent; one figure a sample.
    pub simulated_percent: Vec<f64>,
    /// At half as much again, and at twice as much.
    pub larger: Vec<ShadowCell>,
    /// Memory of all that watches the store, in bytes; the most of all samples.
    pub memory_bytes: u64,
}

/// One larger size.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ShadowCell {
    /// In percent of the smaller one.
    pub capacity_percent: u64,
    /// Hit rate that a store of this size measured, in percent.
    pub measured_percent: f64,
    /// What the smaller one predicted, in percent; one figure a sample.
    pub predicted_percent: Vec<f64>,
}

impl ShadowCell {
    /// The largest distance between predicted and measured, in points.
    pub fn error_points(&self) -> f64 {
        let errors = self.predicted_percent.iter();
        errors.map(|predicted| (predicted - self.measured_percent).abs()).fold(0.0, f64::max)
    }
}

/// Which tier is studied.
#[derive(Debug, Clone, Copy)]
pub enum ShadowTier<'a> {
    /// DRAM with nothing below.
    Dram,
    /// A file tier below a small DRAM, in this directory's `replay`, which is removed.
    Files(&'a Path),
}

/// Replays a trace at a size and predicts the larger ones from so many samples, then replays it at
/// these.
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
        let mine = stats.shadows.iter().filter(|figure| figure.tier == name);
        for (at, figure) in mine.enumerate() {
            row.sampled_one_in = figure.sampled_one_in;
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

fn hit_percent(stats: &Stats) -> f64 {
    100.0 * ratio(stats.counters.blocks_matched, stats.counters.blocks_requested)
}

/// A store whose tier under study holds so many hundredths of a percent of a trace's blocks.
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
            // So that a fast replay and a slow machine measure the same.
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

/// Replays a whole trace, one request after the other; the sample follows from the keys.
fn replay(trace: &Trace, config: StoreConfig, sample: u64) -> Result<Stats, StoreError> {
    let has_files = config.files.is_some();
    let bytes = if has_files { FILES_BLOCK_BYTES } else { DRAM_BLOCK_BYTES };
    let payload = vec![0_u8; usize::try_from(bytes).expect("a page at most")];
    let directory = config.files.as_ref().map(|files| files.directory.clone());
    directory.as_deref().map_or(Ok(()), discard)?;
    let store = Store::open(config)?;
    for request in &trace.requests {
        let keys: Vec<_> = request.blocks.iter().map(|block| key(*block, sample)).collect();
        let asked = Request {
            partial_tail: request.partial_tail,
            at: Some(request.at),
            ..Request::new(&keys)
        };
        let matched = store.lookup_prefix(&asked).tiers.len();
        // What matched is read, as an engine would.
        drop(store.view(&keys[..matched], CallOptions::default()));
        drop(store.put(&missing(request, &keys, matched, &payload), CallOptions::default()));
    }
    let stats = store.stats();
    drop(store);
    directory.as_deref().map_or(Ok(()), discard)?;
    Ok(stats)
}

/// Every replay begins with an empty directory.
fn discard(directory: &Path) -> Result<(), StoreError> {
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

/// A block's key: as uniform as a hash, and another one for each sample.
fn key(block: u64, sample: u64) -> BlockKey {
    let mut bytes = [0; 32];
    let mut state = block ^ sample.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17);
    for word in bytes.as_chunks_mut::<8>().0 {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        *word = (mixed ^ (mixed >> 31)).to_le_bytes();
    }
    BlockKey::from_bytes(bytes)
}

/// The rows as a table in Markdown.
pub fn shadow_markdown(rows: &[ShadowRow]) -> String {
    let mut text = String::from(
        "| trace | tier | size | one in | hit rate | shadow of it | size | measured | predicted \
         | error |\n|---|---|---|---|---|---|---|---|---|---|\n",
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
            .expect("a string takes everything");
        }
    }
    text
}

fn range(values: &[f64]) -> String {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if values.len() == 1 { format!("{most:.2}") } else { format!("{least:.2} to {most:.2}") }
}
