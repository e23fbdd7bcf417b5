//! Cold segment reads and segment writes, compared with fio or plain preadv on the same disk.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use cascade_block::BlockKey;
use cascade_replay::payload;
use cascade_store::{CallOptions, FilesConfig, Put, Store, StoreConfig, ViewOutcome};

use crate::{
    Bench, FLUSH_OPTIONS, Figure, MeasureError, Target, cold, failed, gib_per_second, keys, open,
    size_name, timed,
};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
/// Bytes of one call. Over the block size, this is the queue depth of the limit.
const BATCH_BYTES: usize = 32 * MIB;
/// Limit of the queue depth.
const DEPTH_MAX: usize = 32;

pub(super) fn run(bench: &mut Bench<'_>) -> Result<(), MeasureError> {
    for size in [128 * KIB, MIB, 2 * MIB] {
        let names = ["read", "write"].map(|what| format!("{what}/segments/{}", size_name(size)));
        if bench.wants_any(&[&names[0], &names[1]]) {
            read_and_write(bench, size, names)?;
        }
    }
    Ok(())
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

fn read_and_write(
    bench: &mut Bench<'_>,
    size: usize,
    names: [String; 2],
) -> Result<(), MeasureError> {
    let disk = |error: io::Error| MeasureError::measure("the disk", error);
    let scratch = ScratchDirectory::new(&bench.directory)?;
    let bytes = if bench.is_full { 2048 * MIB } else { 512 * MIB };
    let keys = keys("disk", bytes / size);
    let depth = (BATCH_BYTES / size).clamp(1, DEPTH_MAX);
    let limit = DiskLimit::new(scratch.path("limit.bin"), bytes, size, depth).map_err(disk)?;
    let mut samples: [Vec<f64>; 4] = Default::default();
    let mut cached_most = Some(0);
    for round in 0..bench.rounds() {
        let directory = scratch.path(&format!("store-{round}"));
        samples[0].push(limit.write().map_err(disk)?);
        samples[1].push(write(&directory, &keys, size)?);
        cold::drop_cached_pages(&scratch.0).map_err(disk)?;
        samples[2].push(limit.read().map_err(disk)?);
        let before = cold::cached_bytes(&directory).map_err(disk)?;
        samples[3].push(read(&directory, &keys, size)?);
        let after = cold::cached_bytes(&directory).map_err(disk)?;
        let both = before.zip(after).map(|(before, after)| before.max(after));
        cached_most = cached_most.zip(both).map(|(most, now): (u64, u64)| most.max(now));
        fs::remove_dir_all(&directory).map_err(disk)?;
    }
    let [limit_write, write, limit_read, read] = samples;
    let proof = match cached_most {
        Some(bytes) => format!("O_DIRECT; at most {bytes} bytes of the segments in the page cache"),
        None => "O_DIRECT; fincore is not installed".to_owned(),
    };
    let text = format!("{}, {size} bytes a read, depth {depth}. Cold: {proof}", limit.tool());
    let [name_read, name_write] = names;
    let target = Target::ShareAtLeast(0.95);
    bench.deliver(Figure::rate(name_read, "GiB/s", read, (limit_read, &text), target))?;
    let text = format!("{}, {size} bytes a write, depth {depth}", limit.tool());
    let target = Target::ShareAtLeast(0.9);
    bench.deliver(Figure::rate(name_write, "GiB/s", write, (limit_write, &text), target))
}

fn config(directory: &Path, bytes: usize) -> StoreConfig {
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
    let batch_blocks = BATCH_BYTES / size;
    let mut batch_bytes = vec![0; BATCH_BYTES];
    let store = open("segment writes", config(directory, keys.len() * size))?;
    let mut took = std::time::Duration::ZERO;
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
    store.close().map_err(failed("segment writes"))?;
    if !stored {
        return Err(MeasureError::measure("segment writes", "a block was not stored"));
    }
    Ok(gib_per_second(keys.len() * size, took))
}

/// GiB/s of views on a store that was just opened, so that no block is in DRAM.
fn read(directory: &Path, keys: &[BlockKey], size: usize) -> Result<f64, MeasureError> {
    let store: Store = open("segment reads", config(directory, keys.len() * size))?;
    let mut took = std::time::Duration::ZERO;
    for batch in keys.chunks(BATCH_BYTES / size) {
        let mut outcomes = Vec::new();
        took += timed(|| outcomes = store.view(batch, CallOptions::default()));
        for (key, outcome) in batch.iter().zip(outcomes) {
            let ViewOutcome::Hit { slab, tier } = outcome else {
                let what = format!("a view returned {outcome:?}");
                return Err(MeasureError::measure("segment reads", what));
            };
            let is_right = payload::check(key, &slab, size).is_ok();
            if !is_right || tier != "files" {
                let bytes = if is_right { "right" } else { "WRONG" };
                let what = format!("{key} was read from {tier} with {bytes} bytes");
                return Err(MeasureError::measure("segment reads", what));
            }
        }
    }
    store.close().map_err(failed("segment reads"))?;
    Ok(gib_per_second(keys.len() * size, took))
}

/// The throughput of the disk without a store.
struct DiskLimit {
    path: PathBuf,
    bytes: usize,
    block: usize,
    depth: usize,
    has_fio: bool,
}

impl DiskLimit {
    fn new(path: PathBuf, bytes: usize, block: usize, depth: usize) -> io::Result<Self> {
        let has_fio =
            Command::new("fio").arg("--version").output().is_ok_and(|o| o.status.success());
        let file = File::create(&path)?;
        let piece = vec![7; MIB];
        for at in 0..bytes / MIB {
            file.write_all_at(&piece, (at * MIB) as u64)?;
        }
        file.sync_all()?;
        Ok(Self { path, bytes, block, depth, has_fio })
    }

    fn tool(&self) -> &'static str {
        if self.has_fio {
            "fio, io_uring, O_DIRECT"
        } else {
            "pread and pwrite with O_DIRECT, one thread per request (fio is not installed)"
        }
    }

    fn read(&self) -> io::Result<f64> {
        if self.has_fio { self.fio("read") } else { self.plain(false) }
    }

    fn write(&self) -> io::Result<f64> {
        if self.has_fio { self.fio("write") } else { self.plain(true) }
    }

    fn fio(&self, direction: &str) -> io::Result<f64> {
        let output = Command::new("fio")
            .args(["--name=limit", "--direct=1", "--ioengine=io_uring", "--output-format=json"])
            .arg(format!("--filename={}", self.path.display()))
            .arg(format!("--rw={direction}"))
            .arg(format!("--bs={}", self.block))
            .arg(format!("--size={}", self.bytes))
            .arg(format!("--iodepth={}", self.depth))
            .output()?;
        let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let rate = report["jobs"][0][direction]["bw_bytes"].as_f64().filter(|rate| *rate > 0.0);
        let rate = rate.ok_or_else(|| {
            let errors = String::from_utf8_lossy(&output.stderr);
            io::Error::other(format!("fio reported no throughput: {}", errors.trim()))
        })?;
        Ok(rate / crate::GIB)
    }

    /// One thread per request in flight, each with an aligned buffer.
    fn plain(&self, is_write: bool) -> io::Result<f64> {
        let direct = rustix::fs::OFlags::DIRECT.bits().cast_signed();
        let mut options = OpenOptions::new();
        let file = options.read(true).write(is_write).custom_flags(direct).open(&self.path)?;
        let (next, blocks) = (AtomicUsize::new(0), self.bytes / self.block);
        let mut outcome = Ok(());
        let took = timed(|| {
            outcome = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..self.depth.min(blocks))
                    .map(|_| scope.spawn(|| self.plain_thread(&file, is_write, &next)))
                    .collect();
                threads.into_iter().try_for_each(|thread| {
                    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                })
            });
        });
        outcome.map(|()| gib_per_second(blocks * self.block, took))
    }

    fn plain_thread(&self, file: &File, is_write: bool, next: &AtomicUsize) -> io::Result<()> {
        let mut memory = vec![7_u8; self.block + 4096];
        let start = memory.as_ptr().align_offset(4096);
        let buffer = &mut memory[start..start + self.block];
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= self.bytes / self.block {
                return Ok(());
            }
            let offset = (at * self.block) as u64;
            if is_write {
                file.write_all_at(buffer, offset)?;
            } else {
                file.read_exact_at(buffer, offset)?;
            }
        }
    }
}
