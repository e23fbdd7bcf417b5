//! The time to open a store with many blocks, and its resident memory when DRAM is oversubscribed.

use std::collections::HashMap;
use std::path::Path;

use cascade_block::BlockKey;
use cascade_replay::environment::resident_bytes;
use cascade_replay::payload;
use cascade_store::{
    CallOptions, FilesConfig, GetOutcome, KeepPool, Put, PutOutcome, Store, StoreConfig,
};

use crate::disk::ScratchDirectory;
use crate::{Bench, FLUSH_OPTIONS, Figure, MeasureError, Target, failed, keys, open, timed};

const MIB: usize = 1 << 20;
const BLOCK: usize = 4096;

pub(super) fn run(bench: &mut Bench<'_>) -> Result<(), MeasureError> {
    restart(bench, "restart/100k-blocks", 100_000, 2.0)?;
    let gib = if bench.is_full { 4 } else { 1 };
    warm_restart(bench, &format!("restart/warm-{gib}GiB"), gib << 30)?;
    if bench.is_full { restart(bench, "restart/1M-blocks", 1_000_000, 10.0) } else { Ok(()) }
}

/// Opens a file tier with many small blocks, then reads some of them.
fn restart(bench: &mut Bench<'_>, name: &str, count: usize, most: f64) -> Result<(), MeasureError> {
    if !bench.wants(name) {
        return Ok(());
    }
    let scratch = ScratchDirectory::new(&bench.directory)?;
    let mut files = FilesConfig::new(scratch.path("store"));
    files.capacity_bytes = (count * BLOCK * 4).max(1024 * MIB) as u64;
    let config = StoreConfig {
        pipeline: "Dram|Files".to_owned(),
        dram_bytes: 128 << 20,
        files: Some(files),
        ..StoreConfig::default()
    };
    let keys = keys("restart", count);
    let store = open("restart", config.clone())?;
    put_all(&store, &keys, BLOCK)?;
    store.close().map_err(failed("restart"))?;
    drop(store);
    let (mut limit, mut value) = (Vec::new(), Vec::new());
    for _ in 0..bench.rounds() {
        let plain = timed(|| {
            let map: HashMap<BlockKey, usize> =
                keys.iter().enumerate().map(|(at, key)| (*key, at)).collect();
            std::hint::black_box(map);
        });
        limit.push(plain.as_secs_f64());
        let mut reopened = None;
        value.push(timed(|| reopened = Some(Store::open(config.clone()))).as_secs_f64());
        let store = reopened.expect("set by the closure").map_err(failed("restart"))?;
        check_some(&store, &keys)?;
        store.close().map_err(failed("restart"))?;
    }
    let limit = (limit, "insertion of the same number of keys into a std HashMap");
    bench.deliver(Figure::cost(name.to_owned(), "s", value, limit, Target::AtMost(most)))
}

/// Opens a kept pool after its store was closed, then reads all of its blocks.
fn warm_restart(bench: &mut Bench<'_>, name: &str, bytes: usize) -> Result<(), MeasureError> {
    const SIZE: usize = 128 << 10;
    /// Space for slabs in the pool's magazines, so that no block is evicted.
    const MAGAZINE_BLOCKS: usize = 128;
    if !bench.wants(name) {
        return Ok(());
    }
    let memory = Path::new("/dev/shm");
    let parent = if memory.is_dir() { memory } else { &bench.directory };
    let scratch = ScratchDirectory::new(parent)?;
    let config = StoreConfig {
        dram_bytes: bytes as u64,
        pool_file: Some(scratch.path("pool")),
        keep_pool: KeepPool::Always,
        ..StoreConfig::default()
    };
    let keys = keys("warm restart", (bytes / SIZE) - MAGAZINE_BLOCKS);
    let (mut limit, mut value) = (Vec::new(), Vec::new());
    let mut reopened = open("warm restart", config.clone())?;
    put_all(&reopened, &keys, SIZE)?;
    for _ in 0..bench.rounds() {
        reopened.close().map_err(failed("warm restart"))?;
        drop(reopened);
        let mut opened = None;
        value.push(timed(|| opened = Some(Store::open(config.clone()))).as_secs_f64());
        reopened = opened.expect("set by the closure").map_err(failed("warm restart"))?;
        check_each(&reopened, keys.iter(), SIZE)?;
        let empty = StoreConfig { pool_file: None, ..config.clone() };
        limit.push(timed(|| drop(Store::open(empty))).as_secs_f64());
    }
    let limit = (limit, "opening and closing an empty store of that capacity");
    let target = Target::AtMost(5.0 * bytes as f64 / (4_u64 << 30) as f64);
    bench.deliver(Figure::cost(name.to_owned(), "s", value, limit, target))
}

/// Bytes of one put.
const PUT_BYTES: usize = 4 * MIB;

fn put_all(store: &Store, keys: &[BlockKey], size: usize) -> Result<(), MeasureError> {
    put_with(store, keys, size, &mut vec![0; PUT_BYTES])
}

/// Puts blocks, with this memory for their bytes.
fn put_with(
    store: &Store,
    keys: &[BlockKey],
    size: usize,
    bytes: &mut [u8],
) -> Result<(), MeasureError> {
    let batch_blocks = bytes.len() / size;
    for batch in keys.chunks(batch_blocks) {
        let pieces = batch.iter().zip(bytes.chunks_exact_mut(size));
        pieces.for_each(|(key, piece)| payload::fill(key, piece));
        let puts = batch.iter().zip(bytes.chunks_exact(size));
        let puts: Vec<Put<'_>> = puts.map(|(key, bytes)| Put::new(*key, bytes)).collect();
        let outcomes = store.put(&puts, CallOptions::default());
        if let Some(bad) = outcomes.iter().find(|o| !matches!(o, PutOutcome::Stored)) {
            return Err(MeasureError::measure("a put", format!("it returned {bad:?}")));
        }
    }
    store.flush(FLUSH_OPTIONS).map_err(failed("a flush"))
}

/// Reads and checks a hundred blocks, evenly spread.
fn check_some(store: &Store, keys: &[BlockKey]) -> Result<(), MeasureError> {
    check_each(store, keys.iter().step_by(keys.len() / 100), BLOCK)
}

fn check_each<'a>(
    store: &Store,
    keys: impl Iterator<Item = &'a BlockKey>,
    size: usize,
) -> Result<(), MeasureError> {
    let mut buffer = vec![0; size];
    for key in keys {
        let outcomes = store.get(&[*key], &mut [&mut buffer], CallOptions::default());
        let is_hit = matches!(outcomes.first(), Some(GetOutcome::Hit { .. }));
        if !is_hit || payload::check(key, &buffer, size).is_err() {
            let what = if is_hit { "WRONG BYTES".to_owned() } else { format!("{outcomes:?}") };
            return Err(MeasureError::measure(
                "restart",
                format!("a get of {key} returned {what}"),
            ));
        }
    }
    Ok(())
}

/// Puts four times the capacity of DRAM, with a file tier, and measures resident memory.
pub(super) fn resident(bench: &mut Bench<'_>) -> Result<(), MeasureError> {
    let name = "memory/resident/4x-oversubscribed";
    if !bench.wants(name) {
        return Ok(());
    }
    let resident = || {
        let bytes = resident_bytes().map(|bytes| bytes as f64 / MIB as f64);
        bytes.ok_or_else(|| MeasureError::measure("resident memory", "no /proc/self/status"))
    };
    let budget = if bench.is_full { 1024 } else { 256 } * MIB;
    let scratch = ScratchDirectory::new(&bench.directory)?;
    let mut files = FilesConfig::new(scratch.path("store"));
    files.capacity_bytes = 8 * budget as u64;
    let config = StoreConfig {
        pipeline: "Dram|Files".to_owned(),
        dram_bytes: budget as u64,
        files: Some(files),
        ..StoreConfig::default()
    };
    let keys = keys("resident", 4 * budget / (128 << 10));
    // Allocated and touched before the first measurement: it is not the store's.
    let mut bytes = vec![1; PUT_BYTES];
    let before = resident()?;
    let store = open("resident memory", config)?;
    let mut most: f64 = 0.0;
    for part in keys.chunks(keys.len().div_ceil(32)) {
        put_with(&store, part, 128 << 10, &mut bytes)?;
        most = most.max(resident()? - before);
    }
    store.close().map_err(failed("resident memory"))?;
    let budget = budget as f64 / MIB as f64;
    let limit = (vec![budget], "the configured capacity, dram_bytes");
    let target = Target::AtMost(budget * 1.05);
    bench.deliver(Figure::cost(name.to_owned(), "MiB", vec![most], limit, target))
}
