//! How often calls take the lock and look keys up. Nothing here measures time.

use cascade_tier::{PrepareOutcome, Put, PutOutcome, PutSlab, StoreError};

use super::*;
use crate::core::catalog::PROBES;
use crate::{HoldRecorder, StoreConfig};

const BYTES: usize = 64;

/// A store without threads that take its lock, and the recorder of its holds.
fn open() -> (Store, HoldRecorder) {
    let holds = HoldRecorder::new();
    let config = StoreConfig {
        dram_bytes: 8 << 20,
        huge_pages: false,
        holds: Some(holds.clone()),
        scrub_bytes_per_second: None,
        ..StoreConfig::default()
    };
    (Store::open(config).unwrap(), holds)
}

fn keys(count: u32) -> Vec<BlockKey> {
    let key = |number: u32| {
        let mut bytes = [7; 32];
        bytes[..4].copy_from_slice(&number.to_le_bytes());
        BlockKey::from_bytes(bytes)
    };
    (0..count).map(key).collect()
}

/// The chain of these keys: each follows the one before it.
fn chain<'a>(keys: &[BlockKey], bytes: &'a [u8]) -> Vec<Put<'a>> {
    let parent = |at: usize| at.checked_sub(1).map(|before| keys[before]);
    let put = |(at, key): (usize, &BlockKey)| Put { parent: parent(at), ..Put::new(*key, bytes) };
    keys.iter().enumerate().map(put).collect()
}

/// The result of a call, how often it took the lock, and how many keys it looked up.
fn counted<T>(holds: &HoldRecorder, call: impl FnOnce() -> T) -> (T, usize, u64) {
    holds.take();
    PROBES.set(0);
    let result = call();
    (result, holds.take().len(), PROBES.get())
}

fn are_hits(views: &[ViewOutcome]) -> bool {
    views.iter().all(|view| matches!(view, ViewOutcome::Hit { slab, .. } if slab.len() == BYTES))
}

/// A served acquire of 256 blocks took the lock four times and looked each key up three times.
#[test]
fn views_and_lookups_take_the_lock_once_and_look_each_key_up_once() {
    let (store, holds) = open();
    let keys = keys(256);
    store.put(&chain(&keys, &[1; BYTES]), CallOptions::default());
    let request = Request::new(&keys);
    let not_below = |_: &[BlockKey]| panic!("every block is in memory");
    let (views, locks, probes) =
        counted(&holds, || store.acquire_with(&request, CallOptions::default(), true, not_below));
    assert_eq!((views.len(), locks, probes), (256, 1, 256));
    assert!(are_hits(&views), "{views:?}");
    let (views, locks, probes) = counted(&holds, || store.view(&keys, CallOptions::default()));
    assert_eq!((views.len(), locks, probes), (256, 1, 256));
    assert!(are_hits(&views), "{views:?}");
    let (views, locks, probes) =
        counted(&holds, || store.own().peek(&keys, CallOptions::default()));
    assert_eq!((views.len(), locks, probes), (256, 1, 256));
    assert!(are_hits(&views), "{views:?}");
    let (matched, locks, probes) = counted(&holds, || store.lookup_prefix(&request));
    assert_eq!((matched.tiers.len(), locks, probes), (256, 1, 256));
    let counters = store.stats().counters;
    assert_eq!((counters.gets, counters.hits, counters.misses), (512, 512, 0));
    assert_eq!((counters.requests, counters.blocks_matched), (2, 512));
    assert_eq!((counters.direct_requested, counters.direct_matched), (0, 0));
}

/// A served put of 256 blocks took the lock seven times and looked each key up eight times.
#[test]
fn each_phase_of_a_put_takes_the_lock_once_and_looks_each_key_up_once() {
    let (store, holds) = open();
    let keys = keys(256);
    let (puts, lengths) = (chain(&keys, &[]), vec![BYTES; keys.len()]);
    let prepare = || store.prepare(&puts, &lengths, usize::MAX, CallOptions::default());
    let (prepared, locks, probes) = counted(&holds, prepare);
    assert_eq!((locks, probes), (1, 256));
    let slab = |(put, prepared): (&Put<'_>, PrepareOutcome)| {
        let PrepareOutcome::Slab(mut slab) = prepared else { panic!("{prepared:?}") };
        slab.host_mut().unwrap().fill(3);
        PutSlab { parent: put.parent, ..PutSlab::new(put.key, slab) }
    };
    let batch: Vec<PutSlab> = puts.iter().zip(prepared).map(slab).collect();
    let refuse = || panic!("new blocks wait for no tier");
    let (outcomes, locks, probes) =
        counted(&holds, || store.put_slabs_with(batch, CallOptions::default(), refuse));
    assert_eq!((locks, probes), (1, 256));
    assert!(outcomes.iter().all(|one| matches!(one, PutOutcome::Stored)), "{outcomes:?}");
    let counters = store.stats().counters;
    assert_eq!((counters.puts, counters.stored), (256, 256));
    assert_eq!(store.lookup_prefix(&Request::new(&keys)).tiers.len(), 256);
}

/// The parts of a long batch are bounded; each key is still looked up once.
#[test]
fn long_batches_take_the_lock_once_for_256_keys() {
    let (store, holds) = open();
    let keys = keys(1000);
    store.put(&chain(&keys, &[1; BYTES]), CallOptions::default());
    let (views, locks, probes) = counted(&holds, || store.view(&keys, CallOptions::default()));
    assert_eq!((views.len(), locks, probes), (1000, 4, 1000));
    assert!(are_hits(&views));
    let request = Request::new(&keys);
    let not_below = |_: &[BlockKey]| panic!("every block is in memory");
    let (views, locks, probes) =
        counted(&holds, || store.acquire_with(&request, CallOptions::default(), true, not_below));
    // Eight for the report to the eviction policy, which visits each block twice.
    assert_eq!((views.len(), locks, probes), (1000, 4 + 8, 1000));
    assert!(are_hits(&views), "{views:?}");
    let (matched, locks, probes) = counted(&holds, || store.lookup_prefix(&request));
    assert_eq!((matched.tiers.len(), locks, probes), (1000, 4 + 8, 1000));
    let counters = store.stats().counters;
    assert_eq!((counters.gets, counters.hits), (2000, 2000));
    assert_eq!((counters.requests, counters.blocks_matched), (2, 2000));
}

#[test]
fn expired_blocks_and_gaps_end_a_match() {
    let (store, _) = open();
    let keys = keys(8);
    let mut puts = chain(&keys, &[1; BYTES]);
    puts[5].ttl_ms = Some(0);
    store.put(&puts, CallOptions::default());
    let views = store.acquire_with(&Request::new(&keys), CallOptions::default(), true, |_| {
        panic!("no block is below")
    });
    assert!(views.len() == 5 && are_hits(&views), "{views:?}");
    let views = store.view_resident(&keys, CallOptions::default());
    let misses: Vec<usize> = (0..8).filter(|at| matches!(views[*at], ViewOutcome::Miss)).collect();
    assert_eq!(misses, [5]);
    let counters = store.stats().counters;
    assert_eq!((counters.gets, counters.hits, counters.misses), (13, 12, 1));
    store.close().unwrap();
    assert!(store.acquire(&Request::new(&keys), CallOptions::default()).is_empty());
    let closed = store.view(&keys, CallOptions::default());
    assert!(closed.iter().all(|view| matches!(view, ViewOutcome::Failed(StoreError::Closed))));
}
