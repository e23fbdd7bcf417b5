//! A stage that breaks is shed within seconds of the clock, and comes back: nobody waits for it.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]
#![expect(clippy::print_stdout, reason = "says which hangs are injected")]

mod blocks;
mod third_party;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use blocks::{check, dram, key, keys, put};
use cascade_block::{Clock, Deadline, DigestAlgorithm, DigestMode, ManualClock, SystemClock};
use cascade_store::stage::Registry;
use cascade_store::{
    CallOptions, HealthState, Put, PutOutcome, Request, Store, StoreConfig, StoreError,
    ViewOutcome, WritePolicy,
};
use third_party::{MapStage, flush, often, wait_for};

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

/// Lets time pass, a quarter of a second at a time, until a stage is used or not; how long it
/// took.
#[expect(clippy::disallowed_methods, reason = "gives the prober its turn")]
fn pass_until(store: &Store, clock: &ManualClock, is_healthy: bool) -> Duration {
    let began = clock.monotonic();
    let limit = Deadline::after(&SystemClock, Duration::from_secs(120));
    while (state(store, 0) == HealthState::Healthy) != is_healthy {
        assert!(!limit.has_passed(&SystemClock), "{:?}", store.stats().health);
        clock.advance(Duration::from_millis(250));
        std::thread::sleep(Duration::from_millis(2));
    }
    clock.monotonic().saturating_sub(began)
}

fn no_wait() -> CallOptions {
    CallOptions { timeout: Some(Duration::from_secs(20)), ..CallOptions::default() }
}

#[test]
fn a_stage_with_errors_is_shed_after_two_calls_and_is_back_after_one_probe() {
    let (store, stage, clock) = on_clock(dram(4));
    put(&store, &keys(0..128), BLOCK);
    flush(&store);
    stage.fails.store(true, Relaxed);
    assert_eq!(state(&store, 0), HealthState::Healthy);
    let view = store.view(&keys(0..1), CallOptions::default()).remove(0);
    assert!(matches!(view, ViewOutcome::Failed(StoreError::Tier { .. })), "{view:?}");
    // The second call is the next reader's, or a probe that the first failure called for.
    drop(store.view(&keys(1..2), CallOptions::default()));
    let shed_before = store.stats().counters.shed_gets;
    let health = store.stats().health.remove(0).1;
    assert_eq!((health.state, health.opened_count), (HealthState::Open, 1));
    let why = health.last_error.unwrap();
    assert!(why.contains("injected"), "the cause is told too: {why}");
    let loads = stage.loads.load(Relaxed);
    assert_eq!(check(&store, &keys(0..8)), [None; 8], "misses, not failures");
    assert_eq!(stage.loads.load(Relaxed), loads, "and the stage is not asked");
    assert_eq!(store.stats().counters.shed_gets - shed_before, 8);
    assert_eq!(store.contains(&keys(0..1)), [false]);
    let chain = keys(0..4);
    let matched = store.lookup_prefix(&Request::new(&chain));
    assert!(matched.tiers.is_empty(), "{matched:?}");
    let explained = store.explain(&chain, None, CallOptions::default()).unwrap();
    assert_eq!((explained.leading, explained.behind_gap), (0, 0), "{explained:?}");
    assert!(store.reads_at_once(&chain), "a miss needs no tier");
    stage.fails.store(false, Relaxed);
    let took = pass_until(&store, &clock, true);
    assert!(took <= 15 * SECOND, "{took:?}");
    assert_eq!(check(&store, &keys(0..8)), [Some("map"); 8], "no address was forgotten");
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
fn a_stage_that_takes_no_writes_is_read() {
    let (store, stage, clock) = on_clock(dram(4));
    put(&store, &keys(0..128), BLOCK);
    flush(&store);
    stage.fails_writes.store(true, Relaxed);
    pass_until(&store, &clock, false);
    let outcomes = put(&store, &keys(128..136), BLOCK);
    assert!(outcomes.iter().all(|o| matches!(o, PutOutcome::Stored)), "{outcomes:?}");
    store.flush(CallOptions::default()).unwrap_err();
    for _ in 0..8 {
        clock.advance(SECOND);
        assert!(check(&store, &keys(0..128)).iter().all(Option::is_some), "reads go on");
    }
    let (reads, writes) = circuits(&store);
    assert_eq!(reads, HealthState::Healthy);
    assert_ne!(writes, HealthState::Healthy);
    let counters = store.stats().counters;
    assert_eq!((counters.shed_gets, counters.shed_puts), (0, 8));
    stage.fails_writes.store(false, Relaxed);
    pass_until(&store, &clock, true);
    let limit = Deadline::after(&SystemClock, Duration::from_secs(60));
    while stage.stored.load(Relaxed) < 136 {
        assert!(!limit.has_passed(&SystemClock), "{} are stored", stage.stored.load(Relaxed));
        std::thread::yield_now();
    }
}

#[test]
fn a_stage_that_cannot_be_read_is_written() {
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
    pass_until(&store, &clock, true);
    assert_eq!(check(&store, &keys(0..8)), [Some("map"); 8]);
}

#[test]
fn a_stage_that_dies_while_idle_is_found_before_anyone_asks_for_it() {
    let (store, stage, clock) = on_clock(dram(4));
    stage.fails.store(true, Relaxed);
    let took = pass_until(&store, &clock, false);
    assert!(took <= 15 * SECOND, "{took:?}");
    assert_eq!(stage.loads.load(Relaxed), 0);
    stage.fails.store(false, Relaxed);
    let took = pass_until(&store, &clock, true);
    assert!(took <= 15 * SECOND, "{took:?}");
}

#[test]
fn what_was_put_while_a_stage_was_shed_is_written_when_it_is_back() {
    let (store, stage, clock) = on_clock(dram(16));
    stage.fails.store(true, Relaxed);
    put(&store, &keys(0..4), BLOCK);
    pass_until(&store, &clock, false);
    let outcomes = put(&store, &keys(4..20), BLOCK);
    assert!(outcomes.iter().all(|o| matches!(o, PutOutcome::Stored)), "{outcomes:?}");
    let stats = store.stats();
    assert_eq!((stats.pending_bytes, stats.counters.shed_puts), (0, 16));
    let error = store.flush(CallOptions::default()).unwrap_err();
    assert!(matches!(error, StoreError::Tier { tier: "map", .. }), "blocks are missing: {error}");
    stage.fails.store(false, Relaxed);
    pass_until(&store, &clock, true);
    let limit = Deadline::after(&SystemClock, Duration::from_secs(60));
    while stage.stored.load(Relaxed) < 20 {
        assert!(!limit.has_passed(&SystemClock), "{} are stored", stage.stored.load(Relaxed));
        std::thread::yield_now();
    }
    flush(&store);
    for key in keys(0..20) {
        assert_eq!(store.locate(&[key]), [vec!["dram", "map"]]);
    }
}

#[test]
fn one_write_that_failed_is_tried_again_after_a_good_probe() {
    let (store, stage, clock) = on_clock(dram(4));
    stage.fails_stores.store(1, Relaxed);
    put(&store, &keys(0..1), BLOCK);
    store.flush(CallOptions::default()).unwrap_err();
    let limit = Deadline::after(&SystemClock, Duration::from_secs(60));
    while stage.stored.load(Relaxed) == 0 {
        assert!(!limit.has_passed(&SystemClock), "it is never tried again");
        clock.advance(Duration::from_millis(250));
        std::thread::yield_now();
    }
    flush(&store);
    assert_eq!(store.locate(&keys(0..1)), [vec!["dram", "map"]]);
    assert_eq!(store.stats().health[0].1.opened_count, 0);
}

#[test]
fn blocks_that_a_shed_stage_lacks_are_lost_and_counted_when_dram_drops_them() {
    let (store, stage, clock) = on_clock(dram(4));
    stage.fails.store(true, Relaxed);
    pass_until(&store, &clock, false);
    for at in 0..16 {
        let outcomes = put(&store, &keys(at * 8..at * 8 + 8), BLOCK);
        assert!(outcomes.iter().all(|o| matches!(o, PutOutcome::Stored)), "{outcomes:?}");
    }
    let counters = store.stats().counters;
    assert!(counters.evicted_blocks > 0);
    assert_eq!(counters.lost_blocks, counters.evicted_blocks);
    stage.fails.store(false, Relaxed);
    pass_until(&store, &clock, true);
    let served = check(&store, &keys(0..128)).into_iter().flatten().count() as u64;
    assert_eq!(served, 128 - counters.lost_blocks);
}

#[test]
fn a_block_that_only_a_shed_stage_has_comes_back_if_its_digest_says_it_is_the_same() {
    for digest in [DigestMode::Off, DigestMode::On(DigestAlgorithm::Blake3)] {
        let (store, stage, clock) = on_clock(StoreConfig { digest, ..dram(4) });
        put(&store, &keys(0..128), BLOCK);
        flush(&store);
        stage.fails.store(true, Relaxed);
        pass_until(&store, &clock, false);
        // Other bytes under a key that the stage has would come back as the old ones after a kill.
        let other = store.put(&[Put::new(key(1), &vec![7; BLOCK])], no_wait()).remove(0);
        assert!(matches!(other, PutOutcome::Failed(StoreError::Tier { .. })), "{other:?}");
        let outcome = put(&store, &keys(0..1), BLOCK).remove(0);
        if digest == DigestMode::Off {
            assert!(matches!(outcome, PutOutcome::Failed(StoreError::Tier { .. })), "{outcome:?}");
        } else {
            assert!(matches!(outcome, PutOutcome::Stored), "{outcome:?}");
            assert_eq!(check(&store, &keys(0..1)), [Some("dram")]);
        }
        stage.fails.store(false, Relaxed);
        pass_until(&store, &clock, true);
        flush(&store);
        assert_eq!(stage.stored.load(Relaxed), 128, "its address was kept");
        put(&store, &keys(200..400), BLOCK);
        flush(&store);
        assert_eq!(check(&store, &keys(0..2)), [Some("map"); 2], "{digest:?}");
    }
}

#[test]
fn without_dram_a_put_fails_at_once_while_the_stage_is_shed() {
    let (stage, clock) = (MapStage::new(), Arc::new(ManualClock::default()));
    let config = StoreConfig { pipeline: "Map".to_owned(), ..dram(4) };
    let store = Store::open_with(config, &stage.registry(), Arc::clone(&clock) as _).unwrap();
    stage.fails.store(true, Relaxed);
    pass_until(&store, &clock, false);
    let outcomes = put(&store, &keys(0..1), BLOCK);
    assert!(matches!(outcomes[0], PutOutcome::Failed(StoreError::Tier { .. })), "{outcomes:?}");
    assert_eq!(store.stats().keys, 0);
    stage.fails.store(false, Relaxed);
    pass_until(&store, &clock, true);
    put(&store, &keys(0..1), BLOCK);
    assert_eq!(check(&store, &keys(0..1)), [Some("map")]);
}

#[test]
fn a_write_through_put_does_not_wait_for_a_shed_stage() {
    let config = StoreConfig { write: WritePolicy::Through, ..dram(4) };
    let (store, stage, clock) = on_clock(config);
    stage.fails.store(true, Relaxed);
    pass_until(&store, &clock, false);
    for _ in 0..2 {
        let outcomes = put(&store, &keys(0..1), BLOCK);
        assert!(matches!(outcomes[0], PutOutcome::Failed(StoreError::Tier { .. })), "{outcomes:?}");
    }
    assert_eq!(check(&store, &keys(0..1)), [Some("dram")]);
}

#[test]
fn names_deleted_while_a_stage_is_shed_are_gone_there_when_it_is_back() {
    let (store, stage, clock) = on_clock(dram(4));
    put(&store, &keys(0..64), BLOCK);
    flush(&store);
    stage.fails.store(true, Relaxed);
    pass_until(&store, &clock, false);
    assert_eq!(store.delete(&keys(0..64)), [true; 64]);
    stage.fails.store(false, Relaxed);
    pass_until(&store, &clock, true);
    flush(&store);
    assert_eq!(store.stats().stages[0].1.used_bytes, 0);
}

#[test]
fn names_that_a_stage_failed_to_forget_are_told_again_when_it_works() {
    let (store, stage, clock) = on_clock(dram(4));
    put(&store, &keys(0..64), BLOCK);
    flush(&store);
    stage.fails_removes.store(true, Relaxed);
    assert_eq!(store.delete(&keys(0..64)), [true; 64]);
    pass_until(&store, &clock, false);
    stage.fails_removes.store(false, Relaxed);
    pass_until(&store, &clock, true);
    flush(&store);
    let stats = store.stats();
    assert_eq!((stats.stages[0].1.used_bytes, stats.counters.name_failures), (0, 0));
}

/// Two stages: `Map`, which the test breaks, and `Slow` below it, which goes on.
fn two_stages() -> (Store, Arc<MapStage>, Arc<MapStage>) {
    let (broken, sound) = (MapStage::new(), MapStage::new());
    let mut registry: Registry = broken.registry();
    let slow = Arc::clone(&sound);
    registry.register("Slow", Arc::new(move |_| Ok(slow.clone())));
    let pipeline = "Dram|Map|Slow".to_owned();
    let config = StoreConfig { pipeline, health: often(), ..dram(4) };
    let store = Store::open_with(config, &registry, Arc::new(SystemClock)).unwrap();
    (store, broken, sound)
}

#[test]
fn one_of_two_stages_breaks_and_the_other_serves_alone() {
    let (store, broken, sound) = two_stages();
    put(&store, &keys(0..200), BLOCK);
    flush(&store);
    broken.fails.store(true, Relaxed);
    wait_for(&store, 0, false);
    assert_eq!(state(&store, 1), HealthState::Healthy);
    assert!(check(&store, &keys(0..200)).iter().all(Option::is_some), "all from DRAM or below");
    assert!(sound.loads.load(Relaxed) > 0);
    put(&store, &keys(200..400), BLOCK);
    assert!(store.flush(CallOptions::default()).is_err(), "one of them lacks blocks");
    assert_eq!(sound.stored.load(Relaxed), 400);
    let counters = store.stats().counters;
    assert_eq!((counters.shed_gets, counters.lost_blocks), (0, 0));
    assert!(check(&store, &keys(0..400)).iter().all(Option::is_some));
}

fn a_hung_stage_costs_nobody(write: WritePolicy) {
    let stage = MapStage::new();
    let health =
        cascade_store::HealthConfig { probe_timeout: Duration::from_millis(50), ..often() };
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
    // Whoever asked it before it is shed is let go when it is: no hour passes in this test.
    std::thread::scope(|scope| {
        for at in 0..4 {
            let store = &store;
            scope.spawn(move || {
                let view = store.view(&keys(at..at + 1), hourly).remove(0);
                assert!(matches!(view, ViewOutcome::Miss), "{view:?}");
            });
        }
    });
    wait_for(&store, 0, false);
    // Puts go on beyond what may wait to be written, and what is elsewhere is read.
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
    assert!(store.flush(hourly).is_err(), "a shed stage is not waited for");
    if write == WritePolicy::Back {
        drop(released);
        wait_for(&store, 0, true);
        assert!(check(&store, &keys(0..300)).iter().all(Option::is_some), "it is all there");
    }
    drop(store.close());
}

#[test]
fn a_stage_that_ignores_its_deadlines_holds_up_nobody() {
    a_hung_stage_costs_nobody(WritePolicy::Back);
}

#[test]
fn a_stage_that_ignores_its_deadlines_holds_up_no_write_through_and_no_close() {
    a_hung_stage_costs_nobody(WritePolicy::Through);
}

#[test]
fn slabs_stay_with_a_call_that_hangs_until_it_ends() {
    let stage = MapStage::new();
    let health =
        cascade_store::HealthConfig { probe_timeout: Duration::from_millis(50), ..often() };
    let pipeline = "Dram|Map".to_owned();
    let config = StoreConfig { pipeline, health, ..dram(4) };
    let store = Store::open_with(config, &stage.registry(), Arc::new(SystemClock)).unwrap();
    put(&store, &keys(0..200), BLOCK);
    flush(&store);
    let released = stage.hang();
    assert_eq!(check(&store, &keys(0..2)), [None; 2]);
    wait_for(&store, 0, false);
    store.clear();
    let held = store.stats().pool.requested_bytes;
    assert!(held >= 2 * BLOCK, "{held} bytes are with the hung calls");
    // The rest of DRAM is written anew, several times: were the slabs given out again, the late
    // calls below would write into blocks of others.
    for round in 0..8 {
        put(&store, &keys(1000 + round * 100..1100 + round * 100), BLOCK);
    }
    drop(released);
    wait_for(&store, 0, true);
    let limit = Deadline::after(&SystemClock, Duration::from_secs(60));
    while store.stats().health[0].1.stuck_calls > 0 {
        assert!(!limit.has_passed(&SystemClock));
        std::thread::yield_now();
    }
    let found = check(&store, &keys(1000..1800));
    assert!(found.iter().any(Option::is_some), "and every byte of them is right");
}

#[test]
fn closing_does_not_wait_for_a_stage_that_hangs_in_close() {
    let stage = MapStage::new();
    let timeout = Duration::from_millis(100);
    let pipeline = "Dram|Map".to_owned();
    let config = StoreConfig { pipeline, timeout, health: often(), ..dram(4) };
    let store = Store::open_with(config, &stage.registry(), Arc::new(SystemClock)).unwrap();
    put(&store, &keys(0..4), BLOCK);
    flush(&store);
    let _held = stage.hang();
    store.close().unwrap_err();
    let outcome = store.put(&[Put::new(key(9), b"late")], no_wait()).remove(0);
    assert!(matches!(outcome, PutOutcome::Failed(StoreError::Closed)), "{outcome:?}");
}
