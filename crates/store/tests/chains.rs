//! Every sensible pipeline passes the same checks.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

mod blocks;
mod third_party;

use std::path::Path;
use std::sync::Arc;

use blocks::{MIB, bytes_of, check, dram, key, keys, put};
use cascade_block::SystemClock;
use cascade_store::{
    CallOptions, DeclineReason, FilesConfig, PutOutcome, Request, Store, StoreConfig, ViewOutcome,
    WritePolicy,
};
use third_party::MapStage;

const BLOCK: usize = 64 << 10;

/// What may be expected of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Keeps {
    /// Serves what was put.
    Bytes,
    /// Says what it would have.
    Names,
    Nothing,
}

const CHAINS: [(&str, Keeps); 11] = [
    ("Dram", Keeps::Bytes),
    ("Files", Keeps::Bytes),
    ("Dram|Files", Keeps::Bytes),
    ("Cache|Posix", Keeps::Bytes),
    ("Dram|Map", Keeps::Bytes),
    ("Dram|Files|Map", Keeps::Bytes),
    ("Dram|Empty", Keeps::Bytes),
    ("Hbm|Dram|Peers|Files", Keeps::Bytes),
    ("Dram|Fake", Keeps::Bytes),
    ("Fake", Keeps::Names),
    ("Empty", Keeps::Nothing),
];

fn open(pipeline: &str, directory: &Path, write: WritePolicy) -> Store {
    let files = FilesConfig {
        capacity_bytes: 32 * MIB,
        segment_bytes: 2 * MIB,
        ..FilesConfig::new(directory.join(pipeline.replace('|', "-")))
    };
    let pipeline = pipeline.to_owned();
    let config = StoreConfig { pipeline, files: Some(files), write, ..dram(8) };
    Store::open_with(config, &MapStage::new().registry(), Arc::new(SystemClock)).unwrap()
}

fn conform(store: &Store, keeps: Keeps) {
    let outcomes = put(store, &keys(0..20), BLOCK);
    for outcome in &outcomes {
        match outcome {
            PutOutcome::Stored => assert_ne!(keeps, Keeps::Nothing),
            PutOutcome::Declined(DeclineReason::Empty) => assert_eq!(keeps, Keeps::Nothing),
            other => panic!("{other:?}"),
        }
    }
    let is_known = keeps != Keeps::Nothing;
    let served = check(store, &keys(0..20));
    assert!(served.iter().all(|tier| tier.is_some() == (keeps == Keeps::Bytes)), "{served:?}");
    assert_eq!(store.contains(&keys(0..20)), [is_known; 20]);
    // A bitmap of what is there, and the leading blocks of a chain with a hole.
    store.delete(&keys(10..11));
    let bitmap = store.contains(&keys(0..30));
    assert!(
        bitmap
            .iter()
            .enumerate()
            .all(|(at, is_here)| *is_here == (is_known && at < 20 && at != 10))
    );
    let matched = store.lookup_prefix(&Request::new(&keys(0..30))).tiers;
    assert_eq!(matched.len(), if is_known { 10 } else { 0 });
    assert_eq!(store.lookup_prefix(&Request::new(&keys(10..30))).tiers.len(), 0);
    // The same key with other bytes never replaces what is there.
    if keeps == Keeps::Bytes {
        let wrong = bytes_of(&key(99), BLOCK);
        let outcome = store.put(&[cascade_store::Put::new(key(0), &wrong)], CallOptions::default());
        assert!(matches!(outcome[0], PutOutcome::Conflict), "{outcome:?}");
    }
    store.prefetch(&keys(0..20));
    store.flush(CallOptions::default()).unwrap();
    let view = store.view(&keys(500..501), CallOptions::default()).pop().unwrap();
    assert!(matches!(view, ViewOutcome::Miss));
    store.clear();
    assert_eq!(store.contains(&keys(0..20)), [false; 20]);
    assert_eq!(check(store, &keys(0..20)), [None; 20]);
    let stats = store.stats();
    assert_eq!((stats.keys, stats.content_bytes, stats.pool.requested_bytes), (0, 0, 0));
    let counters = stats.counters;
    assert_eq!(counters.gets, counters.hits + counters.misses + counters.get_failures);
    let by_tier: u64 = stats.hits_by_tier.iter().map(|hits| hits.blocks).sum();
    assert_eq!(by_tier, counters.hits);
    let matched: u64 = stats.hits_by_tier.iter().map(|hits| hits.matched_blocks).sum();
    assert_eq!(matched, counters.matched());
    assert_eq!(stats.stage_blocks, vec![0; stats.stages.len()], "after a clear");
}

#[test]
fn every_chain_conforms_when_it_writes_back() {
    let directory = tempfile::tempdir().unwrap();
    for (pipeline, keeps) in CHAINS {
        conform(&open(pipeline, directory.path(), WritePolicy::Back), keeps);
    }
}

#[test]
fn every_chain_conforms_when_it_writes_through() {
    let directory = tempfile::tempdir().unwrap();
    for (pipeline, keeps) in CHAINS {
        conform(&open(pipeline, directory.path(), WritePolicy::Through), keeps);
    }
}

#[test]
fn absent_tiers_are_named_in_the_notes() {
    let directory = tempfile::tempdir().unwrap();
    let store = open("Hbm|Dram|Peers|Files", directory.path(), WritePolicy::Back);
    let notes = store.stats().notes.join("; ");
    assert!(notes.contains("Hbm") && notes.contains("Peers"), "{notes}");
}
