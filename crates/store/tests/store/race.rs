//! Put, view, get, evict, delete and prefetch at once, with every byte checked.
//!
//! Two seconds by default; the slow gate runs 60 with `CASCADE_RACE_SECONDS=60`. A failure means
//! that a reader got wrong bytes.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use cascade_block::{BlockKey, DigestAlgorithm, DigestMode};
use cascade_runtime::SystemClock;
use cascade_store::{CallOptions, GetOutcome, Put, Store, StoreConfig, StoreError, ViewOutcome};

use crate::blocks::{StopOnDrop, bytes_of, dram, keys};
use crate::third_party::MapStage;

const BLOCK: usize = 32 << 10;
const KEYS: u64 = 600;

#[expect(clippy::disallowed_methods, reason = "how long to run is the caller's choice")]
fn seconds() -> u64 {
    std::env::var("CASCADE_RACE_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(2)
}

/// A pseudo-random generator, one for each thread.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % limit
    }
}

/// The key whose bytes a block has. With shared contents there are 64 of them.
fn content_of(key: &BlockKey, is_shared: bool) -> BlockKey {
    let group = u8::try_from(key.fingerprint() % 64).unwrap();
    if is_shared { BlockKey::from_bytes([group; 32]) } else { *key }
}

/// Lengths differ between blocks, so that slabs are split and merged continuously.
fn length_of(key: &BlockKey) -> usize {
    BLOCK + usize::try_from(key.fingerprint() % 5).unwrap() * 7000
}

fn expected_bytes(key: &BlockKey, is_shared: bool) -> Vec<u8> {
    let content = content_of(key, is_shared);
    bytes_of(&content, length_of(&content))
}

fn is_expected(error: &StoreError) -> bool {
    matches!(
        error,
        StoreError::NoRoom { .. } | StoreError::Busy { .. } | StoreError::Timeout { .. }
    )
}

fn view_some(store: &Store, keys: &[BlockKey], is_shared: bool, checked: &AtomicU64) {
    for (key, view) in keys.iter().zip(store.view(keys, CallOptions::default())) {
        match view {
            ViewOutcome::Hit { slab, tier } => {
                assert!(
                    slab.host() == Some(&expected_bytes(key, is_shared)[..]),
                    "wrong bytes from {tier}"
                );
                std::thread::yield_now();
                assert!(
                    slab.host() == Some(&expected_bytes(key, is_shared)[..]),
                    "bytes changed under a view"
                );
                checked.fetch_add(slab.len() as u64, Relaxed);
            }
            ViewOutcome::Miss => {}
            ViewOutcome::Failed(error) => assert!(is_expected(&error), "{error}"),
        }
    }
}

fn get_some(store: &Store, keys: &[BlockKey], is_shared: bool, checked: &AtomicU64) {
    let mut buffers: Vec<Vec<u8>> = keys.iter().map(|_| vec![0; BLOCK * 2]).collect();
    let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
    let outcomes = store.get(keys, &mut slices, CallOptions::default());
    for ((key, buffer), outcome) in keys.iter().zip(&buffers).zip(outcomes) {
        match outcome {
            GetOutcome::Hit { bytes, tier } => {
                assert!(buffer[..bytes] == *expected_bytes(key, is_shared), "wrong from {tier}");
                checked.fetch_add(bytes as u64, Relaxed);
            }
            GetOutcome::Miss => {}
            GetOutcome::TooShort { needed_bytes } => panic!("{needed_bytes} bytes needed"),
            GetOutcome::Failed(error) => assert!(is_expected(&error), "{error}"),
        }
    }
}

fn play(store: &Store, seed: u64, is_shared: bool, stop: &AtomicBool, checked: &AtomicU64) {
    let all = keys(0..KEYS);
    let mut random = Random(seed);
    while !stop.load(Relaxed) {
        let start = usize::try_from(random.below(KEYS - 8)).unwrap();
        let some = &all[start..start + 1 + usize::try_from(random.below(8)).unwrap()];
        match random.below(10) {
            0..4 => some.iter().for_each(|key| {
                let bytes = expected_bytes(key, is_shared);
                drop(store.put(&[Put::new(*key, &bytes)], CallOptions::default()));
            }),
            4..6 => view_some(store, some, is_shared, checked),
            6..8 => get_some(store, some, is_shared, checked),
            8 => drop(store.delete(&some[..1])),
            _ => {
                store.prefetch(some);
            }
        }
    }
}

fn race(digest: DigestMode) {
    let stage = MapStage::new();
    stage.capacity_bytes.store(12 << 20, Relaxed);
    let config = StoreConfig { pipeline: "Dram|Map".to_owned(), digest, ..dram(6) };
    let store = Store::open_with(config, &stage.registry(), Arc::new(SystemClock)).unwrap();
    let (stop, checked) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let (store, stop, checked) = (&store, &stop, &checked);
            scope.spawn(move || {
                // A panic in one player ends the others too.
                let _stopper = StopOnDrop(stop);
                play(store, seed, digest != DigestMode::Off, stop, checked);
            });
        }
        wait(Duration::from_secs(seconds()), &stop);
        stop.store(true, Relaxed);
    });
    assert!(checked.load(Relaxed) > 1 << 20, "the test read too few bytes");
    store.clear();
    store.flush(CallOptions::default()).unwrap();
    let stats = store.stats();
    assert_eq!((stats.keys, stats.contents, stats.content_bytes), (0, 0, 0));
    assert_eq!((stats.dram_blocks, stats.dram_bytes, stats.pool.requested_bytes), (0, 0, 0));
    assert_eq!(stats.stages[0].1.used_bytes, 0, "the stage is empty too");
    let counters = stats.counters;
    assert_eq!(counters.gets, counters.hits + counters.misses + counters.get_failures);
}

#[expect(clippy::disallowed_methods, reason = "the test runs for a configured time")]
fn wait(time: Duration, stop: &AtomicBool) {
    let start = std::time::Instant::now();
    while start.elapsed() < time && !stop.load(Relaxed) {
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn concurrent_readers_get_the_right_bytes() {
    race(DigestMode::Off);
}

#[test]
fn concurrent_readers_get_the_right_bytes_with_shared_contents() {
    race(DigestMode::On(DigestAlgorithm::Blake3));
}
