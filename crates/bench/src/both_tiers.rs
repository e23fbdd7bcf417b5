//! One batch with blocks in DRAM and in files, compared with the sum of what both give alone.

use std::path::Path;
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_store::{Store, StoreConfig};

use crate::disk::{self, ScratchDirectory, get};
use crate::{Bench, Figure, MeasureError, Target, cold, failed, gib_per_second, keys, open};

const MIB: usize = 1 << 20;
const NAME: &str = "get/dram-and-files/2MiB/1-thread";
const BLOCK: usize = 2 * MIB;
/// Blocks of one batch that are in files.
const FILE_BLOCKS: usize = 32;
/// Maximum number of blocks of one batch that are in DRAM.
const DRAM_BLOCKS_MAX: usize = 256;

pub(super) fn run(bench: &mut Bench<'_>) -> Result<(), MeasureError> {
    if !bench.wants(NAME) {
        return Ok(());
    }
    let scratch = ScratchDirectory::new(&bench.directory)?;
    let in_files = keys("below DRAM", if bench.is_full { 1024 } else { 256 });
    let in_dram = keys("in DRAM", DRAM_BLOCKS_MAX);
    let (mut value, mut limit) = (Vec::new(), Vec::new());
    for round in 0..bench.rounds() {
        let directory = scratch.path(&format!("store-{round}"));
        let (both, sum) = measure(&directory, &in_files, &in_dram)?;
        value.push(both);
        limit.push(sum);
        std::fs::remove_dir_all(&directory)
            .map_err(|error| MeasureError::measure("the disk", error))?;
    }
    let limit = (limit, "a get from DRAM alone, and a cold get from files alone: the sum");
    let target = Target::ShareAtLeast(0.9);
    bench.deliver(Figure::rate(NAME.to_owned(), "GiB/s", value, limit, target))
}

/// GiB/s of batches with both, and the sum of the GiB/s of each alone. A batch has as many blocks
/// in DRAM as are copied in the time in which its other blocks are read.
fn measure(
    directory: &Path,
    in_files: &[BlockKey],
    in_dram: &[BlockKey],
) -> Result<(f64, f64), MeasureError> {
    let wrong = |what: String| MeasureError::measure("reads of both tiers", what);
    let drop_cache = || {
        let dropped = cold::drop_cached_pages(directory);
        dropped.map_err(|error| MeasureError::measure("the disk", error))
    };
    let config = disk::config(directory, (in_files.len() + in_dram.len()) * BLOCK);
    // Room for all blocks: no block in DRAM is evicted.
    let dram_bytes = ((in_files.len() + in_dram.len()) * BLOCK * 9 / 8) as u64;
    let config = StoreConfig { dram_bytes, ..config };
    disk::put_and_close(&config, in_files, BLOCK)?;
    let mut buffer = vec![1; (FILE_BLOCKS + DRAM_BLOCKS_MAX) * BLOCK];
    let mut get_all = |store: &Store, keys: &[BlockKey], tier: &str| {
        get(store, keys, &mut buffer[..keys.len() * BLOCK], |_| tier).map_err(wrong)
    };

    drop_cache()?;
    let store = open("reads of both tiers", config.clone())?;
    let mut took = Duration::ZERO;
    for batch in in_files.chunks(FILE_BLOCKS) {
        took += get_all(&store, batch, "files")?;
    }
    let files_alone = gib_per_second(in_files.len() * BLOCK, took);
    store.close().map_err(failed("reads of both tiers"))?;
    drop(store);

    drop_cache()?;
    let store = open("reads of both tiers", config)?;
    disk::put_all(&store, in_dram, BLOCK)?;
    get_all(&store, in_dram, "dram")?;
    let dram_alone = gib_per_second(in_dram.len() * BLOCK, get_all(&store, in_dram, "dram")?);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small number")]
    let dram_blocks = (FILE_BLOCKS as f64 * dram_alone / files_alone).round() as usize;
    let from_dram = &in_dram[..dram_blocks.clamp(1, DRAM_BLOCKS_MAX)];
    let (mut took, mut bytes) = (Duration::ZERO, 0);
    for from_files in in_files.chunks(FILE_BLOCKS) {
        let batch: Vec<BlockKey> = from_dram.iter().chain(from_files).copied().collect();
        let tier = |at| if at < from_dram.len() { "dram" } else { "files" };
        bytes += batch.len() * BLOCK;
        took += get(&store, &batch, &mut buffer[..batch.len() * BLOCK], tier).map_err(wrong)?;
    }
    store.close().map_err(failed("reads of both tiers"))?;
    Ok((gib_per_second(bytes, took), dram_alone + files_alone))
}
