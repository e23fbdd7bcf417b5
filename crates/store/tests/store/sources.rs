//! Blocks that only a source has: lookups, reads, faults.

use std::sync::atomic::Ordering::Relaxed;

use std::sync::Arc;

use cascade_store::{
    CallOptions, FilesConfig, GetOutcome, Request, SourceList, Store, StoreConfig, StoreError,
    ViewOutcome,
};
use cascade_tier::source::Source;

use crate::blocks::{self, bytes_of, check, dram, key, keys, put};
use crate::map_source::{MapSource, open, stats_of};

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

/// They counted as lost, although the next read fetches them again.
#[test]
fn evicted_blocks_of_a_source_are_not_lost() {
    let source = MapSource::new("peers");
    let fetched = keys(0..128);
    source.add(&fetched, BLOCK);
    let store = open(dram(4), &[&source]);
    assert_eq!(check(&store, &fetched), [Some("peers"); 128]);
    let counters = store.stats().counters;
    assert!(counters.evicted_blocks >= 64, "{counters:?}");
    assert_eq!(counters.lost_blocks, 0);
    // Those of callers are.
    put(&store, &keys(200..400), BLOCK);
    let counters = store.stats().counters;
    assert!((100..=200).contains(&counters.lost_blocks), "{counters:?}");
    assert!(counters.lost_blocks < counters.evicted_blocks);
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
fn a_store_without_sources_misses_at_once() {
    let store = Store::open(StoreConfig { ..dram(16) }).unwrap();
    assert!(matches!(get(&store, &key(1), BLOCK), GetOutcome::Miss));
    assert!(store.lookup_prefix(&Request::new(&keys(0..3))).tiers.is_empty());
    assert!(store.stats().sources.is_empty());
}

/// The threads that read one block share one fetch, however many they are.
#[test]
fn concurrent_readers_share_one_fetch() {
    let source = MapSource::new("peers");
    let keys = keys(0..3);
    source.add(&keys, BLOCK);
    let store = open(dram(16), &[&source]);
    let held = source.hold_fetches();
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..8).map(|_| scope.spawn(|| check(&store, &keys))).collect();
        held.wait_until_reached();
        drop(held);
        for reader in readers {
            let tiers = reader.join().unwrap();
            assert!(tiers.iter().all(Option::is_some), "{tiers:?}");
        }
    });
    assert_eq!(source.fetched.load(Relaxed), 3);
    assert_sums(&store);
}

#[test]
fn a_key_twice_in_one_batch_is_fetched_once() {
    let source = MapSource::new("peers");
    let key = key(1);
    source.add(&[key], BLOCK);
    let store = open(dram(16), &[&source]);
    assert_eq!(check(&store, &[key, key, key]), [Some("peers"), Some("dram"), Some("dram")]);
    assert_eq!(source.fetched.load(Relaxed), 1);
}

/// More blocks than the call may hold slabs for, and than fit DRAM.
#[test]
fn a_batch_larger_than_dram_is_read_in_pieces() {
    let source = MapSource::new("peers");
    source.is_reversed.store(true, Relaxed);
    let keys = keys(0..48);
    source.add(&keys, 1 << 20);
    let store = open(dram(16), &[&source]);
    let mut buffers: Vec<Vec<u8>> = keys.iter().map(|_| vec![0; 1 << 20]).collect();
    let mut targets: Vec<&mut [u8]> = buffers.iter_mut().map(|it| &mut it[..]).collect();
    let outcomes = store.get(&keys, &mut targets, CallOptions::default());
    for ((key, outcome), bytes) in keys.iter().zip(outcomes).zip(&buffers) {
        assert!(matches!(outcome, GetOutcome::Hit { tier: "peers", .. }), "{outcome:?}");
        assert!(*bytes == *bytes_of(key, bytes.len()), "wrong bytes of {key}");
    }
    assert_sums(&store);
}

/// While the source does not answer, the blocks of the other tiers are given to the caller: the
/// source answers only after the caller has all of them.
#[test]
fn blocks_of_all_tiers_are_given_before_a_slow_source_answers() {
    let directory = tempfile::tempdir().unwrap();
    let files = FilesConfig { segment_bytes: 4 << 20, ..FilesConfig::new(directory.path()) };
    let config = StoreConfig { pipeline: "Dram|Files".to_owned(), files: Some(files), ..dram(8) };
    let source = MapSource::new("peers");
    // The first of these are in files only.
    let local = keys(0..200);
    let remote = keys(1000..1008);
    source.add(&remote, BLOCK);
    let store = open(config, &[&source]);
    for some in local.chunks(8) {
        put(&store, some, BLOCK);
        store.flush(CallOptions::default()).unwrap();
    }
    let some = [&local[..4], &local[196..]].concat();
    let mixed: Vec<_> = remote.iter().zip(&some).flat_map(|(far, near)| [*far, *near]).collect();
    let mut held = Some(source.hold_fetches());
    let mut tiers = vec![None; mixed.len()];
    let mut given = 0;
    store.view_each(&mixed, CallOptions::default(), &mut |at, view| {
        let ViewOutcome::Hit { slab, tier } = view else { panic!("{view:?}") };
        assert!(slab.host() == Some(&bytes_of(&mixed[at], BLOCK)[..]), "wrong bytes");
        assert!(tiers[at].replace(tier).is_none(), "given twice");
        given += 1;
        if given == 8 {
            assert!(tiers.iter().flatten().all(|tier| *tier != "peers"), "{tiers:?}");
            held = None;
        }
    });
    for (at, tier) in tiers.iter().enumerate() {
        assert_eq!(*tier == Some("peers"), at % 2 == 0, "{tiers:?}");
    }
    assert!(tiers.contains(&Some("files")) && tiers.contains(&Some("dram")), "{tiers:?}");
    assert_sums(&store);
}

/// What the call read is there for others afterwards.
#[test]
fn a_caller_that_panics_ends_its_call_in_order() {
    let source = MapSource::new("peers");
    let keys = keys(0..6);
    source.add(&keys[2..], BLOCK);
    let store = open(dram(16), &[&source]);
    put(&store, &keys[..2], BLOCK);
    let reader = store.clone();
    let all = keys.clone();
    let read = std::thread::spawn(move || {
        reader.view_each(&all, CallOptions::default(), &mut |_, view| {
            let ViewOutcome::Hit { tier, .. } = view else { panic!("{view:?}") };
            assert!(tier != "peers", "injected");
        });
    });
    let panic = read.join().unwrap_err();
    assert!(panic.downcast_ref::<&str>().is_some_and(|text| text.contains("injected")));
    assert_eq!(check(&store, &keys), [Some("dram"); 6]);
    assert_sums(&store);
}

#[test]
fn a_block_is_read_from_the_source_that_has_it() {
    let [near, far] = ["near", "far"].map(MapSource::new);
    let keys = keys(0..4);
    near.add(&keys[..2], BLOCK);
    far.add(&keys[2..], BLOCK);
    let store = open(dram(16), &[&near, &far]);
    let matched = store.lookup_prefix(&Request::new(&keys));
    assert_eq!(matched.tiers, ["near", "near", "far", "far"]);
    assert_eq!(check(&store, &keys), [Some("near"), Some("near"), Some("far"), Some("far")]);
    assert_sums(&store);
}

#[test]
fn a_pipeline_without_dram_gives_blocks_of_sources_and_keeps_none() {
    let directory = tempfile::tempdir().unwrap();
    let files = FilesConfig { segment_bytes: 4 << 20, ..FilesConfig::new(directory.path()) };
    let config = StoreConfig { pipeline: "Files".to_owned(), files: Some(files), ..dram(16) };
    let source = MapSource::new("peers");
    source.add(&[key(1)], BLOCK);
    let store = open(config, &[&source]);
    for _ in 0..2 {
        assert_eq!(check(&store, &[key(1)]), [Some("peers")]);
    }
    assert_eq!((store.stats().keys, store.stats().pool.reserved_bytes), (0, 0));
}

#[test]
fn a_block_deleted_while_it_is_fetched_is_not_kept() {
    let source = MapSource::new("peers");
    source.add(&keys(1..4), BLOCK);
    let store = open(dram(16), &[&source]);
    let removals: [fn(&Store); 2] = [|store| drop(store.delete(&keys(1..4))), Store::clear];
    for remove in removals {
        let held = source.hold_fetches();
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| check(&store, &keys(1..4)));
            held.wait_until_reached();
            remove(&store);
            drop(held);
            reader.join().unwrap();
        });
        assert_eq!(store.stats().keys, 0);
    }
}

/// The bytes that were put count, not those of the source.
#[test]
fn a_block_put_while_it_is_fetched_is_the_one_that_was_put() {
    let source = MapSource::new("peers");
    let key = key(1);
    source.add(&[key], BLOCK);
    let store = open(dram(16), &[&source]);
    let held = source.hold_fetches();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| check(&store, &[key]));
        held.wait_until_reached();
        put(&store, &[key], BLOCK);
        drop(held);
        assert_eq!(reader.join().unwrap(), [Some("dram")]);
    });
    assert_eq!(store.stats().counters.promoted_blocks, 0);
    assert_sums(&store);
}

#[test]
fn a_block_that_has_expired_is_not_fetched() {
    let source = MapSource::new("peers");
    source.add(&[key(1)], BLOCK);
    source.expires_unix_ms.store(1, Relaxed);
    let store = open(dram(16), &[&source]);
    assert_eq!(check(&store, &[key(1)]), [None]);
    assert_eq!(source.fetched.load(Relaxed), 0);
}

#[test]
fn blocks_that_a_lookup_found_in_a_source_are_prefetched() {
    let source = MapSource::new("peers");
    let keys = keys(0..40);
    source.add(&keys[..30], BLOCK);
    let store = open(dram(16), &[&source]);
    assert_eq!(store.prefetch(&keys), 0, "no lookup has found them");
    assert_eq!(store.lookup_prefix(&Request::new(&keys)).tiers.len(), 30);
    assert_eq!(store.prefetch(&keys), 30);
    blocks::wait_until("all blocks are prefetched", || store.stats().dram_blocks == 30);
    assert_eq!(check(&store, &keys[..30]), [Some("dram"); 30]);
    let counters = store.stats().counters;
    assert_eq!((counters.prefetched_blocks, counters.prefetched_used), (30, 30));
    assert_eq!((counters.direct_requested, counters.blocks_matched), (0, 30));
    assert_sums(&store);
}

#[test]
fn a_comparison_of_a_put_does_not_ask_sources() {
    let source = MapSource::new("peers");
    source.add(&keys(0..4), BLOCK);
    let store = open(dram(16), &[&source]);
    put(&store, &keys(0..4), BLOCK);
    put(&store, &keys(0..4), BLOCK);
    assert_eq!(source.locate_calls.load(Relaxed), 0);
}

#[test]
fn names_of_sources_are_unique() {
    for names in [["peers", "peers"], ["dram", "peers"]] {
        let sources = names.map(|name| MapSource::new(name) as Arc<dyn Source>);
        let sources = SourceList::new(sources.to_vec());
        let error = Store::open(StoreConfig { sources, ..dram(16) }).unwrap_err();
        assert!(matches!(error, StoreError::Config { setting: "sources", .. }), "{error}");
    }
    let many: Vec<_> = ["a", "b", "c", "d", "e", "f", "g", "h", "i"]
        .map(|name| MapSource::new(name) as Arc<dyn Source>)
        .to_vec();
    let config =
        |count| StoreConfig { sources: SourceList::new(many[..count].to_vec()), ..dram(16) };
    assert!(Store::open(config(9)).is_err());
    let store = Store::open(config(8)).unwrap();
    assert_eq!(check(&store, &[key(1)]), [None]);
    assert_eq!(store.stats().sources.len(), 8);
}
