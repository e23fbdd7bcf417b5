//! A follower of a store's changes has the exact set of its blocks, whatever happens to them.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]
#![expect(clippy::print_stdout, reason = "prints which failures are injected")]

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use cascade_block::{BlockKey, DigestAlgorithm, DigestMode};
use cascade_runtime::{Clock, Deadline, ManualClock, SystemClock};
use cascade_store::{
    CallOptions, Change, ChangeCursor, Changes, FilesConfig, Put, Store, StoreConfig, StoreError,
    WritePolicy,
};
use proptest::prelude::*;

use crate::blocks::{MIB, StopOnDrop, bytes_of, check, dram, key, keys, put};
use crate::third_party::{Circuits, MapStage, flush, pass_until, wait_for};

const KEYS: u64 = 40;

/// A subscriber: a set of blocks that is updated from the change log.
#[derive(Default)]
struct Follower {
    blocks: BTreeSet<BlockKey>,
    cursor: Option<ChangeCursor>,
    resets: usize,
}

impl Follower {
    fn apply(&mut self, read: &Changes) {
        if read.is_lost {
            self.blocks.clear();
            self.resets += 1;
        }
        for change in &read.changes {
            match change {
                Change::Stored(key) => drop(self.blocks.insert(*key)),
                Change::Removed(key) => drop(self.blocks.remove(key)),
                Change::Cleared => self.blocks.clear(),
            }
        }
        self.cursor = Some(read.next);
    }

    fn step(&mut self, store: &Store, max: usize) -> Changes {
        let read = store.changes(self.cursor, max).unwrap();
        assert!(read.changes.len() <= max, "{} of {max}", read.changes.len());
        self.apply(&read);
        read
    }

    /// Reads all changes. Returns whether there were any.
    fn follow(&mut self, store: &Store, max: usize) -> bool {
        let mut has_changed = false;
        loop {
            let read = self.step(store, max);
            has_changed |= read.is_lost || !read.changes.is_empty();
            if read.is_current {
                return has_changed;
            }
        }
    }

    /// Compares with the store at a moment without changes between two reads.
    fn compare(&mut self, store: &Store, all: &[BlockKey], max: usize) {
        let limit = Deadline::after(&SystemClock, Duration::from_secs(60));
        loop {
            self.follow(store, max);
            let is_here = store.contains(all);
            if !self.follow(store, max) {
                let here = all.iter().zip(is_here).filter(|(_, is_here)| *is_here);
                let here: BTreeSet<BlockKey> = here.map(|(key, _)| *key).collect();
                assert_eq!(self.blocks, here);
                return;
            }
            assert!(!limit.has_passed(&SystemClock), "the store keeps changing");
        }
    }
}

#[derive(Debug, Clone)]
enum Operation {
    /// Key, which bytes, length, milliseconds to live.
    Put(u64, u64, usize, Option<u64>),
    View(u64),
    Delete(u64),
    Pin(u64),
    Clear,
    Erase,
    Flush,
    /// Milliseconds of time that pass.
    Pass(u64),
    /// The lower tier damages its blocks, or no longer does.
    Damage,
    /// The lower tier loses its blocks.
    Lose,
    Restart,
    /// A follower reads at most this many changes.
    Step(usize),
    /// A follower reads all changes and compares its blocks with the store's.
    Compare,
}

fn operation() -> impl Strategy<Value = Operation> {
    let length = prop::sample::select(vec![1usize, 4096, 70_000, 300_000]);
    let ttl = prop::option::weighted(0.3, 1u64..100);
    prop_oneof![
        12 => (0..KEYS, 0u64..30, length, ttl)
            .prop_map(|(k, b, l, t)| Operation::Put(k, b, l, t)),
        6 => (0..KEYS).prop_map(Operation::View),
        3 => (0..KEYS).prop_map(Operation::Delete),
        1 => (0..KEYS).prop_map(Operation::Pin),
        1 => Just(Operation::Clear),
        1 => Just(Operation::Erase),
        1 => Just(Operation::Flush),
        2 => (1u64..60).prop_map(Operation::Pass),
        1 => Just(Operation::Damage),
        1 => Just(Operation::Lose),
        1 => Just(Operation::Restart),
        3 => (1usize..6).prop_map(Operation::Step),
        2 => Just(Operation::Compare),
    ]
}

/// A store and the lower tier, which outlives it.
struct Scenario {
    config: StoreConfig,
    stage: Arc<MapStage>,
    clock: Arc<ManualClock>,
    store: Option<Store>,
    /// One reads a few changes at a time, the other reads rarely.
    followers: [Follower; 2],
}

impl Scenario {
    fn new(config: StoreConfig) -> Self {
        let (stage, clock) = (MapStage::new(), Arc::new(ManualClock::default()));
        stage.capacity_bytes.store(2 << 20, Relaxed);
        stage.erases.store(true, Relaxed);
        clock.advance(Duration::from_secs(1));
        let followers = Default::default();
        let mut scenario = Self { config, stage, clock, store: None, followers };
        scenario.open();
        scenario
    }

    fn open(&mut self) {
        self.store = None;
        let (registry, clock) = (self.stage.registry(), Arc::clone(&self.clock) as _);
        self.store = Some(Store::open_with(self.config.clone(), &registry, clock).unwrap());
    }

    fn store(&self) -> &Store {
        self.store.as_ref().unwrap()
    }

    fn play(&mut self, operation: &Operation) {
        let store = self.store.clone().unwrap();
        match *operation {
            Operation::Put(n, number, length, ttl_ms) => {
                let bytes = bytes_of(&key(1_000_000 + number), length);
                let block = Put { ttl_ms, ..Put::new(key(n), &bytes) };
                store.put(&[block], CallOptions::default());
            }
            Operation::View(n) => drop(store.view(&[key(n)], CallOptions::default())),
            Operation::Delete(n) => drop(store.delete(&[key(n)])),
            Operation::Pin(n) => drop(store.pin(&[key(n)])),
            Operation::Clear => store.clear(),
            Operation::Erase => drop(store.erase(CallOptions::default()).unwrap()),
            // Write failures are not checked here.
            Operation::Flush => drop(store.flush(CallOptions::default())),
            Operation::Pass(ms) => self.clock.advance(Duration::from_millis(ms)),
            Operation::Damage => {
                let is_damaged = self.stage.damages.load(Relaxed);
                self.stage.damages.store(!is_damaged, Relaxed);
                if let Some(files) = &self.config.files {
                    flip_bytes(&files.directory);
                }
            }
            Operation::Lose => self.stage.lose_everything(),
            Operation::Restart => {
                drop(store);
                self.open();
            }
            Operation::Step(max) => drop(self.followers[0].step(&store, max)),
            Operation::Compare => self.followers[0].compare(&store, &keys(0..KEYS), 7),
        }
    }

    fn play_all(&mut self, operations: &[Operation]) {
        for operation in operations {
            self.play(operation);
        }
        let store = self.store().clone();
        for (follower, max) in self.followers.iter_mut().zip([3, 1 << 20]) {
            follower.compare(&store, &keys(0..KEYS), max);
        }
        Follower::default().compare(&store, &keys(0..KEYS), 1);
    }
}

/// Flips a bit every 200,000 bytes of every file below a directory.
fn flip_bytes(directory: &Path) {
    for entry in std::fs::read_dir(directory).unwrap().map(Result::unwrap) {
        if entry.file_type().unwrap().is_dir() {
            flip_bytes(&entry.path());
            continue;
        }
        let open = std::fs::OpenOptions::new().read(true).write(true).open(entry.path());
        // The store may remove a file meanwhile.
        let Ok(file) = open else { continue };
        let length = file.metadata().unwrap().len();
        for at in (8192..length).step_by(200_000) {
            let mut byte = [0];
            if file.read_exact_at(&mut byte, at).is_ok() {
                file.write_all_at(&[byte[0] ^ 1], at).unwrap();
            }
        }
    }
}

fn digest() -> impl Strategy<Value = DigestMode> {
    prop_oneof![Just(DigestMode::Off), Just(DigestMode::On(DigestAlgorithm::Blake3))]
}

/// Capacity of the log: almost nothing, less than the changes, all changes.
fn changes_max() -> impl Strategy<Value = usize> {
    prop::sample::select(vec![1usize, 2, 20, 1 << 20])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_follower_matches_a_store_with_one_small_tier(
        operations in prop::collection::vec(operation(), 1..120),
        digest in digest(),
        changes_max in changes_max(),
    ) {
        let config = StoreConfig { digest, changes_max, dram_blocks: Some(12), ..dram(4) };
        let mut scenario = Scenario::new(config);
        scenario.play_all(&operations);
    }

    #[test]
    fn a_follower_matches_a_store_with_two_tiers(
        operations in prop::collection::vec(operation(), 1..120),
        digest in digest(),
        changes_max in changes_max(),
        is_without_dram in any::<bool>(),
        is_through in any::<bool>(),
    ) {
        let pipeline = if is_without_dram { "Map" } else { "Dram|Map" };
        let write = if is_through { WritePolicy::Through } else { WritePolicy::Back };
        let pipeline = pipeline.to_owned();
        let config =
            StoreConfig { pipeline, digest, changes_max, write, dram_blocks: Some(4), ..dram(4) };
        let mut scenario = Scenario::new(config);
        scenario.play_all(&operations);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn a_follower_matches_a_store_with_a_file_tier(
        operations in prop::collection::vec(operation(), 1..80),
        digest in digest(),
        changes_max in changes_max(),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let files = FilesConfig {
            capacity_bytes: 4 * MIB, segment_bytes: MIB, ..FilesConfig::new(directory.path())
        };
        let (pipeline, files) = ("Dram|Files".to_owned(), Some(files));
        let config =
            StoreConfig { pipeline, files, digest, changes_max, dram_blocks: Some(4), ..dram(4) };
        let mut scenario = Scenario::new(config);
        scenario.play_all(&operations);
    }
}

#[test]
fn changes_are_reported_in_order() {
    let store = Store::open(dram(8)).unwrap();
    put(&store, &keys(0..2), 100);
    let mut follower = Follower::default();
    let read = follower.step(&store, 100);
    assert!(read.is_current && !read.is_lost, "{read:?}");
    assert_eq!(follower.blocks, keys(0..2).into_iter().collect());
    put(&store, &keys(2..3), 100);
    store.delete(&keys(0..1));
    put(&store, &keys(0..1), 100);
    store.clear();
    put(&store, &keys(5..6), 100);
    let read = follower.step(&store, 100);
    let expected = [
        Change::Stored(key(2)),
        Change::Removed(key(0)),
        Change::Stored(key(0)),
        Change::Cleared,
        Change::Stored(key(5)),
    ];
    assert_eq!((read.changes.as_slice(), read.is_current), (&expected[..], true));
    let read = follower.step(&store, 100);
    assert_eq!((read.changes.len(), read.is_current), (0, true));
    let kept = ChangeCursor::from_bytes(read.next.to_bytes());
    assert_eq!(kept, read.next);
    store.close().unwrap();
    assert!(matches!(store.changes(Some(kept), 1), Err(StoreError::Closed)));
}

#[test]
fn expired_blocks_are_reported_to_followers() {
    let clock = Arc::new(ManualClock::default());
    let registry = cascade_store::stages::StageRegistry::default();
    let store = Store::open_with(dram(8), &registry, Arc::clone(&clock) as Arc<dyn Clock>);
    let store = store.unwrap();
    let mut follower = Follower::default();
    for begins_first in [true, false] {
        if begins_first {
            follower.follow(&store, 10);
        }
        let put = |n, ttl_ms| {
            let block = Put { ttl_ms: Some(ttl_ms), ..Put::new(key(n), b"short-lived") };
            store.put(&[block], CallOptions::default());
        };
        put(1, 10);
        put(2, 1000);
        put(3, 10);
        if !begins_first {
            follower = Follower::default();
        }
        follower.compare(&store, &keys(0..9), 10);
        assert_eq!(follower.blocks.len(), 3);
        clock.advance(Duration::from_millis(10));
        follower.compare(&store, &keys(0..9), 1);
        assert_eq!(follower.blocks, keys(2..3).into_iter().collect());
        assert_eq!(store.stats().keys, 1, "no other call has accessed them");
        store.clear();
    }
}

#[test]
fn a_store_without_followers_keeps_no_changes() {
    /// Seeds of hash tables differ, so that the catalogs do, a little.
    const OTHERWISE_MAX: u64 = 1500;
    let config = StoreConfig { changes_max: 100, ..dram(8) };
    // The same calls without a follower: the catalog without a log.
    let [store, other] = [config.clone(), config].map(|config| Store::open(config).unwrap());
    let log_bytes = || store.stats().catalog_bytes.abs_diff(other.stats().catalog_bytes);
    put(&store, &keys(0..300), 100);
    put(&other, &keys(0..300), 100);
    assert!(log_bytes() < OTHERWISE_MAX, "{} bytes", log_bytes());
    let mut follower = Follower::default();
    follower.follow(&store, 1000);
    store.delete(&keys(0..99));
    other.delete(&keys(0..99));
    let followed = log_bytes();
    assert!(followed + OTHERWISE_MAX >= 99 * 33, "{followed}");
    assert!(follower.follow(&store, 1000), "within the capacity of the log");
    assert_eq!(follower.resets, 0);
    store.delete(&keys(99..250));
    other.delete(&keys(99..250));
    assert!(log_bytes() < OTHERWISE_MAX, "the log has ended: {} bytes", log_bytes());
    follower.compare(&store, &keys(0..300), 1000);
    assert_eq!((follower.resets, follower.blocks.len()), (1, 50));
    let none = Store::open(StoreConfig { changes_max: 0, ..dram(4) }).unwrap();
    let refused = none.changes(None, 1).unwrap_err();
    assert!(matches!(refused, StoreError::Config { setting: "changes_max", .. }), "{refused}");
}

#[test]
fn an_invalid_cursor_resets_its_follower() {
    let store = Store::open(dram(8)).unwrap();
    put(&store, &keys(0..3), 100);
    let mut follower = Follower::default();
    follower.follow(&store, 10);
    let valid = follower.cursor.unwrap().to_bytes();
    for at in 0..ChangeCursor::BYTES {
        for bit in 0..8 {
            let mut bytes = valid;
            bytes[at] ^= 1 << bit;
            follower.cursor = Some(ChangeCursor::from_bytes(bytes));
            follower.compare(&store, &keys(0..9), 10);
        }
    }
}

/// Blocks that only a stage with an open circuit has are removed for followers until it closes.
#[test]
fn blocks_behind_an_open_circuit_are_removed_for_followers() {
    let (stage, clock) = (MapStage::new(), Arc::new(ManualClock::default()));
    let config = StoreConfig {
        pipeline: "Dram|Map".to_owned(),
        digest: DigestMode::On(DigestAlgorithm::Blake3),
        ..dram(4)
    };
    let store = Store::open_with(config, &stage.registry(), Arc::clone(&clock) as _).unwrap();
    let (all, length) = (keys(0..200), 64 << 10);
    let mut follower = Follower::default();
    put(&store, &keys(0..120), length);
    flush(&store);
    follower.compare(&store, &all, 50);
    assert_eq!(follower.blocks.len(), 120);
    println!("the stage fails");
    stage.fails.store(true, Relaxed);
    pass_until(&store, &clock, Circuits::BothOpen);
    follower.compare(&store, &all, 50);
    let in_memory = follower.blocks.len();
    assert!((1..120).contains(&in_memory), "{in_memory}");
    assert_eq!(follower.resets, 1, "many changes at once");
    // Some blocks of the stage are put again, and evict others from DRAM.
    put(&store, &keys(0..20), length);
    follower.compare(&store, &all, 50);
    put(&store, &keys(120..150), length);
    follower.compare(&store, &all, 50);
    assert_eq!(follower.resets, 1, "changes meanwhile are reported one by one");
    stage.fails.store(false, Relaxed);
    pass_until(&store, &clock, Circuits::BothClosed);
    follower.compare(&store, &all, 50);
    assert!(follower.blocks.len() >= 120, "{}", follower.blocks.len());
    assert!(check(&store, &keys(30..60)).iter().all(Option::is_some));
    follower.compare(&store, &all, 50);
}

/// Concurrent writers, readers and deleters with two followers: one reads continuously, one rarely.
#[test]
fn followers_of_a_busy_store_match_it_once_it_is_idle() {
    const RACE_KEYS: u64 = 600;
    let stage = MapStage::new();
    stage.capacity_bytes.store(8 << 20, Relaxed);
    let config = StoreConfig {
        pipeline: "Dram|Map".to_owned(),
        digest: DigestMode::On(DigestAlgorithm::Blake3),
        changes_max: 3000,
        ..dram(4)
    };
    let store = Store::open_with(config, &stage.registry(), Arc::new(SystemClock)).unwrap();
    let all = keys(0..RACE_KEYS);
    let (is_over, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let [mut close, mut rare] = [Follower::default(), Follower::default()];
    std::thread::scope(|scope| {
        for worker in 0..4u64 {
            let (store, all, rounds, is_over) = (&store, &all, &rounds, &is_over);
            scope.spawn(move || {
                let mut seed = worker + 1;
                let mut roll = |sides: u64| {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    usize::try_from((seed >> 33) % sides).unwrap()
                };
                while !is_over.load(Relaxed) {
                    let key = all[roll(RACE_KEYS)];
                    match roll(20) {
                        0..10 => {
                            let bytes = bytes_of(&all[roll(64)], 20_000);
                            let ttl_ms = (roll(10) == 0).then_some(5);
                            let block = Put { ttl_ms, ..Put::new(key, &bytes) };
                            store.put(&[block], CallOptions::default());
                        }
                        10..15 => drop(store.view(&[key], CallOptions::default())),
                        15..19 => drop(store.delete(&[key])),
                        _ if roll(50) == 0 => store.clear(),
                        _ => drop(store.prefetch(&[key])),
                    }
                    rounds.fetch_add(1, Relaxed);
                }
            });
        }
        let _stopper = StopOnDrop(&is_over);
        let limit = Deadline::after(&SystemClock, Duration::from_secs(2));
        while !limit.has_passed(&SystemClock) {
            close.step(&store, 100);
            if rounds.load(Relaxed) % 7 == 0 {
                rare.step(&store, 10);
            }
        }
    });
    flush(&store);
    close.compare(&store, &all, 100);
    rare.compare(&store, &all, 100);
    println!("{rounds:?} rounds; reset {} and {} times", close.resets, rare.resets);
    assert!(rounds.load(Relaxed) > 100, "{rounds:?}");
    wait_for(&store, 0, Circuits::BothClosed);
}
