//! Blocks with equal bytes share them in a lower tier, also while the tier has yet to record a key.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

use cascade_block::{DigestAlgorithm, DigestMode};
use cascade_store::{
    BlockState, CallOptions, FilesConfig, GetOutcome, Loss, Put, PutOutcome, Store, StoreConfig,
    ViewOutcome,
};

use crate::blocks::{MIB, bytes_of, check, dram, key, keys, put, wait_until};
use crate::named_pool;
use crate::third_party::{MapStage, flush, open};

const BLOCK: usize = 64 << 10;
const DIGEST: DigestMode = DigestMode::On(DigestAlgorithm::Blake3);

/// A store whose lower tier alone has the bytes of key 0.
fn open_with_key_0() -> (Store, Arc<MapStage>) {
    let (store, stage) = open(StoreConfig { digest: DIGEST, ..dram(4) });
    assert!(matches!(put_as(&store, 0), PutOutcome::Stored));
    evict(&store);
    (store, stage)
}

/// Evicts the bytes of key 0 from DRAM.
fn evict(store: &Store) {
    put(store, &keys(100..300), BLOCK);
    flush(store);
    put(store, &keys(300..500), BLOCK);
    flush(store);
    assert_eq!(store.locate(&[key(100)])[0].first(), Some(&"map"));
}

/// Puts the bytes of key 0 under another key.
fn put_as(store: &Store, n: u64) -> PutOutcome {
    let bytes = bytes_of(&key(0), BLOCK);
    store.put(&[Put::new(key(n), &bytes)], CallOptions::default()).remove(0)
}

/// Gets and views a key that shares the bytes of key 0.
#[track_caller]
fn assert_hit(store: &Store, n: u64) {
    let mut bytes = vec![0; BLOCK];
    let got = store.get(&[key(n)], &mut [&mut bytes], CallOptions::default()).remove(0);
    assert!(matches!(got, GetOutcome::Hit { bytes: BLOCK, .. }), "{n}: {got:?}");
    assert!(bytes == *bytes_of(&key(0), BLOCK), "{n}: wrong bytes");
    let view = store.view(&[key(n)], CallOptions::default()).remove(0);
    let right = bytes_of(&key(0), BLOCK);
    let is_right =
        matches!(&view, ViewOutcome::Hit { slab, .. } if slab.host() == Some(&right[..]));
    assert!(is_right, "{n}: {view:?}");
}

/// It was a miss until the tier had recorded the key.
#[test]
fn a_key_is_read_before_the_tier_has_recorded_it() {
    let (store, stage) = open_with_key_0();
    let names = stage.hold_names();
    assert!(matches!(put_as(&store, 1), PutOutcome::Deduplicated));
    names.wait_until_reached();
    assert_hit(&store, 1);
    drop(names);
    flush(&store);
    evict(&store);
    assert_hit(&store, 1);
}

#[test]
fn a_key_is_read_before_the_tier_has_recorded_it_and_removed_the_first_one() {
    let (store, stage) = open_with_key_0();
    let names = stage.hold_names();
    put_as(&store, 1);
    names.wait_until_reached();
    assert_eq!(store.delete(&[key(0)]), [true]);
    put_as(&store, 2);
    assert_eq!(store.delete(&[key(1)]), [true]);
    assert_hit(&store, 2);
    drop(names);
    flush(&store);
    evict(&store);
    assert_hit(&store, 2);
}

/// Each read here meets a tier that does not know the key, and ends when it does. The store took
/// that as the loss of the key, and forgot a block that it had acknowledged.
#[test]
fn a_read_that_a_new_key_overtakes_forgets_nothing() {
    let (store, stage) = open_with_key_0();
    let names = stage.hold_names();
    put_as(&store, 1);
    names.wait_until_reached();
    thread::scope(|scope| {
        let loaded = stage.hold_loaded();
        let reader = scope.spawn(|| assert_hit(&store, 1));
        loaded.wait_until_reached();
        drop(names);
        flush(&store);
        drop(loaded);
        reader.join().unwrap();
    });
    assert_hit(&store, 1);
}

#[test]
fn a_read_under_another_key_that_is_removed_meanwhile_is_repeated() {
    let (store, stage) = open_with_key_0();
    let names = stage.hold_names();
    put_as(&store, 1);
    names.wait_until_reached();
    thread::scope(|scope| {
        let loads = stage.hold_loads();
        let reader = scope.spawn(|| assert_hit(&store, 1));
        loads.wait_until_reached();
        assert_eq!(store.delete(&[key(0)]), [true]);
        drop(names);
        flush(&store);
        drop(loads);
        reader.join().unwrap();
    });
    assert_hit(&store, 1);
}

#[test]
fn a_read_of_a_key_that_is_removed_and_added_again_forgets_nothing() {
    let (store, stage) = open_with_key_0();
    put_as(&store, 1);
    flush(&store);
    thread::scope(|scope| {
        let loads = stage.hold_loads();
        let reader = scope.spawn(|| assert_hit(&store, 1));
        loads.wait_until_reached();
        assert_eq!(store.delete(&[key(1)]), [true]);
        flush(&store);
        let loaded = stage.hold_loaded();
        drop(loads);
        loaded.wait_until_reached();
        assert!(matches!(put_as(&store, 1), PutOutcome::Deduplicated));
        flush(&store);
        drop(loaded);
        reader.join().unwrap();
    });
    assert_hit(&store, 1);
}

/// A reply that a key is unknown counts, whatever the tier has yet to record. Each read was
/// repeated up to three times.
#[test]
fn a_read_of_a_lost_block_is_not_repeated() {
    let (store, stage) = open_with_key_0();
    let names = stage.hold_names();
    put_as(&store, 1);
    names.wait_until_reached();
    stage.lose_everything();
    let before = stage.loads.load(Ordering::Relaxed);
    let view = store.view(&[key(100)], CallOptions::default()).remove(0);
    assert!(matches!(view, ViewOutcome::Miss), "{view:?}");
    assert_eq!(stage.loads.load(Ordering::Relaxed) - before, 1);
    drop(names);
}

/// The store went on naming the tier: the block was present until it was read, and then missing for
/// a wrong reason.
#[test]
fn a_key_whose_block_is_dropped_before_it_is_recorded_is_absent() {
    let (store, stage) = open_with_key_0();
    let stores = stage.hold_stores();
    put(&store, &keys(600..601), BLOCK);
    stores.wait_until_reached();
    assert!(matches!(put_as(&store, 1), PutOutcome::Deduplicated));
    assert_eq!(store.delete(&[key(0)]), [true]);
    stage.capacity_bytes.store(stage.used_bytes(), Ordering::Relaxed);
    drop(stores);
    flush(&store);
    assert_eq!(store.contains(&[key(1)]), [false]);
    let explained = store.explain(&[key(1)], None, CallOptions::default()).unwrap();
    let state = &explained.blocks[0].state;
    assert!(matches!(state, BlockState::Absent { why: Loss::Reclaimed, .. }), "{state:?}");
}

/// Both writes of the key reached the tier in one batch, and the later one replaced the bytes of
/// the other key before that was recorded.
#[test]
fn a_key_that_is_put_again_leaves_the_bytes_of_another_one() {
    let (store, stage) = open(StoreConfig { digest: DIGEST, ..dram(4) });
    stage.has_one_block_a_key.store(true, Ordering::Relaxed);
    let stores = stage.hold_stores();
    put(&store, &keys(600..601), BLOCK);
    stores.wait_until_reached();
    assert!(matches!(put_as(&store, 1), PutOutcome::Stored));
    assert!(matches!(put_as(&store, 2), PutOutcome::Deduplicated));
    assert_eq!(store.delete(&[key(1)]), [true]);
    put(&store, &keys(1..2), BLOCK);
    drop(stores);
    flush(&store);
    evict(&store);
    assert_hit(&store, 2);
    assert!(check(&store, &keys(1..2))[0].is_some());
}

/// It was said to be missing from the tier, as after a loss: always at first, then only if the tier
/// had not asked whether to keep it.
#[test]
fn a_block_that_the_tier_is_dropping_was_reclaimed() {
    for drops_unasked in [false, true] {
        let (store, stage) = open_with_key_0();
        stage.drops_unasked.store(drops_unasked, Ordering::Relaxed);
        stage.capacity_bytes.store(stage.used_bytes(), Ordering::Relaxed);
        let rooms = stage.hold_rooms();
        put(&store, &keys(600..601), BLOCK);
        rooms.wait_until_reached();
        let view = store.view(&[key(0)], CallOptions::default()).remove(0);
        assert!(matches!(view, ViewOutcome::Miss), "{view:?}");
        let explained = store.explain(&[key(0)], None, CallOptions::default()).unwrap();
        let state = &explained.blocks[0].state;
        assert!(matches!(state, BlockState::Absent { why: Loss::Reclaimed, .. }), "{state:?}");
        drop(rooms);
    }
}

/// What happened: of two names of the same bytes, the tier took one for the first and the store the
/// other. The deletion of a name then left its block, and a restart brought it back.
#[test]
fn deleted_names_do_not_come_back_after_warm_restarts() {
    let directory = named_pool::directory();
    let open = || {
        let files = FilesConfig {
            capacity_bytes: 64 * MIB,
            ..FilesConfig::new(directory.path().join("files"))
        };
        let config = StoreConfig {
            pipeline: "Dram|Files".to_owned(),
            files: Some(files),
            digest: DIGEST,
            ..named_pool::config(directory.path(), 8)
        };
        Store::open(config).unwrap()
    };
    let names = keys(0..400);
    let store = open();
    for twins in names.chunks(2) {
        let bytes = bytes_of(&twins[0], 1000);
        let puts: Vec<Put<'_>> = twins.iter().map(|name| Put::new(*name, &bytes)).collect();
        store.put(&puts, CallOptions::default());
    }
    flush(&store);
    store.close().unwrap();
    drop(store);
    let store = open();
    assert_eq!(store.delete(&names), [true; 400]);
    flush(&store);
    store.close().unwrap();
    drop(store);
    let store = open();
    let left = store.contains(&names).iter().filter(|is_there| **is_there).count();
    assert_eq!(left, 0);
}

/// What happened: the block was written with the time of the first put, and gone after a restart.
#[test]
fn a_key_that_expired_before_it_was_written_has_the_time_of_its_next_put() {
    let (store, stage) = open(StoreConfig { digest: DIGEST, ..dram(4) });
    let stores = stage.hold_stores();
    put(&store, &keys(9..10), BLOCK);
    stores.wait_until_reached();
    let bytes = bytes_of(&key(0), BLOCK);
    let put_for = |n, ttl_ms| {
        let block = Put { ttl_ms, ..Put::new(key(n), &bytes) };
        store.put(&[block], CallOptions::default()).remove(0)
    };
    assert!(matches!(put_for(0, Some(1)), PutOutcome::Stored));
    // Another key keeps the bytes.
    assert!(matches!(put_for(1, None), PutOutcome::Deduplicated));
    wait_until("it has expired", || !store.contains(&[key(0)])[0]);
    assert!(matches!(put_for(0, None), PutOutcome::Deduplicated));
    drop(stores);
    flush(&store);
    let facts = stage.facts_of(&key(0)).expect("it was written");
    assert_eq!(facts.expires_unix_ms, None);
}
