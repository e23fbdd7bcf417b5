//! Puts that return once their blocks are synced, compared with one file for each block.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use cascade_replay::payload;
use cascade_store::{CallOptions, Put, PutOutcome, StoreConfig, WritePolicy};

use crate::disk::{self, ScratchDirectory};
use crate::{
    Bench, Figure, MeasureError, Target, failed, gib_per_second, keys, open, size_name, timed,
};

const MIB: usize = 1 << 20;
/// Bytes of one put.
const BATCH_BYTES: usize = 32 * MIB;
/// Block sizes, each with the least share of the limit.
const SIZES: [(usize, f64); 2] = [(128 << 10, 2.0), (2 * MIB, 1.2)];
const LIMIT: &str = "a new file for each block: O_DIRECT, one write, fdatasync; one thread";

pub(super) fn run(bench: &mut Bench<'_>) -> Result<(), MeasureError> {
    for (size, least) in SIZES {
        let name = format!("put/durable/{}/1-thread", size_name(size));
        if bench.wants(&name) {
            measure(bench, name, size, least)?;
        }
    }
    Ok(())
}

fn measure(
    bench: &mut Bench<'_>,
    name: String,
    size: usize,
    least: f64,
) -> Result<(), MeasureError> {
    let disk = |error: io::Error| MeasureError::measure("the disk", error);
    let scratch = ScratchDirectory::new(&bench.directory)?;
    let bytes = if bench.is_full { 1024 * MIB } else { 128 * MIB };
    let (mut value, mut limit) = (Vec::new(), Vec::new());
    for round in 0..bench.rounds() {
        let directory = scratch.path(&format!("blocks-{round}"));
        limit.push(file_per_block(&directory, bytes, size).map_err(disk)?);
        fs::remove_dir_all(&directory).map_err(disk)?;
        let directory = scratch.path(&format!("store-{round}"));
        value.push(put_all(&directory, bytes, size)?);
        fs::remove_dir_all(&directory).map_err(disk)?;
    }
    let target = Target::ShareAtLeast(least);
    bench.deliver(Figure::rate(name, "GiB/s", value, (limit, LIMIT), target))
}

/// GiB/s of puts into a durable store that writes through.
fn put_all(directory: &Path, bytes: usize, size: usize) -> Result<f64, MeasureError> {
    let mut config = disk::config(directory, bytes);
    if let Some(files) = &mut config.files {
        files.durable = true;
    }
    let config = StoreConfig { write: WritePolicy::Through, ..config };
    let store = open("durable puts", config)?;
    let mut memory = vec![0; BATCH_BYTES];
    let mut took = std::time::Duration::ZERO;
    for batch in keys("durable", bytes / size).chunks(BATCH_BYTES / size) {
        let pieces = batch.iter().zip(memory.chunks_exact_mut(size));
        pieces.for_each(|(key, piece)| payload::fill(key, piece));
        let puts = batch.iter().zip(memory.chunks_exact(size));
        let puts: Vec<Put<'_>> = puts.map(|(key, bytes)| Put::new(*key, bytes)).collect();
        let mut outcomes = Vec::new();
        took += timed(|| outcomes = store.put(&puts, CallOptions::default()));
        if let Some(bad) = outcomes.iter().find(|o| !matches!(o, PutOutcome::Stored)) {
            return Err(MeasureError::measure("a durable put", format!("it returned {bad:?}")));
        }
    }
    store.close().map_err(failed("durable puts"))?;
    Ok(gib_per_second(bytes, took))
}

/// GiB/s of one file for each block, each synced.
fn file_per_block(directory: &Path, bytes: usize, size: usize) -> io::Result<f64> {
    fs::create_dir_all(directory)?;
    let direct = rustix::fs::OFlags::DIRECT.bits().cast_signed();
    let memory = vec![7_u8; size + 4096];
    let start = memory.as_ptr().align_offset(4096);
    let block = &memory[start..start + size];
    let write = |number: usize| -> io::Result<()> {
        let path = directory.join(format!("{number}.block"));
        let mut options = OpenOptions::new();
        let file = options.write(true).create_new(true).custom_flags(direct).open(path)?;
        file.write_all_at(block, 0)?;
        file.sync_data()
    };
    let mut outcome = Ok(());
    let took = timed(|| outcome = (0..bytes / size).try_for_each(write));
    outcome.map(|()| gib_per_second(bytes, took))
}
