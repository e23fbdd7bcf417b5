//! Put, copying get and view, compared with memcpy between the same kinds of memory, cold.

use std::collections::HashMap;
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::time::Duration;

use cascade_block::{BlockKey, DigestAlgorithm, DigestMode};
use cascade_memory::{HostSlabMut, HugePages, Pool, PoolConfig, copy_in, copy_out};
use cascade_replay::payload;
use cascade_runtime::{Clock, SystemClock};
use cascade_store::{CallOptions, GetOutcome, Put, PutOutcome, Store, StoreConfig, ViewOutcome};

use crate::figure::median;
use crate::{Bench, Figure, MeasureError, Target, gib_per_second, keys, open, size_name, timed};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
/// Put and get have targets for blocks of this size and larger.
const TARGET_BYTES_MIN: usize = 128 * KIB;
/// Bytes of one call.
const BATCH_BYTES: usize = 8 * MIB;
/// Limit of the blocks of one call; also the batch size of views.
const BATCH_BLOCKS: usize = 256;

const PUT_LIMIT: &str = "memcpy from the same source into slabs of an equal pool, same order";
const GET_LIMIT: &str = "memcpy from slabs of an equal pool into the same buffer, same order";

pub(super) fn run(bench: &mut Bench<'_>) -> Result<(), MeasureError> {
    let sizes = [4 * KIB, 16 * KIB, 64 * KIB, 128 * KIB, MIB, 2 * MIB, 16 * MIB];
    for threads in [1, 2] {
        for size in sizes {
            let tail = format!("/{}/{threads}-thread", size_name(size));
            if bench.wants_any(&[&format!("put{tail}"), &format!("get{tail}")]) {
                put_and_get(bench, size, threads, &tail, DigestMode::Off)?;
            }
        }
    }
    for (name, algorithm) in
        [("blake3", DigestAlgorithm::Blake3), ("sha256", DigestAlgorithm::Sha256)]
    {
        let tail = format!("/1MiB/1-thread/{name}");
        if bench.wants(&format!("put{tail}")) {
            put_and_get(bench, MIB, 1, &tail, DigestMode::On(algorithm))?;
        }
    }
    if bench.wants("view/128KiB/batch-256") { view(bench) } else { Ok(()) }
}

/// Describes the limit, with the rate of non-temporal copies, which explains a share above 1.
fn limit_text(limit: &str, streamed: &[f64]) -> String {
    format!(
        "{limit}. The store uses non-temporal copies, which memcpy does only for larger blocks; \
         such copies alone reach {:.2} GiB/s",
        median(streamed)
    )
}

/// The memory, keys and store of one measurement.
struct MemoryFixture {
    size: usize,
    keys: Vec<BlockKey>,
    source: Vec<u8>,
    buffer: Vec<u8>,
    slabs: Vec<HostSlabMut>,
    store: Store,
    threads: usize,
}

fn put_and_get(
    bench: &mut Bench<'_>,
    size: usize,
    threads: usize,
    tail: &str,
    digest: DigestMode,
) -> Result<(), MeasureError> {
    let mut fixture = MemoryFixture::new(bench.is_full, size, threads, digest)?;
    let mut samples: [Vec<f64>; 6] = Default::default();
    // Round 0 touches memory for the first time, which costs page faults. It is not counted.
    for round in 0..=bench.rounds() {
        let memcpy_in = fixture.copy_in(<[u8]>::copy_from_slice);
        let streamed_in = fixture.copy_in(copy_in);
        let put = fixture.put()?;
        let memcpy_out = fixture.copy_out(<[u8]>::copy_from_slice);
        let streamed_out = fixture.copy_out(|to, from| copy_out(to, from, BATCH_BYTES));
        let times = [memcpy_in, streamed_in, put, memcpy_out, streamed_out, fixture.get()?];
        if round > 0 {
            for (samples, took) in samples.iter_mut().zip(times) {
                samples.push(gib_per_second(fixture.source.len(), took));
            }
        }
    }
    fixture.check()?;
    let [memcpy_in, streamed_in, put, memcpy_out, streamed_out, get] = samples;
    let has_target = size >= TARGET_BYTES_MIN && digest == DigestMode::Off;
    let target = |share| if has_target { Target::ShareAtLeast(share) } else { Target::None };
    let text = limit_text(PUT_LIMIT, &streamed_in);
    let limit = (memcpy_in, text.as_str());
    bench.deliver(Figure::rate(format!("put{tail}"), "GiB/s", put, limit, target(0.8)))?;
    if digest != DigestMode::Off {
        return Ok(());
    }
    let text = limit_text(GET_LIMIT, &streamed_out);
    let limit = (memcpy_out, text.as_str());
    bench.deliver(Figure::rate(format!("get{tail}"), "GiB/s", get, limit, target(0.9)))
}

impl MemoryFixture {
    fn new(
        is_full: bool,
        size: usize,
        threads: usize,
        digest: DigestMode,
    ) -> Result<Self, MeasureError> {
        // Much more than the CPU caches, so that source and target are cold.
        let bytes = if is_full { 512 * MIB } else { 192 * MIB };
        let keys = keys("memory", bytes / size);
        let mut source = vec![0; keys.len() * size];
        keys.iter()
            .zip(source.chunks_exact_mut(size))
            .for_each(|(key, block)| payload::fill(key, block));
        let pool = PoolConfig {
            capacity_bytes: source.len() + source.len() / 4 + 64 * MIB,
            huge_pages: HugePages::Auto,
            populate: true,
        };
        let pool = Pool::new(&pool).map_err(|error| MeasureError::measure("memcpy", error))?;
        let slab = |_: &BlockKey| pool.allocate(size)?.into_host().ok();
        let slabs: Option<Vec<HostSlabMut>> = keys.iter().map(slab).collect();
        let config = StoreConfig {
            dram_bytes: (source.len() + source.len() / 4 + 64 * MIB) as u64,
            digest,
            ..StoreConfig::default()
        };
        Ok(Self {
            size,
            buffer: vec![1; source.len()],
            source,
            slabs: slabs.ok_or_else(|| MeasureError::measure("memcpy", "the pool is too small"))?,
            store: open("put and get", config)?,
            threads,
            keys,
        })
    }

    fn batch_blocks(&self) -> usize {
        (BATCH_BYTES / self.size).clamp(1, BATCH_BLOCKS)
    }

    /// Blocks of each thread.
    fn share(&self) -> usize {
        self.keys.len().div_ceil(self.threads)
    }

    fn copy_in(&mut self, copy: impl Fn(&mut [u8], &[u8]) + Sync) -> Duration {
        let (share, size) = (self.share(), self.size);
        let parts = self.slabs.chunks_mut(share).zip(self.source.chunks(share * size));
        in_parallel(parts.collect(), |(slabs, source)| {
            for (slab, block) in slabs.iter_mut().zip(source.chunks_exact(size)) {
                copy(slab, block);
            }
        })
    }

    fn copy_out(&mut self, copy: impl Fn(&mut [u8], &[u8]) + Sync) -> Duration {
        let (share, size) = (self.share(), self.size);
        let parts = self.slabs.chunks(share).zip(self.buffer.chunks_mut(share * size));
        in_parallel(parts.collect(), |(slabs, buffer)| {
            for (slab, block) in slabs.iter().zip(buffer.chunks_exact_mut(size)) {
                copy(block, slab);
            }
        })
    }

    fn put(&mut self) -> Result<Duration, MeasureError> {
        self.store.clear();
        let blocks: Vec<Put<'_>> = self
            .keys
            .iter()
            .zip(self.source.chunks_exact(self.size))
            .map(|(key, bytes)| Put::new(*key, bytes))
            .collect();
        let error = Mutex::new(None);
        let batch_blocks = self.batch_blocks();
        let took = in_parallel(blocks.chunks(self.share()).collect(), |part| {
            for batch in part.chunks(batch_blocks) {
                let outcomes = self.store.put(batch, CallOptions::default());
                if let Some(bad) = outcomes.iter().find(|o| !matches!(o, PutOutcome::Stored)) {
                    record_error(&error, format!("a put returned {bad:?}"));
                }
            }
        });
        take_error(error).map(|()| took)
    }

    fn get(&mut self) -> Result<Duration, MeasureError> {
        let (share, batch_blocks) = (self.share(), self.batch_blocks());
        let mut buffers: Vec<&mut [u8]> = self.buffer.chunks_exact_mut(self.size).collect();
        let (store, error) = (&self.store, Mutex::new(None));
        let parts = self.keys.chunks(share).zip(buffers.chunks_mut(share));
        let took = in_parallel(parts.collect(), |(keys, buffers)| {
            for (keys, buffers) in keys.chunks(batch_blocks).zip(buffers.chunks_mut(batch_blocks)) {
                let outcomes = store.get(keys, buffers, CallOptions::default());
                let is_hit = |outcome: &&GetOutcome| !matches!(outcome, GetOutcome::Hit { .. });
                if let Some(bad) = outcomes.iter().find(is_hit) {
                    record_error(&error, format!("a get returned {bad:?}"));
                }
            }
        });
        take_error(error).map(|()| took)
    }

    /// Checks that the last get copied the bytes that were put.
    fn check(&self) -> Result<(), MeasureError> {
        for (key, block) in self.keys.iter().zip(self.buffer.chunks_exact(self.size)) {
            payload::check(key, block, self.size)
                .map_err(|error| MeasureError::measure("get", format!("WRONG BYTE: {error:?}")))?;
        }
        Ok(())
    }
}

/// Keeps the first error of all threads.
fn record_error(first: &Mutex<Option<String>>, message: String) {
    first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(message);
}

fn take_error(first: Mutex<Option<String>>) -> Result<(), MeasureError> {
    let message = first.into_inner().unwrap_or_else(PoisonError::into_inner);
    message.map_or(Ok(()), |message| Err(MeasureError::measure("put and get", message)))
}

/// The time from the start of the first thread to the end of the last, behind a common barrier.
fn in_parallel<T: Send>(parts: Vec<T>, work: impl Fn(T) + Sync) -> Duration {
    let barrier = Barrier::new(parts.len());
    let spans = Mutex::new(Vec::with_capacity(parts.len()));
    std::thread::scope(|scope| {
        for part in parts {
            scope.spawn(|| {
                barrier.wait();
                let began = SystemClock.monotonic();
                work(part);
                let ended = SystemClock.monotonic();
                spans.lock().unwrap_or_else(PoisonError::into_inner).push((began, ended));
            });
        }
    });
    let spans = spans.into_inner().unwrap_or_else(PoisonError::into_inner);
    let began = spans.iter().map(|(began, _)| *began).min().unwrap_or_default();
    let ended = spans.iter().map(|(_, ended)| *ended).max().unwrap_or_default();
    ended.saturating_sub(began)
}

/// Views copy nothing: their cost is the lookup and the reference count.
fn view(bench: &mut Bench<'_>) -> Result<(), MeasureError> {
    let size = 128 * KIB;
    let fixture = MemoryFixture::new(false, size, 1, DigestMode::Off)?;
    let blocks = fixture.keys.iter().zip(fixture.source.chunks_exact(size));
    let blocks: Vec<Put<'_>> = blocks.map(|(key, bytes)| Put::new(*key, bytes)).collect();
    drop(fixture.store.put(&blocks, CallOptions::default()));
    let held: HashMap<BlockKey, Arc<usize>> =
        fixture.keys.iter().enumerate().map(|(at, key)| (*key, Arc::new(at))).collect();
    let mut samples = (Vec::new(), Vec::new());
    let repeats = 200;
    for _ in 0..bench.rounds() {
        let (mut limit, mut value) = (Duration::ZERO, Duration::ZERO);
        for repeat in 0..repeats {
            // A prime step, so that successive batches start at scattered keys.
            let start = repeat * 131 % (fixture.keys.len() - BATCH_BLOCKS);
            let batch = &fixture.keys[start..start + BATCH_BLOCKS];
            limit += timed(|| {
                let found: Vec<Option<Arc<usize>>> =
                    batch.iter().map(|key| held.get(key).cloned()).collect();
                drop(std::hint::black_box(found));
            });
            let mut outcomes = Vec::new();
            value += timed(|| outcomes = fixture.store.view(batch, CallOptions::default()));
            if !outcomes.iter().all(|outcome| matches!(outcome, ViewOutcome::Hit { .. })) {
                return Err(MeasureError::measure("view", "a resident block was not a hit"));
            }
            value += timed(|| drop(outcomes));
        }
        let blocks = (repeats * BATCH_BLOCKS) as f64;
        samples.0.push(limit.as_secs_f64() * 1e9 / blocks);
        samples.1.push(value.as_secs_f64() * 1e9 / blocks);
    }
    let limit = (samples.0, "std HashMap lookup, Arc clone and drop of the same keys");
    let name = "view/128KiB/batch-256".to_owned();
    bench.deliver(Figure::cost(name, "ns", samples.1, limit, Target::AtMost(200.0)))
}
