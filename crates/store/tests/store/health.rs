//! The circuit of a failing stage opens within seconds and closes after recovery; calls do not
//! wait.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]
#![expect(clippy::print_stdout, reason = "prints which hangs are injected")]

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use cascade_block::{DigestAlgorithm, DigestMode};
use cascade_runtime::{ManualClock, SystemClock};
use cascade_store::stages::StageRegistry;
use cascade_store::{
    BlockExplanation, BlockState, CallOptions, HealthState, Put, PutOutcome, Request, Store,
    StoreConfig, StoreError, ViewOutcome, WritePolicy,
};

use crate::blocks::{bytes_of, check, dram, key, keys, put, wait_until};
use crate::named_pool;
use crate::third_party::{self, Circuits, MapStage, flush, frequent_probes, pass_until, wait_for};

const BLOCK: usize = 64 << 10;
const SECOND: Duration = Duration::from_secs(1);

fn on_clock(config: StoreConfig) -> (Store, Arc<MapStage>, Arc<ManualClock>) {
    let (stage, clock) = (MapStage::new(), Arc::new(ManualClock::default()));
    let config = StoreConfig { pipeline: "Dram|Map".to_owned(), ..config };
    let store = Store::open_with(config, &stage.registry(), Arc::clone(&clock) as _).unwrap();
    (store, stage, clock)
}

fn state(store: &Store, stage: usize) -> HealthState {
    store.stats().health[stage].1.state
}

fn long_timeout() -> CallOptions {
    CallOptions { timeout: Some(Duration::from_secs(20)), ..CallOptions::default() }
}

#[test]
fn a_circuit_opens_after_two_failed_calls_and_closes_after_one_probe() {
    let (store, stage, clock) = on_clock(dram(4));
    put(&store, &keys(0..128), BLOCK);
    flush(&store);
    stage.fails.store(true, Relaxed);
    assert_eq!(state(&store, 0), HealthState::Healthy);
    let view = store.view(&keys(0..1), CallOptions::default()).remove(0);
    assert!(matches!(view, ViewOutcome::Failed(StoreError::Tier { .. })), "{view:?}");
    // The second call is the next read, or a probe that the first failure caused.
    drop(store.view(&keys(1..2), CallOptions::default()));
    let shed_before = store.stats().counters.shed_gets;
    let health = store.stats().health.remove(0).1;
    assert_eq!((health.state, health.opened_count), (HealthState::Open, 1));
    let why = health.last_error.unwrap();
    assert!(why.contains("injected"), "the cause is included: {why}");
    let loads = stage.loads.load(Relaxed);
    assert_eq!(check(&store, &keys(0..8)), [None; 8], "misses, not failures");
    assert_eq!(stage.loads.load(Relaxed), loads, "and the stage is not called");
    assert_eq!(store.stats().counters.shed_gets - shed_before, 8);
    assert_eq!(store.contains(&keys(0..1)), [false]);
    let chain = keys(0..4);
    let matched = store.lookup_prefix(&Request::new(&chain));
    assert!(matched.tiers.is_empty(), "{matched:?}");
    let explained = store.explain(&chain, None, CallOptions::default()).unwrap();
    assert_eq!((explained.leading, explained.behind_gap), (0, 0), "{explained:?}");
    let views = store.own().peek(&chain, CallOptions::default());
    assert_eq!(views.len(), chain.len(), "a miss needs no tier");
    stage.fails.store(false, Relaxed);
    let took = pass_until(&store, &clock, Circuits::BothClosed);
    assert!(took <= 15 * SECOND, "{took:?}");
    assert_eq!(check(&store, &keys(0..8)), [Some("map"); 8], "every address was kept");
    let stats = store.stats();
    let counters = stats.counters;
    assert_eq!(counters.gets, counters.hits + counters.misses + counters.get_failures);
}

/// The states of the circuits for reads and for writes.
fn circuits(store: &Store) -> (HealthState, HealthState) {
    let health = store.stats().health.remove(0).1;
    (health.reads.state, health.writes.state)
}

#[test]
fn a_stage_whose_writes_fail_is_still_read() {
    let (store, stage, clock) = on_clock(dram(4));
    put(&store, &keys(0..128), BLOCK);
    flush(&store);
    stage.fails_writes.store(true, Relaxed);
    pass_until(&store, &clock, Circuits::OneOpen);
    let outcomes = put(&store, &keys(128..136), BLOCK);
    assert!(outcomes.iter().all(|o| matches!(o, PutOutcome::Stored)), "{outcomes:?}");
    // No tier has written them, and the reads below evict others.
    assert_eq!(store.pin(&keys(128..136)), [true; 8]);
    store.flush(CallOptions::default()).unwrap_err();
    for _ in 0..8 {
        clock.advance(SECOND);
        assert!(check(&store, &keys(0..128)).iter().all(Option::is_some), "reads succeed");
    }
    let (reads, writes) = circuits(&store);
    assert_eq!(reads, HealthState::Healthy);
    assert_ne!(writes, HealthState::Healthy);
    let counters = store.stats().counters;
    assert_eq!((counters.shed_gets, counters.shed_puts), (0, 8));
    stage.fails_writes.store(false, Relaxed);
    pass_until(&store, &clock, Circuits::BothClosed);
    wait_until("136 are stored", || stage.stored.load(Relaxed) >= 136);
}

#[test]
fn a_stage_whose_reads_fail_is_still_written() {
    let (store, stage, clock) = on_clock(dram(4));
    put(&store, &keys(0..128), BLOCK);
    flush(&store);
    stage.fails_reads.store(true, Relaxed);
    for at in 0..2 {
        drop(store.view(&keys(at..at + 1), CallOptions::default()));
    }
    assert_eq!(circuits(&store), (HealthState::Open, HealthState::Healthy));
    assert_eq!(check(&store, &keys(0..8)), [None; 8], "misses, not failures");
    put(&store, &keys(128..136), BLOCK);
    flush(&store);
    assert_eq!((stage.stored.load(Relaxed), store.stats().counters.shed_puts), (136, 0));
    stage.fails_reads.store(false, Relaxed);
    pass_until(&store, &clock, Circuits::BothClosed);
    assert_eq!(check(&store, &keys(0..8)), [Some("map"); 8]);
}

#[test]
fn probes_detect_a_stage_that_fails_while_idle() {
    let (store, stage, clock) = on_clock(dram(4));
    stage.fails.store(true, Relaxed);
    let took = pass_until(&store, &clock, Circuits::BothOpen);
    assert!(took <= 15 * SECOND, "{took:?}");
    assert_eq!(stage.loads.load(Relaxed), 0);
    stage.fails.store(false, Relaxed);
    let took = pass_until(&store, &clock, Circuits::BothClosed);
    assert!(took <= 15 * SECOND, "{took:?}");
}

#[test]
fn blocks_put_while_a_circuit_is_open_are_written_when_it_closes() {
    let (store, stage, clock) = on_clock(dram(16));
    stage.fails.store(true, Relaxed);
    put(&store, &keys(0..4), BLOCK);
    pass_until(&store, &clock, Circuits::BothOpen);
    let outcomes = put(&store, &keys(4..20), BLOCK);
    assert!(outcomes.iter().all(|o| matches!(o, PutOutcome::Stored)), "{outcomes:?}");
    let stats = store.stats();
    assert_eq!((stats.pending_bytes, stats.counters.shed_puts), (0, 16));
    let error = store.flush(CallOptions::default()).unwrap_err();
    assert!(matches!(error, StoreError::Tier { tier: "map", .. }), "blocks are missing: {error}");
    stage.fails.store(false, Relaxed);
    pass_until(&store, &clock, Circuits::BothClosed);
    wait_until("20 are stored", || stage.stored.load(Relaxed) >= 20);
    flush(&store);
    for key in keys(0..20) {
        assert_eq!(store.locate(&[key]), [vec!["dram", "map"]]);
    }
}

#[test]
fn a_failed_write_is_retried_after_a_successful_probe() {
    let (store, stage, _clock) = on_clock(dram(4));
    stage.fails_stores.store(1, Relaxed);
    put(&store, &keys(0..1), BLOCK);
    store.flush(CallOptions::default()).unwrap_err();
    // The failure requests the probe. The clock stands still, so that the probe cannot time out.
    wait_until("the write is retried", || stage.stored.load(Relaxed) > 0);
    flush(&store);
    assert_eq!(store.locate(&keys(0..1)), [vec!["dram", "map"]]);
    assert_eq!(store.stats().health[0].1.opened_count, 0);
}

#[test]
fn evicted_blocks_that_no_stage_has_are_counted_as_lost() {
    let (store, stage, clock) = on_clock(dram(4));
    stage.fails.store(true, Relaxed);
    pass_until(&store, &clock, Circuits::BothOpen);
    for at in 0..16 {
        let outcomes = put(&store, &keys(at * 8..at * 8 + 8), BLOCK);
        assert!(outcomes.iter().all(|o| matches!(o, PutOutcome::Stored)), "{outcomes:?}");
    }
    let counters = store.stats().counters;
    assert!(counters.evicted_blocks > 0);
    assert_eq!(counters.lost_blocks, counters.evicted_blocks);
    stage.fails.store(false, Relaxed);
    pass_until(&store, &clock, Circuits::BothClosed);
    let served = check(&store, &keys(0..128)).into_iter().flatten().count() as u64;
    assert_eq!(served, 128 - counters.lost_blocks);
}

#[test]
fn a_block_behind_an_open_circuit_can_be_put_again_if_its_digest_matches() {
    for digest in [DigestMode::Off, DigestMode::On(DigestAlgorithm::Blake3)] {
        let (store, stage, clock) = on_clock(StoreConfig { digest, ..dram(4) });
        put(&store, &keys(0..128), BLOCK);
        flush(&store);
        stage.fails.store(true, Relaxed);
        pass_until(&store, &clock, Circuits::BothOpen);
        // Other bytes are refused: after a kill the stage would serve its old bytes for the key.
        let other = store.put(&[Put::new(key(1), &vec![7; BLOCK])], long_timeout()).remove(0);
        assert!(matches!(other, PutOutcome::Failed(StoreError::Tier { .. })), "{other:?}");
        let outcome = put(&store, &keys(0..1), BLOCK).remove(0);
        if digest == DigestMode::Off {
            assert!(matches!(outcome, PutOutcome::Failed(StoreError::Tier { .. })), "{outcome:?}");
        } else {
            // `Present`, because the key keeps the lifetime of its first put.
            assert!(matches!(outcome, PutOutcome::Present), "{outcome:?}");
            assert_eq!(check(&store, &keys(0..1)), [Some("dram")]);
        }
        stage.fails.store(false, Relaxed);
        pass_until(&store, &clock, Circuits::BothClosed);
        flush(&store);
        assert_eq!(stage.stored.load(Relaxed), 128, "its address was kept");
        put(&store, &keys(200..400), BLOCK);
        flush(&store);
        assert_eq!(check(&store, &keys(0..2)), [Some("map"); 2], "{digest:?}");
    }
}

/// What a stage or the ledger of a pool learns of the second put of a block: it must not expire
/// later after a restart than before.
#[test]
fn a_block_that_is_put_again_keeps_its_lifetime_after_a_restart() {
    let directory = named_pool::directory();
    let digest = DigestMode::On(DigestAlgorithm::Blake3);
    let config = StoreConfig {
        health: frequent_probes(),
        digest,
        ..named_pool::config(directory.path(), 4)
    };
    let (store, stage) = third_party::open(config.clone());
    let named = keys(0..3);
    let bytes: Vec<_> = named.iter().map(|key| bytes_of(key, BLOCK)).collect();
    // The lifetimes of the first puts and of the second ones. The one key never expires.
    let day = Some(24 * 3600 * 1000);
    let (first, second) = ([day, day, None], [None, Some(1), Some(1)]);
    let put_with = |lifetimes: [Option<u64>; 3]| {
        let put = |at: usize| Put { ttl_ms: lifetimes[at], ..Put::new(named[at], &bytes[at]) };
        let puts: Vec<Put<'_>> = (0..3).map(put).collect();
        store.put(&puts, long_timeout())
    };
    let expiry = |store: &Store| {
        let explained = store.explain(&named, None, CallOptions::default()).unwrap();
        let expiry_of = |block: &BlockExplanation| match &block.state {
            BlockState::Present(present) => present.expires_unix_ms,
            other => panic!("{other:?}"),
        };
        explained.blocks.iter().map(expiry_of).collect::<Vec<_>>()
    };
    put_with(first);
    flush(&store);
    let before = expiry(&store);
    assert!(before[0].is_some() && before[1].is_some() && before[2].is_none(), "{before:?}");
    put(&store, &keys(100..300), BLOCK);
    flush(&store);
    stage.fails.store(true, Relaxed);
    wait_for(&store, 0, Circuits::BothOpen);
    let outcomes = put_with(second);
    assert!(outcomes.iter().all(|it| matches!(it, PutOutcome::Present)), "{outcomes:?}");
    assert_eq!(check(&store, &named), [Some("dram"); 3]);
    assert_eq!(expiry(&store), before);
    store.close().unwrap_err();
    drop(store);
    let (store, _) = third_party::open(config);
    assert_eq!(expiry(&store), before, "after a restart");
}

#[test]
fn without_dram_a_put_fails_at_once_while_the_circuit_is_open() {
    let (stage, clock) = (MapStage::new(), Arc::new(ManualClock::default()));
    let config = StoreConfig { pipeline: "Map".to_owned(), ..dram(4) };
    let store = Store::open_with(config, &stage.registry(), Arc::clone(&clock) as _).unwrap();
    stage.fails.store(true, Relaxed);
    pass_until(&store, &clock, Circuits::BothOpen);
    let outcomes = put(&store, &keys(0..1), BLOCK);
    assert!(matches!(outcomes[0], PutOutcome::Failed(StoreError::Tier { .. })), "{outcomes:?}");
    assert_eq!(store.stats().keys, 0);
    stage.fails.store(false, Relaxed);
    pass_until(&store, &clock, Circuits::BothClosed);
    put(&store, &keys(0..1), BLOCK);
    assert_eq!(check(&store, &keys(0..1)), [Some("map")]);
}

#[test]
fn a_write_through_put_does_not_wait_for_an_open_circuit() {
    let config = StoreConfig { write: WritePolicy::Through, ..dram(4) };
    let (store, stage, clock) = on_clock(config);
    stage.fails.store(true, Relaxed);
    pass_until(&store, &clock, Circuits::BothOpen);
    for _ in 0..2 {
        let outcomes = put(&store, &keys(0..1), BLOCK);
        assert!(matches!(outcomes[0], PutOutcome::Failed(StoreError::Tier { .. })), "{outcomes:?}");
    }
    assert_eq!(check(&store, &keys(0..1)), [Some("dram")]);
}

#[test]
fn names_deleted_while_a_circuit_is_open_are_removed_when_it_closes() {
    let (store, stage, clock) = on_clock(dram(4));
    put(&store, &keys(0..64), BLOCK);
    flush(&store);
    stage.fails.store(true, Relaxed);
    pass_until(&store, &clock, Circuits::BothOpen);
    assert_eq!(store.delete(&keys(0..64)), [true; 64]);
    stage.fails.store(false, Relaxed);
    pass_until(&store, &clock, Circuits::BothClosed);
    flush(&store);
    assert_eq!(store.stats().stages[0].1.used_bytes, 0);
}

#[test]
fn failed_removals_of_names_are_retried() {
    let (store, stage, clock) = on_clock(dram(4));
    put(&store, &keys(0..64), BLOCK);
    flush(&store);
    stage.fails_removes.store(true, Relaxed);
    assert_eq!(store.delete(&keys(0..64)), [true; 64]);
    pass_until(&store, &clock, Circuits::OneOpen);
    stage.fails_removes.store(false, Relaxed);
    pass_until(&store, &clock, Circuits::BothClosed);
    flush(&store);
    let stats = store.stats();
    assert_eq!((stats.stages[0].1.used_bytes, stats.counters.name_failures), (0, 0));
}

/// Two stages: `Map`, which fails in the test, and `Slow` below it, which works.
fn two_stages() -> (Store, Arc<MapStage>, Arc<MapStage>) {
    let (broken, working) = (MapStage::new(), MapStage::new());
    let mut registry: StageRegistry = broken.registry();
    let slow = Arc::clone(&working);
    registry.register("Slow", Arc::new(move |_| Ok(slow.clone())));
    let pipeline = "Dram|Map|Slow".to_owned();
    let config = StoreConfig { pipeline, health: frequent_probes(), ..dram(4) };
    let store = Store::open_with(config, &registry, Arc::new(SystemClock)).unwrap();
    (store, broken, working)
}

#[test]
fn the_second_stage_serves_while_the_first_fails() {
    let (store, broken, working) = two_stages();
    put(&store, &keys(0..200), BLOCK);
    flush(&store);
    broken.fails.store(true, Relaxed);
    wait_for(&store, 0, Circuits::BothOpen);
    assert_eq!(state(&store, 1), HealthState::Healthy);
    assert!(check(&store, &keys(0..200)).iter().all(Option::is_some), "all from DRAM or below");
    assert!(working.loads.load(Relaxed) > 0);
    put(&store, &keys(200..400), BLOCK);
    assert!(store.flush(CallOptions::default()).is_err(), "one stage lacks blocks");
    assert_eq!(working.stored.load(Relaxed), 400);
    let counters = store.stats().counters;
    assert_eq!((counters.shed_gets, counters.lost_blocks), (0, 0));
    assert!(check(&store, &keys(0..400)).iter().all(Option::is_some));
}

fn check_hung_stage(write: WritePolicy) {
    let stage = MapStage::new();
    let health =
        cascade_store::HealthConfig { probe_timeout: Duration::from_secs(2), ..frequent_probes() };
    let config = StoreConfig {
        pipeline: "Dram|Map".to_owned(),
        timeout: Duration::from_secs(3600),
        dirty_bytes_max: Some(1 << 20),
        health,
        write,
        ..dram(16)
    };
    let store = Store::open_with(config, &stage.registry(), Arc::new(SystemClock)).unwrap();
    put(&store, &keys(0..300), BLOCK);
    flush(&store);
    println!("the hang is injected: a stage that ignores its deadlines, as a dead mount does");
    let released = stage.hang();
    let hourly = CallOptions { timeout: Some(Duration::from_secs(3600)), ..CallOptions::default() };
    // Calls that wait for the stage return when its circuit opens, long before their hour is over.
    std::thread::scope(|scope| {
        for at in 0..4 {
            let store = &store;
            scope.spawn(move || {
                let view = store.view(&keys(at..at + 1), hourly).remove(0);
                assert!(matches!(view, ViewOutcome::Miss), "{view:?}");
            });
        }
    });
    wait_for(&store, 0, Circuits::BothOpen);
    // Puts succeed beyond the backlog limit, and blocks in DRAM are read.
    for at in 100..140 {
        let outcomes = put(&store, &keys(at * 8..at * 8 + 8), BLOCK);
        let is_taken = |outcome: &PutOutcome| match write {
            WritePolicy::Back => matches!(outcome, PutOutcome::Stored),
            WritePolicy::Through => matches!(outcome, PutOutcome::Failed(StoreError::Tier { .. })),
        };
        assert!(outcomes.iter().all(is_taken), "{outcomes:?}");
        assert_eq!(check(&store, &keys(at * 8..at * 8 + 8)), [Some("dram"); 8]);
    }
    let health = store.stats().health.remove(0).1;
    assert!(health.stuck_calls > 0 && health.stuck_calls <= 22, "{health:?}");
    assert!(store.flush(hourly).is_err(), "a flush does not wait for an open circuit");
    if write == WritePolicy::Back {
        drop(released);
        wait_for(&store, 0, Circuits::BothClosed);
        assert!(check(&store, &keys(0..300)).iter().all(Option::is_some), "every block is kept");
    }
    drop(store.close());
}

#[test]
fn a_stage_that_ignores_deadlines_blocks_no_call() {
    check_hung_stage(WritePolicy::Back);
}

#[test]
fn a_stage_that_ignores_deadlines_blocks_neither_write_through_puts_nor_close() {
    check_hung_stage(WritePolicy::Through);
}

#[test]
fn slabs_of_a_hung_call_are_not_reused_until_it_ends() {
    let stage = MapStage::new();
    let health =
        cascade_store::HealthConfig { probe_timeout: Duration::from_secs(2), ..frequent_probes() };
    let pipeline = "Dram|Map".to_owned();
    let config = StoreConfig { pipeline, health, ..dram(4) };
    let store = Store::open_with(config, &stage.registry(), Arc::new(SystemClock)).unwrap();
    put(&store, &keys(0..200), BLOCK);
    flush(&store);
    let released = stage.hang();
    assert_eq!(check(&store, &keys(0..2)), [None; 2]);
    wait_for(&store, 0, Circuits::BothOpen);
    store.clear();
    let held = store.stats().pool.requested_bytes;
    assert!(held >= 2 * BLOCK, "{held} bytes are held by the hung calls");
    // Fills the rest of DRAM several times. If the slabs were reused, the late calls would write
    // into other blocks.
    for round in 0..8 {
        put(&store, &keys(1000 + round * 100..1100 + round * 100), BLOCK);
    }
    drop(released);
    wait_for(&store, 0, Circuits::BothClosed);
    wait_until("no call is stuck", || store.stats().health[0].1.stuck_calls == 0);
    let found = check(&store, &keys(1000..1800));
    assert!(found.iter().any(Option::is_some), "and every byte of them matches");
}

#[test]
fn closing_does_not_wait_for_a_stage_that_hangs_in_close() {
    let stage = MapStage::new();
    let timeout = Duration::from_millis(100);
    let pipeline = "Dram|Map".to_owned();
    let config = StoreConfig { pipeline, timeout, health: frequent_probes(), ..dram(4) };
    let store = Store::open_with(config, &stage.registry(), Arc::new(SystemClock)).unwrap();
    for key in keys(0..4) {
        let outcome = store.put(&[Put::new(key, &bytes_of(&key, BLOCK))], long_timeout()).remove(0);
        assert!(matches!(outcome, PutOutcome::Stored), "{outcome:?}");
    }
    store.flush(long_timeout()).unwrap();
    let _held = stage.hang();
    store.close().unwrap_err();
    let outcome = store.put(&[Put::new(key(9), b"late")], long_timeout()).remove(0);
    assert!(matches!(outcome, PutOutcome::Failed(StoreError::Closed)), "{outcome:?}");
}
