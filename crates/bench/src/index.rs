//! Millions of keys: the cost of a batched lookup, and the memory of a key.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_replay::environment::resident_bytes;
use cascade_replay::random::SplitMix64;
use cascade_store::{CallOptions, Put, PutOutcome, Request, Store, StoreConfig};

use crate::{Bench, Figure, MeasureError, Target, open, timed};

const BATCH: usize = 256;
/// Batches of one round, from which the percentiles are computed.
const BATCHES: usize = 2000;

pub(super) fn run(bench: &mut Bench<'_>) -> Result<(), MeasureError> {
    let count: u64 = if bench.is_full { 10_000_000 } else { 1_000_000 };
    let label = if bench.is_full { "10M" } else { "1M" };
    let names = ["p50", "p99", "p99-cpu"].map(|p| format!("lookup/256-of-{label}/{p}"));
    let memory = format!("memory/key/{label}");
    if !bench.wants_any(&[&names[0], &names[1], &names[2], &memory]) {
        return Ok(());
    }
    let (store, growth) = fill(count)?;
    let per_key = vec![growth as f64 / count as f64];
    let limit = (vec![32.0], "the 32 bytes of the key itself");
    bench.deliver(Figure::cost(memory, "bytes", per_key, limit, Target::AtMost(200.0)))?;

    let plain: HashMap<u64, u32, BuildHasherDefault<FingerprintHasher>> =
        (0..count).map(|id| (key(id).fingerprint(), 0)).collect();
    let mut random = SplitMix64(1);
    let mut samples: [Vec<f64>; 5] = Default::default();
    for _ in 0..bench.rounds() {
        let (mut limit, mut value, mut cpu) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..BATCHES {
            let keys: Vec<BlockKey> = (0..BATCH).map(|_| key(random.next_u64() % count)).collect();
            let (wall_ns, cpu_ns) = lookup(&store, &keys)?;
            value.push(wall_ns);
            cpu.push(cpu_ns);
            let keys: Vec<BlockKey> = (0..BATCH).map(|_| key(random.next_u64() % count)).collect();
            limit.push(per_block(timed(|| {
                let found = keys.iter().filter(|key| plain.contains_key(&key.fingerprint()));
                assert_eq!(std::hint::black_box(found.count()), BATCH, "all keys were inserted");
            })));
        }
        limit.sort_by(f64::total_cmp);
        value.sort_by(f64::total_cmp);
        cpu.sort_by(f64::total_cmp);
        let at = |sorted: &[f64], percent: usize| sorted[sorted.len() * percent / 100];
        samples[0].push(at(&limit, 50));
        samples[1].push(at(&value, 50));
        samples[2].push(at(&limit, 99));
        samples[3].push(at(&value, 99));
        samples[4].push(at(&cpu, 99));
    }
    let [limit_p50, p50, limit_p99, p99, p99_cpu] = samples;
    let text = "std HashMap with the same number of 8-byte fingerprints and keys, same percentile";
    let [name_p50, name_p99, name_cpu] = names;
    bench.deliver(Figure::cost(name_p50, "ns/key", p50, (limit_p50, text), Target::None))?;
    let limit = (limit_p99, text);
    bench.deliver(Figure::cost(name_p99, "ns/key", p99, limit.clone(), Target::AtMost(250.0)))?;
    // On a busy machine, the wall time of 1 % of the batches includes a preemption; CPU time does
    // not.
    bench.deliver(Figure::cost(name_cpu, "ns/key", p99_cpu, limit, Target::None))
}

/// A store of `count` keys without payload, and the growth of resident memory.
fn fill(count: u64) -> Result<(Store, u64), MeasureError> {
    let resident = || {
        resident_bytes()
            .ok_or_else(|| MeasureError::measure("resident memory", "no /proc/self/status"))
    };
    let config =
        StoreConfig { pipeline: "Fake".to_owned(), dram_bytes: 4 << 20, ..StoreConfig::default() };
    let store = open("lookups", config)?;
    let before = resident()?;
    let payload = [0_u8; 16];
    for first in (0..count).step_by(BATCH) {
        let ids = first..(first + BATCH as u64).min(count);
        let keys: Vec<BlockKey> = ids.map(key).collect();
        let batch: Vec<Put<'_>> = keys.iter().map(|key| Put::new(*key, &payload)).collect();
        let outcomes = store.put(&batch, CallOptions::default());
        if let Some(bad) = outcomes.iter().find(|o| !matches!(o, PutOutcome::Stored)) {
            return Err(MeasureError::measure("lookups", format!("a put returned {bad:?}")));
        }
    }
    Ok((store, resident()?.saturating_sub(before)))
}

/// Nanoseconds per key of one lookup: wall time and CPU time of this thread.
fn lookup(store: &Store, keys: &[BlockKey]) -> Result<(f64, f64), MeasureError> {
    let mut found = 0;
    let cpu_before = cpu_time();
    let took = timed(|| found = store.lookup_prefix(&Request::new(keys)).tiers.len());
    let cpu = cpu_time().saturating_sub(cpu_before);
    if found != keys.len() {
        let what = format!("only {found} of {} keys that were put are found", keys.len());
        return Err(MeasureError::measure("lookups", what));
    }
    Ok((per_block(took), per_block(cpu)))
}

/// CPU time of this thread.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

fn per_block(took: Duration) -> f64 {
    took.as_secs_f64() * 1e9 / BATCH as f64
}

/// A key that is cheap to compute and as uniform as a hash.
fn key(id: u64) -> BlockKey {
    let mut random = SplitMix64(id);
    let mut bytes = [0; 32];
    for word in bytes.as_chunks_mut::<8>().0 {
        *word = random.next_u64().to_le_bytes();
    }
    BlockKey::from_bytes(bytes)
}

/// Returns the fingerprint itself, which is already uniform.
#[derive(Debug, Default)]
struct FingerprintHasher(u64);

impl Hasher for FingerprintHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, fingerprint: u64) {
        self.0 = fingerprint;
    }
}
