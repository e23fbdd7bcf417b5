//! Batches of many keys end by their deadline, with an outcome for each block.
//!
//! A put of 40,000 keys with equal leading bytes and a timeout of 1 s took 8.4 s under one lock.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_runtime::Clock;
use cascade_store::stages::StageRegistry;
use cascade_store::{
    CallOptions, GetOutcome, HoldRecorder, PrepareOutcome, Put, PutOutcome, PutSlab, Store,
    StoreConfig, StoreError, ViewOutcome,
};

use crate::blocks::dram;

const BLOCKS: usize = 40_000;

/// A clock that advances by `step` milliseconds with each reading.
#[derive(Debug, Default)]
struct SteppingClock {
    now: AtomicU64,
    step: AtomicU64,
}

impl Clock for SteppingClock {
    fn monotonic(&self) -> Duration {
        let step = self.step.load(Ordering::SeqCst);
        Duration::from_millis(self.now.fetch_add(step, Ordering::SeqCst))
    }

    fn unix_ms(&self) -> u64 {
        1_000_000
    }
}

/// Keys with equal first eight bytes.
fn adversarial() -> Vec<BlockKey> {
    let key = |number: usize| {
        let mut bytes = [0xab; 32];
        bytes[8..16].copy_from_slice(&(number as u64).to_le_bytes());
        BlockKey::from_bytes(bytes)
    };
    (0..BLOCKS).map(key).collect()
}

fn open() -> (Store, Arc<SteppingClock>) {
    let clock = Arc::new(SteppingClock::default());
    let config = StoreConfig { hash_seed: Some(7), ..dram(16) };
    let store = Store::open_with(config, &StageRegistry::default(), clock.clone()).unwrap();
    (store, clock)
}

fn bytes_of(key: &BlockKey) -> [u8; 8] {
    key.as_bytes()[8..16].try_into().unwrap()
}

/// Counts the outcomes before the deadline and checks that all later ones are timeouts.
fn count_in_time<T>(
    outcomes: &[T],
    is_done: impl Fn(&T) -> bool,
    is_timeout: impl Fn(&T) -> bool,
) -> usize {
    assert_eq!(outcomes.len(), BLOCKS, "an outcome for each block");
    let done = outcomes.iter().take_while(|it| is_done(it)).count();
    assert!(outcomes[done..].iter().all(is_timeout), "the rest timed out");
    assert!(0 < done && done < BLOCKS, "{done}");
    done
}

fn is_timeout(error: &StoreError) -> bool {
    matches!(error, StoreError::Timeout { .. })
}

#[test]
fn every_batch_ends_by_its_deadline() {
    let (store, clock) = open();
    let keys = adversarial();
    let bytes: Vec<_> = keys.iter().map(bytes_of).collect();
    let puts: Vec<_> = keys.iter().zip(&bytes).map(|(key, bytes)| Put::new(*key, bytes)).collect();
    let within = |time_ms| {
        let timeout = Some(Duration::from_millis(time_ms));
        CallOptions { timeout, ..Default::default() }
    };
    let is_put_timeout =
        |outcome: &PutOutcome| matches!(outcome, PutOutcome::Failed(e) if is_timeout(e));

    clock.step.store(1, Ordering::SeqCst);
    let outcomes = store.put(&puts, within(40));
    let stored = count_in_time(&outcomes, |it| matches!(it, PutOutcome::Stored), is_put_timeout);
    assert_eq!(store.stats().counters.put_failures, (BLOCKS - stored) as u64);

    // With a stopped clock, so that all blocks are stored for the reads below.
    clock.step.store(0, Ordering::SeqCst);
    store.put(&puts, within(40));
    assert!(store.contains(&keys).iter().all(|is_here| *is_here));

    clock.step.store(1, Ordering::SeqCst);
    // 157 holds of 256 keys to look all of them up, then as many to compare their bytes.
    let present = store.put(&puts, within(500));
    count_in_time(&present, |it| matches!(it, PutOutcome::Present), is_put_timeout);
    let views = store.view(&keys, within(40));
    count_in_time(
        &views,
        |it| matches!(it, ViewOutcome::Hit { .. }),
        |it| matches!(it, ViewOutcome::Failed(error) if is_timeout(error)),
    );
    for (key, view) in keys.iter().zip(&views) {
        let right = bytes_of(key);
        assert!(!matches!(view, ViewOutcome::Hit { slab, .. } if slab.host() != Some(&right[..])));
    }
    drop(views);
    let mut memory = vec![[0_u8; 8]; BLOCKS];
    let mut buffers: Vec<&mut [u8]> = memory.iter_mut().map(|it| &mut it[..]).collect();
    let gets = store.get(&keys, &mut buffers, within(40));
    count_in_time(
        &gets,
        |it| matches!(it, GetOutcome::Hit { .. }),
        |it| matches!(it, GetOutcome::Failed(error) if is_timeout(error)),
    );

    // Blocks in DRAM are returned even with a timeout of zero.
    let at_once = CallOptions { timeout: Some(Duration::ZERO), ..Default::default() };
    let views = store.view(&keys, at_once);
    assert!(views.iter().all(|view| matches!(view, ViewOutcome::Hit { .. })));
    drop(views);

    // Pins and deletions have no deadline, because a partial result would be worse than a late one.
    // They release the lock from time to time.
    assert!(store.pin(&keys).iter().all(|is_pinned| *is_pinned));
    assert!(store.unpin(&keys).iter().all(|was_pinned| *was_pinned));
    assert!(store.delete(&keys).iter().all(|is_deleted| *is_deleted));
    assert_eq!(store.stats().keys, 0);
}

/// A late put counted each of its blocks in a hold of the lock for 256 of them.
#[test]
fn a_put_of_many_keys_handles_few_of_them_after_its_deadline() {
    let clock = Arc::new(SteppingClock::default());
    let holds = HoldRecorder::new();
    let config = StoreConfig { hash_seed: Some(7), holds: Some(holds.clone()), ..dram(16) };
    let store = Store::open_with(config, &StageRegistry::default(), clock.clone()).unwrap();
    let keys = adversarial();
    let bytes: Vec<_> = keys.iter().map(bytes_of).collect();
    let puts: Vec<_> = keys.iter().zip(&bytes).map(|(key, bytes)| Put::new(*key, bytes)).collect();
    let second = CallOptions { timeout: Some(Duration::from_secs(1)), ..Default::default() };
    clock.step.store(5, Ordering::SeqCst);
    holds.take();
    let outcomes = store.put(&puts, second);
    let stored = count_in_time(
        &outcomes,
        |it| matches!(it, PutOutcome::Stored),
        |it| matches!(it, PutOutcome::Failed(error) if is_timeout(error)),
    );
    // Each block is looked up and published, those of one round are looked up in vain, and some
    // are noted in the history.
    let handled: u64 = holds.take().iter().map(|hold| hold.keys).sum();
    let most = 2 * stored + 64 + 256;
    assert!(handled <= most as u64, "{handled} keys were handled for {stored} in time");
    assert_eq!(store.stats().counters.put_failures, (BLOCKS - stored) as u64);
    assert_eq!(store.contains(&keys).iter().filter(|is_here| **is_here).count(), stored);
}

#[test]
fn a_prepared_batch_ends_by_its_deadline() {
    let (store, clock) = open();
    let keys = adversarial();
    let options = CallOptions { timeout: Some(Duration::from_millis(40)), ..Default::default() };
    let puts: Vec<_> = keys.iter().map(|key| Put::new(*key, &[])).collect();
    clock.step.store(1, Ordering::SeqCst);
    let prepared = store.prepare_all(&puts, &vec![8; BLOCKS], options);
    count_in_time(
        &prepared,
        |it| matches!(it, PrepareOutcome::Slab(_)),
        |it| matches!(it, PrepareOutcome::Settled(PutOutcome::Failed(error)) if is_timeout(error)),
    );
    drop(prepared);

    let reserve = |key: &BlockKey| {
        let mut slab = store.reserve(8, CallOptions::default()).unwrap();
        slab.fill_from(&bytes_of(key)).unwrap();
        PutSlab::new(*key, slab)
    };
    let slabs = keys.iter().map(reserve).collect();
    let outcomes = store.put_slabs(slabs, options);
    count_in_time(
        &outcomes,
        |it| matches!(it, PutOutcome::Stored),
        |it| matches!(it, PutOutcome::Failed(error) if is_timeout(error)),
    );
}

/// Without a seed for fingerprints, a put of 40,000 such keys took 8.4 s.
#[test]
fn keys_with_equal_leading_bytes_are_stored_found_and_deleted_with_a_random_seed() {
    let store = Store::open(dram(16)).unwrap();
    let keys = adversarial();
    let bytes: Vec<_> = keys.iter().map(bytes_of).collect();
    let puts: Vec<_> = keys.iter().zip(&bytes).map(|(key, bytes)| Put::new(*key, bytes)).collect();
    let outcomes = store.put(&puts, CallOptions::default());
    assert!(outcomes.iter().all(|it| matches!(it, PutOutcome::Stored)));
    let request = cascade_store::Request::new(&keys);
    assert_eq!(store.lookup_prefix(&request).tiers.len(), BLOCKS);
    assert!(store.delete(&keys).iter().all(|is_deleted| *is_deleted));
}
