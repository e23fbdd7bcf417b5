//! Faults of a source: each block has exactly one outcome, by the deadline, and never other bytes.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_store::{
    CallOptions, HealthConfig, Request, SourceList, Store, StoreConfig, StoreError, ViewOutcome,
};

use crate::blocks::{bytes_of, check, dram, key, keys, put, wait_until};
use crate::map_source::{Fault, MapSource, open, stats_of, wait_for};

const BLOCK: usize = 64 << 10;
/// The deadline of calls that miss it, in which they have read DRAM and asked a source. It is
/// shorter than the timeout of a probe: the source has failed no call that had enough time.
const SHORT: Duration = Duration::from_secs(2);

/// No circuit opens in these tests, unless it is what they are about.
fn lenient() -> StoreConfig {
    let health = HealthConfig { window: 64, threshold: 64, ..HealthConfig::default() };
    StoreConfig { health, ..dram(16) }
}

fn view(store: &Store, keys: &[BlockKey]) -> Vec<ViewOutcome> {
    store.view(keys, CallOptions::default())
}

/// Whether no call holds a slab.
fn has_only_dram(store: &Store) -> bool {
    let stats = store.stats();
    stats.pool.reserved_bytes as u64 == stats.dram_bytes
}

/// The outcome of each block in a word; checks every byte.
fn outcomes(store: &Store, keys: &[BlockKey]) -> Vec<&'static str> {
    let views = view(store, keys);
    assert_eq!(views.len(), keys.len());
    let in_a_word = |(key, view): (&BlockKey, ViewOutcome)| match view {
        ViewOutcome::Hit { slab, .. } => {
            assert!(slab.host() == Some(&bytes_of(key, slab.len())[..]), "wrong bytes for {key}");
            "hit"
        }
        ViewOutcome::Miss => "miss",
        ViewOutcome::Failed(_) => "failed",
    };
    keys.iter().zip(views).map(in_a_word).collect()
}

#[test]
fn each_fault_of_a_source_concerns_its_block_alone() {
    for (fault, expected, counts) in [
        (Fault::Gone, "miss", (1, 0, 0)),
        (Fault::Flipped, "miss", (0, 1, 0)),
        (Fault::Short, "miss", (0, 1, 0)),
        (Fault::Fails, "failed", (0, 0, 1)),
        (Fault::Never, "failed", (0, 0, 1)),
        (Fault::Twice, "hit", (0, 0, 0)),
        (Fault::Unasked, "hit", (0, 0, 0)),
    ] {
        let source = MapSource::new("peers");
        let keys = keys(0..5);
        source.add(&keys, BLOCK);
        source.set_fault(&keys[2], Some(fault));
        let store = open(lenient(), &[&source]);
        let all = outcomes(&store, &keys);
        assert_eq!(all, ["hit", "hit", expected, "hit", "hit"], "{fault:?}");
        let stats = stats_of(&store, 0);
        let counted = (stats.stale_blocks, stats.damaged_blocks, stats.failed_blocks);
        assert_eq!(counted, counts, "{fault:?}");
        assert_eq!(store.stats().counters.damaged_blocks, counts.1);
        source.set_fault(&keys[2], None);
        assert_eq!(outcomes(&store, &keys), ["hit"; 5], "after {fault:?}");
        drop(store);
    }
}

#[test]
fn a_source_that_panics_loses_only_its_blocks() {
    let source = MapSource::new("peers");
    let keys = keys(0..6);
    source.add(&keys[1..], BLOCK);
    source.set_fault(&keys[3], Some(Fault::Panics));
    let store = open(lenient(), &[&source]);
    put(&store, &keys[..1], BLOCK);
    let all = outcomes(&store, &keys);
    assert_eq!(all, ["hit", "hit", "hit", "failed", "failed", "failed"]);
    source.set_fault(&keys[3], None);
    assert_eq!(outcomes(&store, &keys), ["hit"; 6]);
    assert_eq!(store.stats().pool.reserved_bytes as u64, store.stats().dram_bytes);
}

#[test]
fn a_stale_answer_is_a_miss_and_is_not_used_again() {
    let source = MapSource::new("peers");
    let keys = keys(0..3);
    source.add(&keys, BLOCK);
    let store = open(lenient(), &[&source]);
    assert_eq!(store.lookup_prefix(&Request::new(&keys)).tiers, ["peers"; 3]);
    source.remove(&keys[1]);
    assert_eq!(outcomes(&store, &keys), ["hit", "miss", "hit"]);
    assert_eq!(stats_of(&store, 0).stale_blocks, 1);
    assert_eq!(outcomes(&store, &keys), ["hit", "miss", "hit"]);
    assert_eq!(stats_of(&store, 0).stale_blocks, 1, "the second read has asked again");
}

#[test]
fn another_source_is_read_if_one_fails() {
    for fault in [Fault::Gone, Fault::Flipped, Fault::Fails, Fault::Never] {
        let [near, far] = ["near", "far"].map(MapSource::new);
        near.add(&keys(0..2), BLOCK);
        far.add(&keys(0..2), BLOCK);
        near.set_fault(&key(0), Some(fault));
        far.set_fault(&key(1), Some(fault));
        let store = open(lenient(), &[&near, &far]);
        assert_eq!(outcomes(&store, &keys(0..2)), ["hit"; 2], "{fault:?}");
    }
}

#[test]
fn answers_that_fit_no_question_are_not_used() {
    let source = MapSource::new("peers");
    source.add(&keys(0..3), BLOCK);
    let store = open(lenient(), &[&source]);
    source.answers_short.store(true, Relaxed);
    assert_eq!(outcomes(&store, &keys(0..3)), ["miss"; 3]);
    source.answers_short.store(false, Relaxed);
    source.confused.lock().unwrap().insert(key(1));
    assert_eq!(outcomes(&store, &keys(0..3)), ["miss"; 3]);
    source.confused.lock().unwrap().clear();
    source.locate_panics.store(true, Relaxed);
    assert_eq!(outcomes(&store, &keys(0..3)), ["miss"; 3]);
    source.locate_panics.store(false, Relaxed);
    assert_eq!(outcomes(&store, &keys(0..3)), ["hit"; 3]);
}

#[test]
fn a_source_that_takes_no_block_fails_them() {
    let source = MapSource::new("peers");
    source.add(&keys(0..3), BLOCK);
    let store = open(lenient(), &[&source]);
    source.takes_nothing.store(true, Relaxed);
    assert_eq!(outcomes(&store, &keys(0..3)), ["failed"; 3]);
    source.takes_nothing.store(false, Relaxed);
    assert_eq!(outcomes(&store, &keys(0..3)), ["hit"; 3]);
}

/// A source that does not say which blocks it has costs a read the time-out of that question, and
/// not the time-out of the call.
#[test]
fn a_source_that_does_not_answer_counts_as_empty() {
    let source = MapSource::new("peers");
    source.add(&keys(0..4), BLOCK);
    let sources = SourceList::new(vec![Arc::clone(&source) as Arc<_>]);
    let locate_timeout = Duration::from_millis(20);
    let store = Store::open(StoreConfig { sources, locate_timeout, ..lenient() }).unwrap();
    put(&store, &keys(0..2), BLOCK);
    let held = source.hold_locates();
    assert_eq!(outcomes(&store, &keys(0..4)), ["hit", "hit", "miss", "miss"]);
    assert_eq!(store.lookup_prefix(&Request::new(&keys(0..4))).tiers, ["dram"; 2]);
    drop(held);
    wait_until("the late answers are in", || stats_of(&store, 0).health.stuck_calls == 0);
}

/// A fetch that takes longer than the call: the call ends in time, with the blocks that it has, and
/// the source learns that it was cancelled.
#[test]
fn a_call_ends_at_its_deadline_while_a_source_fetches() {
    let source = MapSource::new("peers");
    source.add(&keys(2..4), BLOCK);
    let store = open(lenient(), &[&source]);
    put(&store, &keys(0..2), BLOCK);
    let held = source.hold_fetches();
    let options = CallOptions { timeout: Some(SHORT), ..Default::default() };
    let views = store.view(&keys(0..4), options);
    assert!(matches!(views[0], ViewOutcome::Hit { tier: "dram", .. }), "{views:?}");
    assert!(matches!(views[1], ViewOutcome::Hit { tier: "dram", .. }), "{views:?}");
    for late in &views[2..] {
        assert!(matches!(late, ViewOutcome::Failed(StoreError::Timeout { .. })), "{late:?}");
    }
    wait_until("its slabs are free", || has_only_dram(&store));
    drop(held);
    drop(views);
    assert_eq!(outcomes(&store, &keys(0..4)), ["hit"; 4]);
}

/// It ignores deadline and cancellation. Its slabs stay with the call until it ends.
#[test]
fn a_call_ends_at_its_deadline_while_a_source_hangs() {
    let source = MapSource::new("peers");
    source.add(&keys(2..4), BLOCK);
    source.ignores_limits.store(true, Relaxed);
    let store = open(lenient(), &[&source]);
    put(&store, &keys(0..2), BLOCK);
    let held = source.hold_fetches();
    let options = CallOptions { timeout: Some(SHORT), ..Default::default() };
    let views = store.view(&keys(0..4), options);
    assert!(matches!(views[1], ViewOutcome::Hit { tier: "dram", .. }), "{views:?}");
    assert!(matches!(views[2], ViewOutcome::Failed(StoreError::Timeout { .. })), "{views:?}");
    assert_eq!(stats_of(&store, 0).health.stuck_calls, 1);
    assert!(!has_only_dram(&store));
    drop(held);
    wait_until("the late call has ended", || stats_of(&store, 0).health.stuck_calls == 0);
    wait_until("its slabs are free", || has_only_dram(&store));
    // What came late was not taken for a block of another call.
    assert_eq!(outcomes(&store, &keys(0..4)), ["hit"; 4]);
}

#[test]
fn a_call_without_time_does_not_ask_a_source() {
    let source = MapSource::new("peers");
    source.add(&keys(0..2), BLOCK);
    let store = open(lenient(), &[&source]);
    let options = CallOptions { timeout: Some(Duration::ZERO), ..Default::default() };
    let views = store.view(&keys(0..2), options);
    assert!(views.iter().all(|view| matches!(view, ViewOutcome::Miss)), "{views:?}");
    assert_eq!(source.locate_calls.load(Relaxed), 0);
}

#[test]
fn the_circuit_of_a_source_that_fails_opens_and_closes() {
    let source = MapSource::new("peers");
    source.add(&keys(0..40), BLOCK);
    let health =
        HealthConfig { probe_interval: Duration::from_millis(20), ..HealthConfig::default() };
    let store = open(StoreConfig { health, ..dram(16) }, &[&source]);
    source.fails.store(true, Relaxed);
    for key in keys(0..4) {
        outcomes(&store, &[key]);
    }
    wait_for(&store, 0, false);
    let asked = source.locate_calls.load(Relaxed);
    assert_eq!(check(&store, &keys(0..40)), [None; 40]);
    assert_eq!(source.locate_calls.load(Relaxed), asked, "only probes call it");
    source.fails.store(false, Relaxed);
    wait_for(&store, 0, true);
    assert_eq!(check(&store, &keys(0..40)), [Some("peers"); 40]);
    let health = stats_of(&store, 0).health;
    assert_eq!(health.opened_count, 1);
    assert!(health.last_error.unwrap().contains("injected"));
}

/// The reader has a long time-out: it does not wait for it.
#[test]
fn a_circuit_that_opens_ends_the_waits_for_a_source_that_hangs() {
    let source = MapSource::new("peers");
    source.add(&keys(1..3), BLOCK);
    source.ignores_limits.store(true, Relaxed);
    let health = HealthConfig {
        probe_interval: Duration::from_millis(20),
        probe_timeout: Duration::from_secs(1),
        ..HealthConfig::default()
    };
    let config = StoreConfig { health, timeout: Duration::from_secs(600), ..dram(16) };
    let store = open(config, &[&source]);
    put(&store, &keys(0..1), BLOCK);
    let held = source.hold_fetches();
    assert_eq!(outcomes(&store, &keys(0..3)), ["hit", "miss", "miss"]);
    assert_eq!(store.stats().counters.shed_gets, 2);
    drop(held);
    wait_for(&store, 0, true);
    assert_eq!(outcomes(&store, &keys(0..3)), ["hit"; 3]);
}

#[test]
fn closing_a_store_ends_the_waits_for_its_sources() {
    let source = MapSource::new("peers");
    source.add(&keys(0..3), BLOCK);
    let config = StoreConfig { timeout: Duration::from_secs(600), ..lenient() };
    let store = open(config, &[&source]);
    let held = source.hold_fetches();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| view(&store, &keys(0..3)));
        held.wait_until_reached();
        store.close().unwrap();
        let views = reader.join().unwrap();
        let is_hit = |view: &ViewOutcome| matches!(view, ViewOutcome::Hit { .. });
        assert!(!views.iter().any(is_hit), "{views:?}");
    });
    wait_until("the fetch is cancelled", || source.cancelled.load(Relaxed) > 0);
    assert!(source.closed.load(Relaxed));
}

/// Readers that wait for the fetch of another one do not fail with it.
#[test]
fn a_reader_whose_fetch_times_out_leaves_the_block_to_others() {
    let source = MapSource::new("peers");
    source.add(&keys(0..1), BLOCK);
    let store = open(lenient(), &[&source]);
    let held = source.hold_fetches();
    let short = CallOptions { timeout: Some(SHORT), ..Default::default() };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| store.view(&keys(0..1), short));
        held.wait_until_reached();
        let second = scope.spawn(|| outcomes(&store, &keys(0..1)));
        assert!(matches!(first.join().unwrap()[0], ViewOutcome::Failed(_)));
        drop(held);
        assert_eq!(second.join().unwrap(), ["hit"]);
    });
}
