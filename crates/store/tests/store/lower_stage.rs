//! Two tiers: demotion, promotion, back-pressure, deadlines and failures of the stage below.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use cascade_block::{DigestAlgorithm, DigestMode};
use cascade_runtime::SystemClock;
use cascade_store::{
    CallOptions, Put, PutOutcome, PutSlab, Store, StoreConfig, StoreError, ViewOutcome, WritePolicy,
};

use crate::blocks::{MIB, bytes_of, check, dram, key, keys, put, wait_until};
use crate::third_party::{
    Circuits, MapStage, flush, frequent_probes, open, wait_for, wait_for_stuck,
};

const BLOCK: usize = 64 << 10;

#[test]
fn blocks_evicted_from_dram_are_read_from_the_lower_stage_and_promoted() {
    let (store, stage) = open(dram(4));
    put(&store, &keys(0..256), BLOCK);
    flush(&store);
    assert_eq!(store.stats().counters.lost_blocks, 0);
    assert_eq!(check(&store, &keys(0..1)), [Some("map")]);
    assert_eq!(check(&store, &keys(0..1)), [Some("dram")]);
    assert_eq!(store.locate(&keys(0..1)), [vec!["dram", "map"]]);
    let all = check(&store, &keys(0..256));
    assert!(all.iter().all(Option::is_some));
    assert!(store.stats().dram_bytes <= 4 * MIB);
    assert_eq!(stage.stored.load(Relaxed), 256, "nothing is written twice");
    let stats = store.stats();
    let by_tier: u64 = stats.hits_by_tier.iter().map(|hits| hits.blocks).sum();
    assert_eq!(by_tier, stats.counters.hits);
    assert_eq!(stats.counters.gets, stats.counters.hits + stats.counters.misses);
}

#[test]
fn a_write_through_put_has_written_to_the_lower_stage_when_it_returns() {
    let (store, stage) = open(StoreConfig { write: WritePolicy::Through, ..dram(4) });
    put(&store, &keys(0..8), BLOCK);
    assert_eq!(stage.stored.load(Relaxed), 8);
    stage.fails.store(true, Relaxed);
    let outcomes = put(&store, &keys(8..9), BLOCK);
    assert!(matches!(outcomes[0], PutOutcome::Failed(StoreError::Tier { tier: "map", .. })));
    // The block is in DRAM: a failed write to the lower stage does not invalidate it.
    assert_eq!(check(&store, &keys(8..9)), [Some("dram")]);
}

#[test]
fn a_slow_stage_delays_puts_and_drops_no_blocks() {
    let (store, stage) = open(StoreConfig { dirty_bytes_max: Some(MIB), ..dram(4) });
    stage.delay_ms.store(20, Relaxed);
    for at in 0..32 {
        let outcomes = put(&store, &keys(at * 8..at * 8 + 8), BLOCK);
        assert!(outcomes.iter().all(|o| matches!(o, PutOutcome::Stored)), "{outcomes:?}");
        let pending = store.stats().pending_bytes;
        assert!(pending <= MIB + (BLOCK as u64) * 64, "{pending} bytes pending");
    }
    flush(&store);
    assert_eq!(stage.stored.load(Relaxed), 256);
    assert!(check(&store, &keys(0..256)).iter().all(Option::is_some));
}

#[test]
fn puts_behind_a_hung_stage_fail_with_busy_by_their_deadline() {
    let (store, stage) = open(StoreConfig { dirty_bytes_max: Some(MIB), ..dram(4) });
    let held = stage.hang();
    put(&store, &keys(0..16), BLOCK);
    let bytes = bytes_of(&key(99), BLOCK);
    let options = CallOptions { timeout: Some(Duration::from_millis(500)), writer: None };
    let outcome = store.put(&[Put::new(key(99), &bytes)], options).pop().unwrap();
    let PutOutcome::Failed(StoreError::Busy { tier: "map", pending_bytes }) = outcome else {
        panic!("{outcome:?}")
    };
    assert_eq!(pending_bytes, MIB);
    assert_eq!(check(&store, &keys(99..100)), [None]);
    drop(held);
}

#[test]
fn behind_a_hung_stage_reserved_blocks_are_put_at_once_and_new_slabs_are_refused() {
    let (store, stage) = open(StoreConfig { dirty_bytes_max: Some(MIB), ..dram(4) });
    let slab = store.reserve(BLOCK, CallOptions::default()).unwrap();
    let held = stage.hang();
    put(&store, &keys(0..16), BLOCK);
    let at_once = CallOptions { timeout: Some(Duration::ZERO), writer: None };
    let new = vec![PutSlab::new(key(99), slab)];
    let refuse = || panic!("a new block waits for no tier");
    let outcome = store.put_slabs_with(new, CallOptions::default(), refuse).remove(0);
    assert!(matches!(outcome, PutOutcome::Stored), "{outcome:?}");
    let refused = store.reserve(BLOCK, at_once);
    assert!(matches!(refused, Err(StoreError::Busy { .. })), "{refused:?}");
    drop(held);
}

#[test]
fn a_slow_read_times_out_and_the_block_is_kept() {
    let (store, stage) = open(dram(4));
    put(&store, &keys(0..256), BLOCK);
    flush(&store);
    let held = stage.hold_loads();
    let options = CallOptions { timeout: Some(Duration::from_millis(200)), writer: None };
    let view = store.view(&keys(0..1), options).pop().unwrap();
    assert!(matches!(view, ViewOutcome::Failed(StoreError::Timeout { .. })), "{view:?}");
    drop(held);
    assert_eq!(check(&store, &keys(0..1)), [Some("map")]);
}

#[test]
fn a_failing_stage_affects_only_its_own_blocks() {
    let (store, stage) = open(StoreConfig { health: frequent_probes(), ..dram(4) });
    put(&store, &keys(0..256), BLOCK);
    flush(&store);
    stage.fails.store(true, Relaxed);
    let view = store.view(&keys(0..1), CallOptions::default()).pop().unwrap();
    assert!(matches!(view, ViewOutcome::Failed(StoreError::Tier { tier: "map", .. })), "{view:?}");
    assert_eq!(check(&store, &keys(255..256)), [Some("dram")]);
    // Blocks that cannot be written are served from DRAM until they are evicted.
    let outcomes = put(&store, &keys(300..304), BLOCK);
    assert!(outcomes.iter().all(|o| matches!(o, PutOutcome::Stored)));
    assert!(check(&store, &keys(300..304)).iter().all(|tier| *tier == Some("dram")));
    let error = store.flush(CallOptions::default()).unwrap_err();
    assert!(matches!(error, StoreError::Tier { tier: "map", .. }), "blocks are missing: {error}");
    // A probe that began before could fail later, and open the circuit after the next flush.
    wait_for(&store, 0, Circuits::BothOpen);
    stage.fails.store(false, Relaxed);
    wait_for(&store, 0, Circuits::BothClosed);
    store.flush(CallOptions::default()).expect("reported once");
    assert_eq!(check(&store, &keys(0..1)), [Some("map")]);
}

/// One caller's flush hid write failures from all other callers.
#[test]
fn write_failures_are_reported_once_to_every_flush_mark() {
    let (store, stage) = open(StoreConfig { health: frequent_probes(), ..dram(4) });
    let mut marks = [store.flush_mark(), store.flush_mark()];
    stage.fails.store(true, Relaxed);
    put(&store, &keys(0..4), BLOCK);
    wait_for(&store, 0, Circuits::BothOpen);
    let mut before_the_first_report = store.flush_mark();
    store.flush(CallOptions::default()).unwrap_err();
    stage.fails.store(false, Relaxed);
    wait_for(&store, 0, Circuits::BothClosed);
    for mark in marks.iter_mut().chain([&mut before_the_first_report]) {
        let error = store.flush_since(mark, CallOptions::default()).unwrap_err();
        assert!(matches!(error, StoreError::Tier { tier: "map", .. }), "{error}");
        store.flush_since(mark, CallOptions::default()).expect("reported once");
    }
    store
        .flush_since(&mut store.flush_mark(), CallOptions::default())
        .expect("marked after the failure");
}

/// The next flush of another client succeeded, although the failed sync may have lost its blocks.
#[test]
fn a_failed_sync_fails_the_next_flush_of_every_caller() {
    let (store, stage) = open(dram(4));
    let mut marks = [store.flush_mark(), store.flush_mark(), store.flush_mark()];
    put(&store, &keys(0..4), BLOCK);
    flush(&store);
    stage.fails_flush.store(true, Relaxed);
    for mark in &mut marks {
        let error = store.flush_since(mark, CallOptions::default()).unwrap_err();
        assert!(matches!(error, StoreError::Tier { tier: "map", .. }), "{error}");
    }
    for mark in &mut marks {
        store.flush_since(mark, CallOptions::default()).expect("reported once");
    }
    flush(&store);
}

/// The error of a flush that failed after its deadline was thrown away, and the next one succeeded.
#[test]
fn a_sync_that_fails_late_fails_the_next_flush() {
    let (store, stage) = open(dram(4));
    put(&store, &keys(0..4), BLOCK);
    flush(&store);
    let hung = stage.hang();
    let short = CallOptions { timeout: Some(Duration::from_millis(10)), ..CallOptions::default() };
    store.flush(short).unwrap_err();
    wait_for_stuck(&store, 0);
    stage.fails_flush.store(true, Relaxed);
    drop(hung);
    wait_until("the late flush fails", || !stage.fails_flush.load(Relaxed));
    // Its result is known a moment later.
    wait_until("a flush reports it", || store.flush(CallOptions::default()).is_err());
    flush(&store);
}

/// The simulator expected one flush to report both.
#[test]
fn a_flush_that_a_stage_fails_leaves_failed_writes_to_the_next() {
    let (store, stage) = open(StoreConfig { health: frequent_probes(), ..dram(4) });
    stage.fails.store(true, Relaxed);
    put(&store, &keys(0..4), BLOCK);
    wait_for(&store, 0, Circuits::BothOpen);
    stage.fails.store(false, Relaxed);
    wait_for(&store, 0, Circuits::BothClosed);
    stage.fails_flush.store(true, Relaxed);
    for expected in ["flush", "store some blocks"] {
        let error = store.flush(CallOptions::default()).unwrap_err();
        let StoreError::Tier { operation, .. } = error else { panic!("{error}") };
        assert_eq!(operation, expected);
    }
    flush(&store);
}

/// A node ended with an error about write failures that its clients had already got.
#[test]
fn close_does_not_report_a_write_failure_that_was_reported_before() {
    let (store, stage) = open(StoreConfig { health: frequent_probes(), ..dram(4) });
    let mut mark = store.flush_mark();
    stage.fails.store(true, Relaxed);
    put(&store, &keys(0..4), BLOCK);
    store.flush_since(&mut mark, CallOptions::default()).unwrap_err();
    // A probe that began before could fail later: `close` would report the open circuit.
    wait_for(&store, 0, Circuits::BothOpen);
    stage.fails.store(false, Relaxed);
    wait_for(&store, 0, Circuits::BothClosed);
    store.close().unwrap();
}

#[test]
fn concurrent_flushes_all_report_a_write_failure() {
    let (store, stage) = open(StoreConfig { health: frequent_probes(), ..dram(4) });
    stage.fails.store(true, Relaxed);
    stage.delay_ms.store(300, Relaxed);
    put(&store, &keys(0..4), BLOCK);
    let failed = std::thread::scope(|scope| {
        let flushes: Vec<_> =
            (0..2).map(|_| scope.spawn(|| store.flush(CallOptions::default()))).collect();
        flushes.into_iter().map(|flush| flush.join().unwrap().is_err()).collect::<Vec<_>>()
    });
    assert_eq!(failed, [true, true]);
}

#[test]
fn a_damaged_block_is_a_miss_and_counted_once() {
    let (store, stage) = open(dram(4));
    put(&store, &keys(0..256), BLOCK);
    flush(&store);
    stage.damages.store(true, Relaxed);
    assert_eq!(check(&store, &keys(0..1)), [None]);
    assert_eq!(check(&store, &keys(0..1)), [None]);
    stage.damages.store(false, Relaxed);
    assert_eq!(check(&store, &keys(0..1)), [None], "a damaged copy is not read again");
    assert_eq!(store.stats().counters.damaged_blocks, 1);
    put(&store, &keys(0..1), BLOCK);
    assert_eq!(check(&store, &keys(0..1)), [Some("dram")]);
}

#[test]
fn a_full_stage_reclaims_its_oldest_blocks() {
    let (store, stage) = open(dram(4));
    stage.capacity_bytes.store(8 * MIB, Relaxed);
    put(&store, &keys(0..100), BLOCK);
    flush(&store);
    assert_eq!(check(&store, &keys(0..1)), [Some("map")]);
    for at in 1..4 {
        put(&store, &keys(at * 100..at * 100 + 50), BLOCK);
        flush(&store);
    }
    let used = store.stats().stages[0].1.used_bytes;
    assert!(used <= 8 * MIB, "{used}");
    assert_eq!(check(&store, &keys(0..1)).len(), 1);
    assert_eq!(check(&store, &keys(1..2)), [None], "it was never read");
    assert!(store.stats().counters.reclaimed_blocks > 0);
    // The catalog matches the stage's remaining blocks.
    let all = keys(0..400);
    let located = store.locate(&all);
    let served = check(&store, &all);
    for (tiers, tier) in located.iter().zip(served) {
        assert_eq!(tiers.is_empty(), tier.is_none());
    }
}

#[test]
fn blocks_that_do_not_fit_together_do_not_keep_their_stage_busy() {
    let (store, stage) = open(dram(4));
    let held = stage.hold_stores();
    put(&store, &keys(0..1), 500);
    held.wait_until_reached();
    // The next batch has both of these, and there is room for either one.
    put(&store, &keys(1..2), 4096);
    put(&store, &keys(2..3), 300_000);
    stage.capacity_bytes.store(300_000, Relaxed);
    drop(held);
    store.flush(CallOptions::default()).expect_err("one of them is not stored");
    let stored = stage.stored.load(Relaxed);
    assert!(stored < 20, "three blocks were stored {stored} times");
    assert!(check(&store, &keys(1..3)).iter().all(Option::is_some));
}

#[test]
fn concurrent_readers_of_one_block_share_one_read() {
    let (store, stage) = open(dram(4));
    put(&store, &keys(0..256), BLOCK);
    flush(&store);
    stage.delay_ms.store(50, Relaxed);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| assert!(check(&store, &keys(0..1))[0].is_some()));
        }
    });
    assert_eq!(stage.loads.load(Relaxed), 1);
}

#[test]
fn a_prefetched_block_is_a_hit_in_dram() {
    let (store, stage) = open(dram(4));
    put(&store, &keys(0..256), BLOCK);
    flush(&store);
    assert_eq!(store.prefetch(&keys(0..16)), 16);
    assert_eq!(store.prefetch(&keys(250..256)), 0, "they are in DRAM already");
    wait_until("16 are prefetched", || store.stats().counters.prefetched_blocks >= 16);
    assert_eq!(check(&store, &keys(0..16)), [Some("dram"); 16]);
    assert_eq!(store.stats().counters.prefetched_used, 16);
    assert_eq!(stage.loads.load(Relaxed), 16);
}

#[test]
fn unread_prefetched_blocks_are_evicted() {
    let (store, _stage) = open(dram(4));
    put(&store, &keys(0..256), BLOCK);
    flush(&store);
    store.prefetch(&keys(0..128));
    wait_until("128 are prefetched", || store.stats().counters.prefetched_blocks >= 128);
    let outcomes = put(&store, &keys(300..428), BLOCK);
    assert!(outcomes.iter().all(|o| matches!(o, PutOutcome::Stored)));
    let in_dram = |keys| store.locate(keys).iter().filter(|t| t.first() == Some(&"dram")).count();
    assert!(in_dram(&keys(0..128)) <= 17, "a quarter of 64 blocks, and one");
}

#[test]
fn a_shared_content_keeps_all_its_names_in_the_lower_stage() {
    let digest = DigestMode::On(DigestAlgorithm::Blake3);
    let (store, _stage) = open(StoreConfig { digest, ..dram(4) });
    let bytes = bytes_of(&key(0), BLOCK);
    let put_one = |n| store.put(&[Put::new(key(n), &bytes)], CallOptions::default());
    put_one(0);
    put_one(1);
    flush(&store);
    put_one(2);
    flush(&store);
    store.delete(&keys(0..1));
    put(&store, &keys(100..356), BLOCK);
    flush(&store);
    for n in 1..3 {
        let view = store.view(&keys(n..n + 1), CallOptions::default()).pop().unwrap();
        assert!(
            matches!(&view, ViewOutcome::Hit { slab, .. } if slab.host() == Some(&bytes[..])),
            "{n}: {view:?}"
        );
    }
    store.delete(&keys(1..3));
    assert_eq!(store.stats().content_bytes, 256 * BLOCK as u64);
}

#[test]
fn a_block_deleted_during_its_write_is_removed_from_the_lower_stage() {
    let (store, stage) = open(dram(4));
    stage.delay_ms.store(30, Relaxed);
    for round in 0..10 {
        put(&store, &keys(round..round + 1), BLOCK);
        store.delete(&keys(round..round + 1));
    }
    flush(&store);
    put(&store, &keys(50..51), BLOCK);
    flush(&store);
    assert_eq!(store.stats().stages[0].1.used_bytes, BLOCK as u64);
}

#[test]
fn without_dram_blocks_are_served_from_the_stage_and_not_kept_in_memory() {
    let stage = MapStage::new();
    let config = StoreConfig { pipeline: "Map".to_owned(), ..dram(4) };
    let store = Store::open_with(config, &stage.registry(), Arc::new(SystemClock)).unwrap();
    put(&store, &keys(0..256), BLOCK);
    assert_eq!(check(&store, &keys(0..256)), [Some("map"); 256]);
    assert_eq!(store.stats().pool.requested_bytes, 0);
    let outcomes = put(&store, &keys(0..1), BLOCK);
    assert!(matches!(outcomes[0], PutOutcome::Present), "{outcomes:?}");
}
