//! Cold segment reads and segment writes, compared with fio or plain preadv on the same disk.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_replay::payload;
use cascade_store::{CallOptions, FilesConfig, GetOutcome, Put, Store, StoreConfig, ViewOutcome};

use crate::disk_limit::{Direction, DiskLimit};
use crate::{
    Bench, FLUSH_OPTIONS, Figure, MeasureError, Target, cold, failed, gib_per_second, keys, open,
    size_name, timed,
};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
/// Bytes of one call.
const BATCH_BYTES: usize = 32 * MIB;

pub(super) fn run(bench: &mut Bench<'_>) -> Result<(), MeasureError> {
    for size in [128 * KIB, MIB, 2 * MIB, 16 * MIB] {
        let size_name = size_name(size);
        let names = Names {
            read: format!("read/segments/{size_name}"),
            write: format!("write/segments/{size_name}"),
            write_new: format!("write/new-space/{size_name}"),
            get: format!("get/cold/{size_name}/1-thread"),
        };
        if bench.wants_any(&[&names.read, &names.write, &names.write_new, &names.get]) {
            read_and_write(bench, size, names)?;
        }
    }
    Ok(())
}

/// The names of the rows of one block size.
struct Names {
    read: String,
    write: String,
    /// As `write`, with the limit of files that are new, as segments are.
    write_new: String,
    get: String,
}

/// A directory that is removed on drop.
pub(super) struct ScratchDirectory(PathBuf);

impl ScratchDirectory {
    pub(super) fn new(below: &Path) -> Result<Self, MeasureError> {
        let path = below.join(format!("cascade-bench-{}", std::process::id()));
        let made = fs::create_dir_all(&path);
        made.map_err(|error| {
            MeasureError::measure(format!("the disk below {}", below.display()), error)
        })?;
        Ok(Self(path))
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for ScratchDirectory {
    fn drop(&mut self) {
        // A directory that cannot be removed has the name of this process, in the chosen place.
        drop(fs::remove_dir_all(&self.0));
    }
}

fn read_and_write(bench: &mut Bench<'_>, size: usize, names: Names) -> Result<(), MeasureError> {
    let disk = |error: io::Error| MeasureError::measure("the disk", error);
    let scratch = ScratchDirectory::new(&bench.directory)?;
    let bytes = if bench.is_full { 2048 * MIB } else { 512 * MIB };
    let keys = keys("disk", bytes / size);
    let limit = DiskLimit::new(scratch.path("limit.bin"), bytes, size).map_err(disk)?;
    let best_write = limit.calibrate(Direction::Write).map_err(disk)?;
    let best_new = limit.calibrate(Direction::WriteNew).map_err(disk)?;
    let best_read = limit.calibrate(Direction::Read).map_err(disk)?;
    let mut samples: [Vec<f64>; 6] = Default::default();
    let mut cached_most = Some(0);
    for round in 0..bench.rounds() {
        let directory = scratch.path(&format!("store-{round}"));
        samples[0].push(limit.measure(Direction::Write, best_write).map_err(disk)?);
        samples[1].push(write(&directory, &keys, size)?);
        samples[5].push(limit.measure(Direction::WriteNew, best_new).map_err(disk)?);
        cold::drop_cached_pages(&scratch.0).map_err(disk)?;
        samples[2].push(limit.measure(Direction::Read, best_read).map_err(disk)?);
        let before = cold::cached_bytes(&directory).map_err(disk)?;
        samples[3].push(read(&directory, &keys, size, view)?);
        samples[4].push(read(&directory, &keys, size, get_from_files)?);
        let after = cold::cached_bytes(&directory).map_err(disk)?;
        let both = before.zip(after).map(|(before, after)| before.max(after));
        cached_most = cached_most.zip(both).map(|(most, now): (u64, u64)| most.max(now));
        fs::remove_dir_all(&directory).map_err(disk)?;
    }
    let [limit_write, write, limit_read, read, get, limit_new] = samples;
    let proof = match cached_most {
        Some(bytes) => format!("O_DIRECT; at most {bytes} bytes of the segments in the page cache"),
        None => "O_DIRECT; fincore is not installed".to_owned(),
    };
    let text = format!("{}, {size} bytes a read. Cold: {proof}", best_read.describe());
    let target = Target::ShareAtLeast(0.95);
    let limit = (limit_read.clone(), text.as_str());
    bench.deliver(Figure::rate(names.read, "GiB/s", read, limit, target))?;
    bench.deliver(Figure::rate(names.get, "GiB/s", get, (limit_read, &text), target))?;
    let target = Target::ShareAtLeast(0.9);
    let text = format!("{}, {size} bytes a write, over a file", best_write.describe());
    let limit = (limit_write, text.as_str());
    bench.deliver(Figure::rate(names.write, "GiB/s", write.clone(), limit, target))?;
    let text = format!("{}, {size} bytes a write, to a new file", best_new.describe());
    let limit = (limit_new, text.as_str());
    bench.deliver(Figure::rate(names.write_new, "GiB/s", write, limit, target))
}

pub(super) fn config(directory: &Path, bytes: usize) -> StoreConfig {
    let mut files = FilesConfig::new(directory);
    files.capacity_bytes = (bytes * 2).max(1 << 30) as u64;
    files.segment_bytes = 64 << 20;
    StoreConfig {
        pipeline: "Dram|Files".to_owned(),
        dram_bytes: 256 << 20,
        files: Some(files),
        ..StoreConfig::default()
    }
}

/// GiB/s from the first put until the flush has written all blocks.
fn write(directory: &Path, keys: &[BlockKey], size: usize) -> Result<f64, MeasureError> {
    let took = put_and_close(&config(directory, keys.len() * size), keys, size)?;
    Ok(gib_per_second(keys.len() * size, took))
}

/// Puts blocks into a new store, flushes and closes it. Returns the time of the puts and the flush.
pub(super) fn put_and_close(
    config: &StoreConfig,
    keys: &[BlockKey],
    size: usize,
) -> Result<Duration, MeasureError> {
    let store = open("segment writes", config.clone())?;
    let took = put_all(&store, keys, size)?;
    store.close().map_err(failed("segment writes"))?;
    Ok(took)
}

/// Puts blocks and flushes them. Returns the time of both.
pub(super) fn put_all(
    store: &Store,
    keys: &[BlockKey],
    size: usize,
) -> Result<Duration, MeasureError> {
    let batch_blocks = BATCH_BYTES / size;
    let mut batch_bytes = vec![0; BATCH_BYTES];
    let mut took = Duration::ZERO;
    let mut stored = true;
    for batch in keys.chunks(batch_blocks) {
        let pieces = batch.iter().zip(batch_bytes.chunks_exact_mut(size));
        pieces.for_each(|(key, piece)| payload::fill(key, piece));
        let puts = batch.iter().zip(batch_bytes.chunks_exact(size));
        let puts: Vec<Put<'_>> = puts.map(|(key, bytes)| Put::new(*key, bytes)).collect();
        took += timed(|| {
            let outcomes = store.put(&puts, CallOptions::default());
            stored &= outcomes.iter().all(|o| matches!(o, cascade_store::PutOutcome::Stored));
        });
    }
    let mut flushed = Ok(());
    took += timed(|| flushed = store.flush(FLUSH_OPTIONS));
    flushed.map_err(failed("segment writes"))?;
    if !stored {
        return Err(MeasureError::measure("segment writes", "a block was not stored"));
    }
    Ok(took)
}

/// Reads blocks, checks them, and returns the time of the call. The memory is for copies.
type TimedRead = fn(&Store, &[BlockKey], &mut [u8]) -> Result<Duration, String>;

/// GiB/s of a cold read with a call on a store that was just opened, so that no block is in DRAM.
fn read(
    directory: &Path,
    keys: &[BlockKey],
    size: usize,
    call: TimedRead,
) -> Result<f64, MeasureError> {
    let store: Store = open("segment reads", config(directory, keys.len() * size))?;
    let wrong = |what: String| MeasureError::measure("segment reads", what);
    // Touched once, as the buffer of a caller that reads again and again.
    let mut buffer = vec![1; BATCH_BYTES];
    let mut took = Duration::ZERO;
    for batch in keys.chunks(BATCH_BYTES / size) {
        took += call(&store, batch, &mut buffer[..batch.len() * size]).map_err(wrong)?;
    }
    store.close().map_err(failed("segment reads"))?;
    Ok(gib_per_second(keys.len() * size, took))
}

fn view(store: &Store, keys: &[BlockKey], buffer: &mut [u8]) -> Result<Duration, String> {
    let mut outcomes = Vec::new();
    let took = timed(|| outcomes = store.view(keys, CallOptions::default()));
    for (key, outcome) in keys.iter().zip(outcomes) {
        let ViewOutcome::Hit { slab, tier } = outcome else {
            return Err(format!("a view returned {outcome:?}"));
        };
        let bytes = slab.host().ok_or("the block is in device memory")?;
        check(key, bytes, buffer.len() / keys.len(), tier, "files")?;
    }
    Ok(took)
}

fn get_from_files(store: &Store, keys: &[BlockKey], buffer: &mut [u8]) -> Result<Duration, String> {
    get(store, keys, buffer, |_| "files")
}

/// Gets blocks, checks their bytes and tiers, and returns the time of the call.
pub(super) fn get<'a>(
    store: &Store,
    keys: &[BlockKey],
    buffer: &mut [u8],
    expected_tier: impl Fn(usize) -> &'a str,
) -> Result<Duration, String> {
    let size = buffer.len() / keys.len();
    let mut outcomes = Vec::new();
    let mut pieces: Vec<&mut [u8]> = buffer.chunks_exact_mut(size).collect();
    let took = timed(|| outcomes = store.get(keys, &mut pieces, CallOptions::default()));
    for (at, ((key, outcome), piece)) in keys.iter().zip(outcomes).zip(&pieces).enumerate() {
        let GetOutcome::Hit { tier, .. } = outcome else {
            return Err(format!("a get returned {outcome:?}"));
        };
        check(key, piece, size, tier, expected_tier(at))?;
    }
    Ok(took)
}

fn check(
    key: &BlockKey,
    bytes: &[u8],
    size: usize,
    tier: &str,
    expected_tier: &str,
) -> Result<(), String> {
    let is_right = payload::check(key, bytes, size).is_ok();
    if is_right && tier == expected_tier {
        return Ok(());
    }
    let bytes = if is_right { "right" } else { "WRONG" };
    Err(format!("{key} was read from {tier} with {bytes} bytes"))
}
