//! Blocks that only a source has: lookups, reads, faults.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

mod blocks;
mod map_source;

use std::sync::atomic::Ordering::Relaxed;

use cascade_store::{CallOptions, GetOutcome, Request, Store, StoreConfig, ViewOutcome};

use blocks::{bytes_of, check, dram, key, keys, put};
use map_source::{MapSource, open, stats_of};

const BLOCK: usize = 64 << 10;

fn get(store: &Store, key: &cascade_block::BlockKey, bytes: usize) -> GetOutcome {
    let mut buffer = vec![0; bytes];
    let outcome = store.get(&[*key], &mut [&mut buffer], CallOptions::default()).remove(0);
    if let GetOutcome::Hit { bytes, .. } = outcome {
        assert!(buffer[..bytes] == *bytes_of(key, bytes), "wrong bytes");
    }
    outcome
}

/// The sums that statistics promise.
fn assert_sums(store: &Store) {
    let stats = store.stats();
    let counters = stats.counters;
    let hits: u64 = stats.hits_by_tier.iter().map(|tier| tier.blocks).sum();
    assert_eq!(hits, counters.hits, "{stats:?}");
    assert_eq!(counters.hits + counters.misses + counters.get_failures, counters.gets);
    let matched: u64 = stats.hits_by_tier.iter().map(|tier| tier.matched_blocks).sum();
    assert_eq!(matched, counters.matched(), "{stats:?}");
    assert!(counters.matched() <= counters.requested(), "{counters:?}");
}

#[test]
fn a_block_that_only_a_source_has_is_fetched_and_kept() {
    let source = MapSource::new("peers");
    let keys = keys(0..4);
    source.add(&keys[..3], BLOCK);
    let store = open(dram(16), &[&source]);
    assert!(matches!(get(&store, &keys[0], BLOCK), GetOutcome::Hit { tier: "peers", .. }));
    assert!(matches!(get(&store, &keys[0], BLOCK), GetOutcome::Hit { tier: "dram", .. }));
    assert_eq!(check(&store, &keys), [Some("dram"), Some("peers"), Some("peers"), None]);
    assert_eq!(check(&store, &keys[..3]), [Some("dram"); 3]);
    assert_eq!(source.fetched.load(Relaxed), 3);
    let stats = stats_of(&store, 0);
    assert_eq!((stats.fetched_blocks, stats.fetched_bytes), (3, 3 * BLOCK as u64));
    assert_eq!(store.stats().counters.promoted_blocks, 3);
    assert_sums(&store);
}

#[test]
fn a_lookup_matches_the_rest_of_a_chain_in_a_source() {
    let source = MapSource::new("peers");
    let keys = keys(0..8);
    let store = open(dram(16), &[&source]);
    put(&store, &keys[..3], BLOCK);
    put(&store, &keys[5..6], BLOCK);
    source.add(&keys[3..5], BLOCK);
    source.add(&keys[6..7], BLOCK);
    let matched = store.lookup_prefix(&Request::new(&keys));
    assert_eq!(matched.tiers, ["dram", "dram", "dram", "peers", "peers", "dram", "peers"]);
    assert_eq!(source.located.load(Relaxed), 4, "only what the own catalog does not have");
    let views = store.view(&keys[..7], CallOptions::default());
    assert!(views.iter().all(|view| matches!(view, ViewOutcome::Hit { .. })), "{views:?}");
    assert_eq!(source.locate_calls.load(Relaxed), 1, "the read uses the answer of the lookup");
    let counters = store.stats().counters;
    assert_eq!((counters.blocks_requested, counters.blocks_matched), (8, 7));
    assert_eq!((counters.direct_requested, counters.direct_matched), (0, 0));
    assert_sums(&store);
}

#[test]
fn acquiring_a_chain_returns_views_of_blocks_in_sources() {
    let source = MapSource::new("peers");
    let keys = keys(0..6);
    let store = open(dram(16), &[&source]);
    put(&store, &keys[..2], BLOCK);
    source.add(&keys[2..5], BLOCK);
    let views = store.acquire(&Request::new(&keys), CallOptions::default());
    let tiers: Vec<_> = views
        .iter()
        .map(|view| match view {
            ViewOutcome::Hit { tier, .. } => *tier,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(tiers, ["dram", "dram", "peers", "peers", "peers"]);
    assert_sums(&store);
}

#[test]
fn a_store_without_sources_asks_nobody() {
    let store = Store::open(StoreConfig { ..dram(16) }).unwrap();
    assert!(matches!(get(&store, &key(1), BLOCK), GetOutcome::Miss));
    assert!(store.lookup_prefix(&Request::new(&keys(0..3))).tiers.is_empty());
    assert!(store.stats().sources.is_empty());
}
