//! Stages that are slow, hang, panic or return wrong results: only their own blocks are affected.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use cascade_block::{DigestAlgorithm, DigestMode, NamespaceId};
use cascade_runtime::{Clock as _, SystemClock};
use cascade_store::stages::StageRegistry;
use cascade_store::{
    CallOptions, GetOutcome, HealthConfig, Put, PutOutcome, PutSlab, Store, StoreConfig,
    StoreError, ViewOutcome, WritePolicy,
};
use cascade_tier::tier::BlockFacts;

use crate::blocks::{MIB, StopOnDrop, bytes_of, check, dram, key, keys, put, wait_until};
use crate::third_party::{Circuits, MapStage, flush, frequent_probes, open, wait_for};

const BLOCK: usize = 64 << 10;

#[test]
fn concurrent_gets_larger_than_dram_do_not_deadlock() {
    let (store, _stage) = open(dram(4));
    let length = 512 << 10;
    for at in 0..32 {
        put(&store, &keys(at..at + 1), length);
    }
    flush(&store);
    std::thread::scope(|scope| {
        for half in 0..2 {
            let store = &store;
            scope.spawn(move || {
                let wanted = keys(half * 16..half * 16 + 16);
                let mut buffers: Vec<Vec<u8>> = wanted.iter().map(|_| vec![0; length]).collect();
                let mut slices: Vec<&mut [u8]> =
                    buffers.iter_mut().map(Vec::as_mut_slice).collect();
                let outcomes = store.get(&wanted, &mut slices, CallOptions::default());
                for (at, outcome) in outcomes.iter().enumerate() {
                    assert!(matches!(outcome, GetOutcome::Hit { .. }), "{at}: {outcome:?}");
                }
                for (key, buffer) in wanted.iter().zip(&buffers) {
                    assert!(*buffer == bytes_of(key, length));
                }
            });
        }
    });
}

#[test]
fn a_flush_returns_during_continuous_puts() {
    let (store, _stage) = open(dram(4));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for at in 0.. {
                if stop.load(Relaxed) {
                    break;
                }
                put(&store, &keys(at..at + 1), BLOCK);
            }
        });
        let _stopper = StopOnDrop(&stop);
        for _ in 0..20 {
            flush(&store);
        }
    });
}

#[test]
fn closing_over_a_hung_stage_returns_an_error() {
    // Long enough for puts; the close waits for it.
    let timeout = Duration::from_secs(1);
    let (store, stage) = open(StoreConfig { timeout, ..dram(16) });
    stage.delay_ms.store(3_600_000, Relaxed);
    put(&store, &keys(0..32), BLOCK);
    let error = store.close().unwrap_err();
    assert!(matches!(error, StoreError::Timeout { .. } | StoreError::Tier { .. }), "{error}");
    let outcome = store.put(&[Put::new(key(99), b"late")], CallOptions::default());
    assert!(matches!(outcome[0], PutOutcome::Failed(StoreError::Closed)));
    assert!(matches!(store.flush(CallOptions::default()), Err(StoreError::Closed)));
    assert_eq!(store.delete(&keys(0..1)), [false]);
}

/// The error of a flush during a close wrongly blamed the stage.
#[test]
fn a_flush_during_a_close_fails_with_closed() {
    // Long enough for the first put and flush; the close waits for it.
    let timeout = Duration::from_secs(2);
    let (store, _stage) =
        open(StoreConfig { timeout, mover_bytes_per_second: Some(1), ..dram(16) });
    // The first block is written at once; after that the mover's budget is used up for a day.
    put(&store, &keys(0..1), BLOCK);
    flush(&store);
    put(&store, &keys(1..2), BLOCK);
    let long_timeout = CallOptions { timeout: Some(Duration::from_secs(60)), ..Default::default() };
    std::thread::scope(|scope| {
        let flushing = scope.spawn(|| store.flush(long_timeout));
        store.close().unwrap_err();
        let flushed = flushing.join().unwrap();
        assert!(matches!(flushed, Err(StoreError::Closed)), "{flushed:?}");
    });
}

#[test]
fn a_stage_that_returns_too_few_results_or_panics_loses_only_its_own_blocks() {
    // With rare probes, so that the view and not a probe meets the fault first.
    let health = HealthConfig { probe_interval: Duration::from_secs(1), ..frequent_probes() };
    for is_panic in [false, true] {
        let (store, stage) = open(StoreConfig { health, ..dram(4) });
        put(&store, &keys(0..128), BLOCK);
        flush(&store);
        let fault = if is_panic { &stage.panics } else { &stage.answers_short };
        fault.store(true, Relaxed);
        let view = store.view(&keys(0..1), CallOptions::default()).pop().unwrap();
        assert!(matches!(view, ViewOutcome::Failed(StoreError::Tier { .. })), "{view:?}");
        put(&store, &keys(200..204), BLOCK);
        assert!(store.flush(CallOptions::default()).is_err(), "not all was written");
        fault.store(false, Relaxed);
        // No caller waits forever. A call that began before the end of the fault may fail after it,
        // and open the circuit again.
        wait_until("the block is read again", || check(&store, &keys(0..1)) == [Some("map")]);
        wait_until("the stage stores blocks again", || {
            put(&store, &keys(300..500), BLOCK);
            store.flush(CallOptions::default()).is_ok()
        });
        wait_until("nothing is pending", || store.stats().pending_bytes == 0);
        assert!(store.stats().dram_bytes <= 4 * MIB);
    }
}

#[test]
fn a_read_before_the_stage_has_a_new_name_loses_no_block() {
    let digest = DigestMode::On(DigestAlgorithm::Blake3);
    let (store, stage) = open(StoreConfig { digest, ..dram(4) });
    let bytes = bytes_of(&key(0), BLOCK);
    let put_as = |n| store.put(&[Put::new(key(n), &bytes)], CallOptions::default()).remove(0);
    put_as(0);
    put(&store, &keys(100..300), BLOCK);
    flush(&store);
    stage.name_delay_ms.store(100, Relaxed);
    assert!(matches!(put_as(1), PutOutcome::Deduplicated));
    // The stage does not have the second name yet. Whatever this returns, the block is kept.
    drop(store.view(&keys(1..2), CallOptions::default()));
    flush(&store);
    for n in 0..2 {
        let view = store.view(&keys(n..n + 1), CallOptions::default()).pop().unwrap();
        assert!(
            matches!(&view, ViewOutcome::Hit { slab, .. } if slab.host() == Some(&bytes[..])),
            "{n}: {view:?}"
        );
    }
}

/// Each failure woke the flush, and the flush ended the pause of the mover: both took a processor
/// until the flush timed out.
#[test]
fn a_stage_that_fails_at_once_is_tried_again_after_a_pause() {
    let health = HealthConfig { window: 64, threshold: 64, ..HealthConfig::default() };
    let (store, stage) = open(StoreConfig { health, ..dram(4) });
    put(&store, &keys(0..4), BLOCK);
    flush(&store);
    stage.fails_removes.store(true, Relaxed);
    let start = SystemClock.monotonic();
    store.delete(&keys(0..4));
    let timeout = Some(Duration::from_millis(300));
    let error = store.flush(CallOptions { timeout, writer: None }).unwrap_err();
    assert!(matches!(error, StoreError::Timeout { .. }), "{error}");
    let tries = u128::from(stage.removes.load(Relaxed));
    let pauses = SystemClock.monotonic().saturating_sub(start).as_millis() / 20;
    assert!((1..=pauses + 1).contains(&tries), "{tries} tries with {pauses} pauses");
    stage.fails_removes.store(false, Relaxed);
    flush(&store);
    assert_eq!(stage.block_count(), 0);
}

#[test]
fn a_retried_write_through_put_is_written() {
    let config = StoreConfig { write: WritePolicy::Through, health: frequent_probes(), ..dram(4) };
    let (store, stage) = open(config);
    stage.fails.store(true, Relaxed);
    let outcomes = put(&store, &keys(0..1), BLOCK);
    assert!(matches!(outcomes[0], PutOutcome::Failed(StoreError::Tier { .. })), "{outcomes:?}");
    let outcomes = put(&store, &keys(0..1), BLOCK);
    assert!(matches!(outcomes[0], PutOutcome::Failed(StoreError::Tier { .. })), "{outcomes:?}");
    // A probe that began before could fail later, and the next put with it.
    wait_for(&store, 0, Circuits::BothOpen);
    stage.fails.store(false, Relaxed);
    wait_for(&store, 0, Circuits::BothClosed);
    let outcomes = put(&store, &keys(0..1), BLOCK);
    assert!(matches!(outcomes[0], PutOutcome::Present), "{outcomes:?}");
    assert_eq!(stage.stored.load(Relaxed), 1);
}

#[test]
fn a_pin_keeps_a_block_that_was_promoted_under_another_name() {
    let digest = DigestMode::On(DigestAlgorithm::Blake3);
    let (store, _stage) = open(StoreConfig { digest, ..dram(4) });
    let bytes = bytes_of(&key(0), BLOCK);
    for n in 0..2 {
        store.put(&[Put::new(key(n), &bytes)], CallOptions::default());
    }
    put(&store, &keys(100..300), BLOCK);
    flush(&store);
    drop(store.view(&keys(1..2), CallOptions::default()));
    assert_eq!(store.pin(&keys(0..1)), [true]);
    put(&store, &keys(300..500), BLOCK);
    flush(&store);
    assert_eq!(store.locate(&keys(0..1))[0].first(), Some(&"dram"));
}

fn two_stages(
    fast: &Arc<MapStage>,
    slow: &Arc<MapStage>,
    digest: DigestMode,
) -> Result<Store, StoreError> {
    let mut registry: StageRegistry = fast.registry();
    let slow = Arc::clone(slow);
    registry.register("Slow", Arc::new(move |_| Ok(slow.clone())));
    let config = StoreConfig { pipeline: "Dram|Map|Slow".to_owned(), digest, ..dram(4) };
    Store::open_with(config, &registry, Arc::new(SystemClock))
}

#[test]
fn an_older_copy_in_a_slower_stage_never_replaces_a_newer_one() {
    for digest in [DigestMode::Off, DigestMode::On(DigestAlgorithm::Blake3)] {
        let (fast, slow) = (MapStage::new(), MapStage::new());
        let (new, old) = (bytes_of(&key(1), BLOCK), bytes_of(&key(2), BLOCK));
        let facts = |bytes: &[u8]| BlockFacts {
            key: key(0),
            digest: match digest {
                DigestMode::Off => None,
                DigestMode::On(algorithm) => Some(cascade_block::Digest::of(algorithm, bytes)),
            },
            parent: None,
            namespace: NamespaceId::default(),
            bytes: u32::try_from(bytes.len()).unwrap(),
            is_prefix: false,
            written_unix_ms: 0,
            expires_unix_ms: None,
        };
        fast.add_survivor(facts(&new), new.clone());
        slow.add_survivor(facts(&old), old);
        let store = two_stages(&fast, &slow, digest).unwrap();
        let view = store.view(&keys(0..1), CallOptions::default()).pop().unwrap();
        assert!(
            matches!(&view, ViewOutcome::Hit { slab, .. } if slab.host() == Some(&new[..])),
            "{view:?}"
        );
        drop(view);
        put(&store, &keys(100..300), BLOCK);
        flush(&store);
        fast.lose_everything();
        assert_eq!(check(&store, &keys(0..1)), [None], "{digest:?}: not the older bytes");
    }
}

#[test]
fn a_block_is_read_from_the_next_stage_when_the_first_fails() {
    let (fast, slow) = (MapStage::new(), MapStage::new());
    let store = two_stages(&fast, &slow, DigestMode::Off).unwrap();
    put(&store, &keys(0..200), BLOCK);
    flush(&store);
    fast.fails.store(true, Relaxed);
    assert_eq!(check(&store, &keys(0..1)), [Some("map")], "both stages share a name here");
    assert_eq!(slow.loads.load(Relaxed), 1);
}

#[test]
fn put_slabs_wakes_the_mover_that_it_waits_for() {
    let timeout = Duration::from_secs(5);
    let (store, _stage) = open(StoreConfig { dirty_bytes_max: Some(MIB), timeout, ..dram(16) });
    let mut batch = Vec::new();
    for n in 0..64 {
        let mut slab = store.reserve(BLOCK, CallOptions::default()).unwrap();
        slab.fill_from(&bytes_of(&key(n), BLOCK)).unwrap();
        batch.push(PutSlab::new(key(n), slab));
    }
    let outcomes = store.put_slabs(batch, CallOptions::default());
    let other = outcomes.iter().find(|outcome| !matches!(outcome, PutOutcome::Stored));
    assert!(other.is_none(), "{other:?}");
}

#[test]
fn a_stage_with_names_only_does_not_hide_blocks_in_lower_stages() {
    let stage = MapStage::new();
    let config = StoreConfig { pipeline: "Dram|Fake|Map".to_owned(), ..dram(4) };
    let store = Store::open_with(config, &stage.registry(), Arc::new(SystemClock)).unwrap();
    put(&store, &keys(0..200), BLOCK);
    flush(&store);
    assert_eq!(check(&store, &keys(0..1)), [Some("map")]);
}
