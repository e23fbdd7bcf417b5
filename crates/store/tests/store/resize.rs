//! Tiers change their sizes while the store is in use.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cascade_store::{
    CallOptions, FilesConfig, KeepPool, PutOutcome, Store, StoreConfig, StoreError, ViewOutcome,
};

use crate::blocks::{MIB, StopOnDrop, bytes_of, check, dram, keys, put, wait_until};
use crate::named_pool;
use crate::third_party::{flush, open};

const BLOCK: usize = 60 << 10;

fn now() -> CallOptions {
    CallOptions { timeout: Some(Duration::from_secs(20)), ..CallOptions::default() }
}

fn soon() -> CallOptions {
    CallOptions { timeout: Some(Duration::from_millis(50)), ..CallOptions::default() }
}

fn with_files(directory: &Path, files_mib: u64, config: StoreConfig) -> StoreConfig {
    let files = FilesConfig {
        capacity_bytes: files_mib * MIB,
        segment_bytes: MIB,
        ..FilesConfig::new(directory.join("files"))
    };
    StoreConfig { pipeline: "Dram|Files".to_owned(), files: Some(files), ..config }
}

/// Shared memory that the pool has.
fn allocated(store: &Store) -> u64 {
    store.region().host().unwrap().file().metadata().unwrap().blocks() * 512
}

fn capacity(store: &Store) -> u64 {
    let pool = store.stats().pool;
    let sum = pool.reserved_bytes + pool.magazine_bytes + pool.free_bytes;
    assert_eq!(sum, pool.capacity_bytes, "{pool:?}");
    pool.capacity_bytes as u64
}

fn hits(store: &Store, range: std::ops::Range<u64>) -> usize {
    check(store, &keys(range)).iter().flatten().count()
}

#[test]
fn dram_gets_smaller_and_larger_and_held_blocks_keep_their_bytes() {
    let store = Store::open(dram(32)).unwrap();
    put(&store, &keys(0..500), BLOCK);
    assert_eq!(hits(&store, 0..500), 500);
    let held: Vec<_> = store.view(&keys(0..20), CallOptions::default());
    assert_eq!(store.pin(&keys(20..40)), [true; 20]);
    let before = allocated(&store);
    assert_eq!(store.resize("dram", 8 * MIB, now()).unwrap(), 8 * MIB);
    assert_eq!(capacity(&store), 8 * MIB);
    assert_eq!(store.memory_bytes(), 8 * MIB);
    assert!(allocated(&store) + 24 * MIB <= before, "the memory goes back to the system");
    for (view, key) in held.iter().zip(keys(0..20)) {
        let ViewOutcome::Hit { slab, .. } = view else { panic!("{view:?}") };
        assert!(slab.host() == Some(&bytes_of(&key, BLOCK)[..]), "{key}");
    }
    assert_eq!(hits(&store, 0..40), 40, "what is held or pinned stays");
    let left = hits(&store, 0..500);
    assert!((100..=137).contains(&left), "no more than needed is evicted: {left}");
    drop(held);
    assert_eq!(store.resize("dram", 24 * MIB, now()).unwrap(), 24 * MIB);
    assert!(allocated(&store) >= 24 * MIB, "all is reserved");
    assert_eq!(hits(&store, 0..500), left);
    put(&store, &keys(500..1000), BLOCK);
    let most = hits(&store, 0..1000);
    assert!((350..=410).contains(&most), "{most}");
    assert_eq!(store.resize("dram", 32 * MIB, now()).unwrap(), 32 * MIB);
    let error = store.resize("dram", 33 * MIB, now()).unwrap_err();
    assert!(matches!(error, StoreError::Resize(_)), "{error}");
    let error = store.resize("dram", 3 * MIB, now()).unwrap_err().to_string();
    assert!(error.contains("the minimum is 4 MiB"), "as at the start: {error}");
    assert_eq!(capacity(&store), 32 * MIB);
    store.close().unwrap();
}

#[test]
fn blocks_in_use_keep_dram_larger_until_they_are_released() {
    let store = Store::open(dram(16)).unwrap();
    put(&store, &keys(0..200), BLOCK);
    let held = store.view(&keys(0..150), CallOptions::default());
    let reached = store.resize("dram", 4 * MIB, soon()).unwrap();
    assert!(reached > 8 * MIB && reached < 10 * MIB, "{reached}");
    assert_eq!(capacity(&store), reached);
    let refused = put(&store, &keys(300..301), 5 << 20);
    assert!(!matches!(refused[0], PutOutcome::Stored), "{refused:?}");
    drop(held);
    assert_eq!(store.resize("dram", 4 * MIB, now()).unwrap(), 4 * MIB);
    assert_eq!(capacity(&store), 4 * MIB);
    put(&store, &keys(400..500), BLOCK);
    assert!(hits(&store, 400..500) > 50);
    store.close().unwrap();
}

/// Blocks that wait to be written are written first, so that none is lost.
#[test]
fn a_smaller_dram_loses_no_block_that_the_files_have_room_for() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(with_files(directory.path(), 128, dram(16))).unwrap();
    for first in (0..600).step_by(50) {
        put(&store, &keys(first..first + 50), BLOCK);
        if first == 300 {
            assert_eq!(store.resize("dram", 4 * MIB, now()).unwrap(), 4 * MIB);
        }
    }
    assert_eq!(hits(&store, 0..600), 600);
    // As the default at the start: a quarter of DRAM.
    assert!(store.stats().pending_bytes <= 2 * MIB);
    store.close().unwrap();
}

#[test]
fn reads_and_writes_go_on_while_dram_changes_its_size() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(with_files(directory.path(), 256, dram(16))).unwrap();
    let (stop, writer) = (AtomicBool::new(false), &store);
    std::thread::scope(|scope| {
        let stop_on_drop = StopOnDrop(&stop);
        for thread in 0..2_u64 {
            let stop = &stop;
            scope.spawn(move || {
                let mut round = 0;
                while !stop.load(Ordering::Relaxed) {
                    let first = thread * 10_000 + round % 40 * 25;
                    put(writer, &keys(first..first + 25), BLOCK - 999 * usize::from(thread == 1));
                    // Compares every byte.
                    check(writer, &keys(first..first + 25));
                    check(writer, &keys(thread * 10_000..thread * 10_000 + 25));
                    round += 1;
                }
            });
        }
        for round in 0..30_u64 {
            let mib = [4, 16, 9, 12, 5][usize::try_from(round % 5).unwrap()];
            assert_eq!(store.resize("dram", mib * MIB, now()).unwrap(), mib * MIB, "{round}");
        }
        drop(stop_on_drop);
    });
    assert_eq!(capacity(&store), 5 * MIB);
    store.close().unwrap();
}

#[test]
fn a_named_pool_that_is_smaller_is_recovered_in_its_full_size() {
    let directory = named_pool::directory();
    let config =
        StoreConfig { keep_pool: KeepPool::Always, ..named_pool::config(directory.path(), 16) };
    let store = Store::open(config.clone()).unwrap();
    put(&store, &keys(0..240), BLOCK);
    assert_eq!(store.resize("dram", 6 * MIB, now()).unwrap(), 6 * MIB);
    assert!(allocated(&store) < 8 * MIB);
    let left: Vec<bool> = check(&store, &keys(0..240)).iter().map(Option::is_some).collect();
    assert!(left.iter().filter(|is_there| **is_there).count() > 80);
    store.close().unwrap();
    drop(store);
    let store = Store::open(config).unwrap();
    assert_eq!(capacity(&store), 16 * MIB, "the configuration counts again");
    assert!(allocated(&store) >= 16 * MIB, "the holes are reserved again");
    let again: Vec<bool> = check(&store, &keys(0..240)).iter().map(Option::is_some).collect();
    assert_eq!(again, left);
    put(&store, &keys(300..400), BLOCK);
    assert_eq!(hits(&store, 300..400), 100);
    store.close().unwrap();
}

#[test]
fn files_get_smaller_in_the_background_and_larger_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let config = with_files(directory.path(), 64, dram(4));
    let store = Store::open(config.clone()).unwrap();
    let files = |store: &Store| store.stats().stages[0].1.clone();
    put(&store, &keys(0..700), BLOCK);
    store.flush(CallOptions::default()).unwrap();
    assert_eq!(hits(&store, 0..700), 700);
    assert_eq!(store.resize("files", 16 * MIB, now()).unwrap(), 16 * MIB);
    assert_eq!(files(&store).capacity_bytes, 16 * MIB, "the new capacity at once");
    // Writes go on meanwhile.
    put(&store, &keys(1000..1050), BLOCK);
    store.flush(CallOptions::default()).unwrap();
    wait_until("the files fit", || files(&store).used_bytes <= 15 * MIB);
    assert!(hits(&store, 0..700) > 100, "no more is removed than needed");
    assert_eq!(hits(&store, 1000..1050), 50, "the newest stay");
    assert_eq!(store.resize("files", 64 * MIB, now()).unwrap(), 64 * MIB);
    put(&store, &keys(2000..2500), BLOCK);
    store.flush(CallOptions::default()).unwrap();
    assert_eq!(hits(&store, 2000..2500), 500);
    let error = store.resize("files", MIB / 2, now()).unwrap_err();
    let source = std::error::Error::source(&error).unwrap();
    assert!(source.source().unwrap().to_string().contains("at least 1 MiB"), "{source:?}");
    store.resize("hbm", MIB, now()).unwrap_err();
    store.close().unwrap();
    drop(store);
    // With less than the files have: the store is usable at once, and shrinks them.
    let store = Store::open(with_files(directory.path(), 8, dram(4))).unwrap();
    put(&store, &keys(3000..3020), BLOCK);
    store.flush(CallOptions::default()).unwrap();
    wait_until("the files fit", || files(&store).used_bytes <= 7 * MIB);
    assert_eq!(hits(&store, 3000..3020), 20);
    store.close().unwrap();
    drop(store);
    let store = Store::open(config).unwrap();
    assert_eq!(hits(&store, 3000..3020), 20);
    store.close().unwrap();
}

/// As a file tier whose segments are all in use: asking it in a loop would take a whole processor.
#[test]
fn a_stage_that_has_nothing_to_give_back_is_asked_again_after_a_pause() {
    let (store, stage) = open(dram(8));
    stage.gives_nothing_back.store(true, Ordering::Relaxed);
    store.resize("map", MIB, now()).unwrap();
    wait_until("the stage is asked", || stage.rooms.load(Ordering::Relaxed) > 0);
    cascade_runtime::sleep(Duration::from_millis(300));
    let rooms = stage.rooms.load(Ordering::Relaxed);
    assert!(rooms < 20, "asked {rooms} times");
    // The pause does not hold up what there is to write.
    for at in 0..20 {
        put(&store, &keys(at..at + 1), BLOCK);
        flush(&store);
    }
    assert_eq!(stage.block_count(), 20);
    stage.gives_nothing_back.store(false, Ordering::Relaxed);
    wait_until("the stage is asked again", || stage.rooms.load(Ordering::Relaxed) > rooms);
    store.close().unwrap();
}
