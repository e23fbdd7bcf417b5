//! Erasing a store: neither its memory nor its files contain earlier blocks afterwards.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use cascade_store::{
    CallOptions, FilesConfig, NotErased, PutOutcome, Store, StoreConfig, StoreError, ViewOutcome,
};

use crate::blocks::{MIB, StopOnDrop, bytes_of, check, dram, key, keys, put, wait_until};
use crate::third_party;

const BLOCK: usize = 64 << 10;

fn config(directory: &Path) -> StoreConfig {
    let files = FilesConfig {
        capacity_bytes: 64 * MIB,
        segment_bytes: 4 * MIB,
        ..FilesConfig::new(directory)
    };
    StoreConfig { pipeline: "Dram|Files".to_owned(), files: Some(files), ..dram(8) }
}

fn files_below(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] }).collect()
}

#[test]
fn every_tier_is_empty_after_an_erase_and_accepts_new_blocks() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(config(directory.path())).unwrap();
    put(&store, &keys(0..200), BLOCK);
    store.flush(CallOptions::default()).unwrap();
    let before = store.stats();
    let erased = store.erase(CallOptions::default()).unwrap();
    assert!(erased.is_complete(), "{erased:?}");
    assert_eq!(erased.tiers[0].bytes, before.dram_bytes);
    assert_eq!((erased.tiers[1].tier, erased.tiers[1].blocks), ("files", 200));
    assert!(erased.tiers[1].overwritten_bytes >= 200 * BLOCK as u64);
    assert_eq!(erased.memory.zeroed_bytes, 8 << 20);
    let stats = store.stats();
    assert_eq!((stats.keys, stats.dram_bytes, stats.pending_bytes), (0, 0, 0));
    assert_eq!(check(&store, &keys(0..200)), vec![None; 200]);
    let mut left = files_below(directory.path());
    // On a slow disk a probe may have begun.
    left.retain(|path| path.extension().is_none_or(|extension| extension != "probe"));
    assert_eq!(left.len(), 1, "only the lock file: {left:?}");
    put(&store, &keys(100..300), BLOCK);
    store.close().unwrap();
    drop(store);
    let store = Store::open(config(directory.path())).unwrap();
    let hits = check(&store, &keys(0..300));
    assert!(hits[..100].iter().all(Option::is_none), "no erased block is recovered");
    assert!(hits[100..].iter().all(Option::is_some));
}

#[test]
fn a_held_view_is_unchanged_and_reported() {
    let store = Store::open(dram(8)).unwrap();
    put(&store, &keys(0..10), BLOCK);
    let ViewOutcome::Hit { slab, .. } = store.view(&[key(3)], CallOptions::default()).remove(0)
    else {
        panic!("it was put")
    };
    // Long enough for all but what is held.
    let timeout = Some(Duration::from_secs(1));
    let erased = store.erase(CallOptions { timeout, writer: None }).unwrap();
    assert_eq!(erased.memory.held_bytes, BLOCK);
    let is_held = |left: &NotErased| left.why.contains("held");
    assert!(erased.left.iter().any(is_held), "{erased:?}");
    assert!(slab.host() == Some(&bytes_of(&key(3), BLOCK)[..]), "a view outlives an erase");
    drop(slab);
    let erased = store.erase(CallOptions::default()).unwrap();
    assert!(erased.is_complete(), "{erased:?}");
}

/// Concurrent writers and readers get refusals and misses, never old or wrong bytes.
#[test]
fn calls_during_an_erase_are_refused_and_no_erased_block_is_served() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(config(directory.path())).unwrap();
    put(&store, &keys(0..400), BLOCK);
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        for worker in 0..2 {
            let (store, is_done) = (&store, &is_done);
            scope.spawn(move || {
                let mut n = 1000 * (1 + worker);
                while !is_done.load(Ordering::Relaxed) {
                    n += 1;
                    for outcome in put(store, &keys(n..n + 1), BLOCK) {
                        let is_fine = matches!(
                            outcome,
                            PutOutcome::Stored | PutOutcome::Failed(StoreError::Erasing)
                        );
                        assert!(is_fine, "{outcome:?}");
                    }
                    check(store, &keys(n % 400..n % 400 + 4));
                }
            });
        }
        let _stopper = StopOnDrop(&is_done);
        for _ in 0..5 {
            let erased = store.erase(CallOptions::default()).unwrap();
            assert!(erased.is_complete(), "{erased:?}");
            assert_eq!(check(&store, &keys(0..400)), vec![None; 400]);
        }
    });
    assert!(store.erase(CallOptions::default()).unwrap().is_complete());
    assert_eq!(store.stats().pool.reserved_bytes, 0);
}

#[test]
fn a_stage_that_cannot_erase_is_named() {
    let (store, stage) = third_party::open(dram(8));
    put(&store, &keys(0..4), BLOCK);
    store.flush(CallOptions::default()).unwrap();
    assert_eq!(stage.block_count(), 4);
    let erased = store.erase(CallOptions::default()).unwrap();
    assert_eq!(erased.left.len(), 1);
    assert_eq!(erased.left[0].what, "tier map");
    store.flush(CallOptions::default()).unwrap();
    assert_eq!(stage.block_count(), 0, "it removed what it could not erase");
    store.close().unwrap();
    let closed = store.erase(CallOptions::default()).unwrap_err();
    assert!(matches!(closed, StoreError::Closed));
}

#[test]
fn a_stage_with_an_open_circuit_is_erased() {
    let (store, stage) = third_party::open(dram(8));
    stage.erases.store(true, Ordering::Relaxed);
    put(&store, &keys(0..4), BLOCK);
    store.flush(CallOptions::default()).unwrap();
    stage.fails.store(true, Ordering::Relaxed);
    for n in 10..12 {
        put(&store, &keys(n..n + 1), BLOCK);
        assert!(store.flush(CallOptions::default()).is_err());
    }
    third_party::wait_for(&store, 0, third_party::Circuits::BothOpen);
    assert_eq!(stage.block_count(), 4);
    let erased = store.erase(CallOptions::default()).unwrap();
    assert!(erased.is_complete(), "{erased:?}");
    assert_eq!(stage.block_count(), 0);
}

/// An erase that had timed out went on in the background and erased blocks that were stored later.
#[test]
fn an_erase_that_timed_out_erases_no_later_block() {
    let (store, stage) = third_party::open(dram(8));
    stage.erases.store(true, Ordering::Relaxed);
    put(&store, &keys(0..4), BLOCK);
    store.flush(CallOptions::default()).unwrap();
    let hang = stage.hang_erase();
    // Long enough for all but what is held.
    let timeout = Some(Duration::from_secs(1));
    let erased = store.erase(CallOptions { timeout, writer: None }).unwrap();
    assert_eq!(erased.left[0].what, "tier map", "{erased:?}");
    put(&store, &keys(10..14), BLOCK);
    let flushed = store.flush(CallOptions { timeout, writer: None });
    assert!(flushed.is_err(), "the stage does not take them");
    assert_eq!(stage.stored.load(Ordering::Relaxed), 4);
    drop(hang);
    let erased = store.erase(CallOptions::default()).unwrap();
    assert!(erased.is_complete(), "{erased:?}");
    put(&store, &keys(20..24), BLOCK);
    store.flush(CallOptions::default()).unwrap();
    assert_eq!(stage.block_count(), 4);
}

/// A write that had timed out was counted as finished, although it still wrote its bytes.
#[test]
fn an_erase_waits_for_a_write_in_flight_or_reports_it() {
    // Long enough for all but what hangs.
    let timeout = Duration::from_secs(1);
    let (store, stage) = third_party::open(StoreConfig { timeout, ..dram(8) });
    stage.erases.store(true, Ordering::Relaxed);
    let hang = stage.hang();
    put(&store, &keys(0..4), BLOCK);
    assert!(store.flush(CallOptions::default()).is_err());
    third_party::wait_for_stuck(&store, 0);
    let erased = store.erase(CallOptions::default()).unwrap();
    assert!(erased.left[0].why.contains("not come back"), "{erased:?}");
    drop(hang);
    let timeout = Some(Duration::from_secs(60));
    let erased = store.erase(CallOptions { timeout, writer: None }).unwrap();
    assert!(erased.is_complete(), "{erased:?}");
    assert_eq!(stage.block_count(), 0);
}

/// The erase had cancelled the removal of a deleted block. The flush returned success, and after a
/// kill before the end of the erase the block was back.
#[test]
fn a_flush_waits_for_an_erase_that_has_cancelled_removals() {
    let (store, stage) = third_party::open(dram(8));
    stage.erases.store(true, Ordering::Relaxed);
    put(&store, &keys(0..4), BLOCK);
    store.flush(CallOptions::default()).unwrap();
    let stores = stage.hold_stores();
    put(&store, &keys(4..5), BLOCK);
    stores.wait_until_reached();
    assert_eq!(store.delete(&keys(0..1)), [true]);
    let erase = stage.hang_erase();
    thread::scope(|scope| {
        let eraser = scope.spawn(|| store.erase(CallOptions::default()).unwrap());
        wait_until("the erase has begun", || {
            let outcome = put(&store, &keys(9..10), BLOCK).remove(0);
            matches!(outcome, PutOutcome::Failed(StoreError::Erasing))
        });
        drop(stores);
        erase.wait_until_reached();
        let timeout = Some(Duration::from_millis(100));
        let flushed = store.flush(CallOptions { timeout, writer: None });
        assert!(matches!(flushed, Err(StoreError::Timeout { .. })), "{flushed:?}");
        assert!(stage.block_count() >= 4, "the stage still has the deleted block");
        let flusher = scope.spawn(|| store.flush(CallOptions::default()).unwrap());
        drop(erase);
        assert!(eraser.join().unwrap().is_complete());
        flusher.join().unwrap();
    });
    assert_eq!(stage.block_count(), 0);
}
