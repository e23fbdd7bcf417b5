//! Write-through: a put is judged by the writes of its own block, on virtual time.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use cascade_block::{BlockKey, with_causes};
use cascade_runtime::simulated::{Ending, Settings, World};
use cascade_runtime::{SystemClock, sleep, thread};
use cascade_store::stages::StageRegistry;
use cascade_store::{
    CallOptions, FilesConfig, Put, PutOutcome, Store, StoreConfig, StoreError, WritePolicy,
};

use crate::blocks::{MIB, bytes_of, check, dram, key, keys, put};
use crate::third_party::MapStage;

const BLOCK: usize = 64 << 10;
/// How long a write takes.
const WRITE_MS: u64 = 20;

fn open(pipeline: &str, registry: &StageRegistry) -> Store {
    let pipeline = pipeline.to_owned();
    let config = StoreConfig { pipeline, write: WritePolicy::Through, ..dram(4) };
    Store::open_with(config, registry, Arc::new(SystemClock)).unwrap()
}

/// A store over DRAM and a slow stage.
fn open_slow() -> (Store, Arc<MapStage>) {
    let stage = MapStage::new();
    stage.delay_ms.store(WRITE_MS, Relaxed);
    (open("Dram|Map", &stage.registry()), stage)
}

/// Runs a story in worlds with several orders of its threads.
fn in_worlds(story: fn()) {
    for seed in 0..20 {
        let report = World::run(Settings::from_seed(seed), story);
        assert!(report.panics.is_empty(), "seed {seed}: {:?}", report.panics);
        assert_eq!(report.ending, Ending::Finished, "seed {seed}");
    }
}

/// Starts a put, and waits until its block is queued.
fn start_put(store: &Store, keys: Vec<BlockKey>) -> thread::JoinHandle<Vec<PutOutcome>> {
    let store = store.clone();
    let putter = thread::Builder::new().spawn(move || put(&store, &keys, BLOCK)).unwrap();
    sleep(Duration::from_millis(1));
    putter
}

/// The first write has begun with the first put, and succeeds.
fn fail_second_write(stage: &MapStage) {
    sleep(Duration::from_millis(WRITE_MS));
    assert_eq!(stage.stored.load(Relaxed), 1);
    stage.fails_stores.store(1, Relaxed);
}

/// It failed with "the stage returned no result".
#[test]
fn a_put_succeeds_if_its_block_is_removed_while_it_waits() {
    in_worlds(|| {
        let (store, _stage) = open_slow();
        let putter = start_put(&store, keys(0..1));
        assert_eq!(store.delete(&[key(0)]), [true]);
        let outcomes = putter.join().unwrap();
        assert!(matches!(outcomes[..], [PutOutcome::Stored]), "{outcomes:?}");
        let putter = start_put(&store, keys(1..2));
        store.clear();
        let outcomes = putter.join().unwrap();
        assert!(matches!(outcomes[..], [PutOutcome::Stored]), "{outcomes:?}");
        store.close().unwrap();
    });
}

/// It queued the other block with the length of its own, which the stage refused, and a flush then
/// failed.
#[test]
fn a_put_does_not_queue_the_block_that_replaced_its_own() {
    in_worlds(|| {
        let (store, stage) = open_slow();
        let first = start_put(&store, keys(0..1));
        let second = start_put(&store, keys(0..1));
        // At one moment of virtual time.
        assert_eq!(store.delete(&[key(0)]), [true]);
        let other = thread::Builder::new().spawn({
            let store = store.clone();
            move || store.put(&[Put::new(key(0), &[7; 100])], CallOptions::default())
        });
        fail_second_write(&stage);
        let other = other.unwrap().join().unwrap();
        assert!(matches!(other[..], [PutOutcome::Failed(StoreError::Tier { .. })]), "{other:?}");
        let first = first.join().unwrap();
        assert!(matches!(first[..], [PutOutcome::Stored]), "{first:?}");
        let second = second.join().unwrap();
        assert!(matches!(second[..], [PutOutcome::Present]), "{second:?}");
        assert_eq!(stage.wrong_lengths.load(Relaxed), 0);
        store.close().unwrap_err();
    });
}

/// The failed write of another block under its key failed the put.
#[test]
fn a_put_succeeds_if_the_block_that_replaced_its_own_is_not_written() {
    in_worlds(|| {
        let (store, stage) = open_slow();
        let putter = start_put(&store, keys(0..1));
        assert_eq!(store.delete(&[key(0)]), [true]);
        let other = thread::Builder::new().spawn({
            let store = store.clone();
            move || store.put(&[Put::new(key(0), &vec![7; BLOCK])], CallOptions::default())
        });
        fail_second_write(&stage);
        let other = other.unwrap().join().unwrap();
        assert!(matches!(other[..], [PutOutcome::Failed(StoreError::Tier { .. })]), "{other:?}");
        let outcomes = putter.join().unwrap();
        assert!(matches!(outcomes[..], [PutOutcome::Stored]), "{outcomes:?}");
        store.close().unwrap_err();
    });
}

/// The fast stage has written the second block and dropped it again for room, while the put waits
/// for the slow stage to write the first.
#[test]
fn a_put_succeeds_if_its_block_is_reclaimed_while_it_waits() {
    in_worlds(|| {
        let (fast, slow) = (MapStage::new(), MapStage::new());
        fast.capacity_bytes.store(4 * BLOCK as u64, Relaxed);
        slow.delay_ms.store(WRITE_MS, Relaxed);
        let mut registry = fast.registry();
        let registered = Arc::clone(&slow);
        registry.register("Slow", Arc::new(move |_| Ok(registered.clone())));
        let store = open("Dram|Map|Slow", &registry);
        let putter = start_put(&store, keys(0..2));
        let others = start_put(&store, keys(10..14));
        let outcomes = putter.join().unwrap();
        assert!(matches!(outcomes[..], [PutOutcome::Stored, PutOutcome::Stored]), "{outcomes:?}");
        let others = others.join().unwrap();
        assert!(others.iter().all(|other| matches!(other, PutOutcome::Stored)), "{others:?}");
        assert!(store.stats().counters.reclaimed_blocks >= 2);
        store.close().unwrap();
    });
}

/// Whether an error has the one that the stage returned as its cause.
fn has_cause(error: &StoreError) -> bool {
    with_causes(error).contains("injected")
}

/// Blocks that were queued when the circuit opened failed with "the stage's circuit is open".
#[test]
fn a_put_that_ends_with_an_open_circuit_reports_what_opened_it() {
    in_worlds(|| {
        let (store, stage) = open_slow();
        stage.fails_writes.store(true, Relaxed);
        let first = start_put(&store, keys(0..1));
        let second = start_put(&store, keys(1..2));
        // The second write and a probe have begun.
        sleep(Duration::from_millis(WRITE_MS));
        let third = start_put(&store, keys(2..3));
        for putter in [first, second, third] {
            let outcome = putter.join().unwrap().remove(0);
            let PutOutcome::Failed(error) = outcome else { panic!("{outcome:?}") };
            assert!(has_cause(&error), "{}", with_causes(&error));
        }
        let health = store.stats().health.remove(0).1;
        assert_eq!(health.writes.opened_count, 1);
        store.close().unwrap_err();
    });
}

/// The circuit opens while the stage flushes, which failed with "the stage's circuit is open".
#[test]
fn a_flush_that_ends_with_an_open_circuit_reports_what_opened_it() {
    in_worlds(|| {
        for is_block_missing in [true, false] {
            let stage = MapStage::new();
            let store = Store::open_with(
                StoreConfig { pipeline: "Dram|Map".to_owned(), ..dram(4) },
                &stage.registry(),
                Arc::new(SystemClock),
            )
            .unwrap();
            stage.delay_ms.store(WRITE_MS, Relaxed);
            stage.flush_delay_ms.store(25_000, Relaxed);
            stage.fails_writes.store(true, Relaxed);
            if is_block_missing {
                // Its write and then a probe fail, each after the time of a write.
                put(&store, &keys(0..1), BLOCK);
            }
            let error = store.flush(CallOptions::default()).unwrap_err();
            assert!(has_cause(&error), "{}", with_causes(&error));
            let writes = store.stats().health.remove(0).1.writes;
            assert_eq!(writes.opened_count, 1);
            let last = writes.last_error.unwrap();
            assert!(last.contains("injected"), "{last}");
            drop(store);
        }
    });
}

/// The error was "the stage returned no result".
#[test]
fn a_put_of_a_block_that_a_tier_does_not_accept_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let files = FilesConfig {
        capacity_bytes: 64 * MIB,
        segment_bytes: 4 * MIB,
        ..FilesConfig::new(directory.path())
    };
    let config = StoreConfig {
        pipeline: "Dram|Files".to_owned(),
        files: Some(files),
        write: WritePolicy::Through,
        ..dram(16)
    };
    let store = Store::open(config).unwrap();
    for (n, length) in [(0, 0), (1, 5 << 20)] {
        let bytes = bytes_of(&key(n), length);
        let outcome = store.put(&[Put::new(key(n), &bytes)], CallOptions::default()).remove(0);
        let PutOutcome::Failed(error) = outcome else { panic!("{outcome:?}") };
        let what = format!("does not accept a block of {length} bytes");
        assert!(with_causes(&error).contains(&what), "{}", with_causes(&error));
        assert_eq!(check(&store, &[key(n)]), [Some("dram")]);
    }
    store.close().unwrap();
}
