//! Every supported pipeline passes the same checks.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::path::Path;
use std::sync::Arc;

use cascade_runtime::SystemClock;
use cascade_store::{
    CallOptions, DeclineReason, FilesConfig, PutOutcome, Request, Store, StoreConfig, ViewOutcome,
    WritePolicy,
};

use crate::blocks::{MIB, bytes_of, check, dram, key, keys, put};
use crate::third_party::MapStage;

const BLOCK: usize = 64 << 10;

/// What a pipeline stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Retention {
    /// Keys and bytes.
    Bytes,
    /// Keys only.
    Names,
    /// Nothing.
    Nothing,
}

const PIPELINES: [(&str, Retention); 11] = [
    ("Dram", Retention::Bytes),
    ("Files", Retention::Bytes),
    ("Dram|Files", Retention::Bytes),
    ("Cache|Posix", Retention::Bytes),
    ("Dram|Map", Retention::Bytes),
    ("Dram|Files|Map", Retention::Bytes),
    ("Dram|Empty", Retention::Bytes),
    ("Hbm|Dram|Files", Retention::Bytes),
    ("Dram|Fake", Retention::Bytes),
    ("Fake", Retention::Names),
    ("Empty", Retention::Nothing),
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

fn check_pipeline(store: &Store, keeps: Retention) {
    let outcomes = put(store, &keys(0..20), BLOCK);
    for outcome in &outcomes {
        match outcome {
            PutOutcome::Stored => assert_ne!(keeps, Retention::Nothing),
            PutOutcome::Declined(DeclineReason::Empty) => assert_eq!(keeps, Retention::Nothing),
            other => panic!("{other:?}"),
        }
    }
    let has_keys = keeps != Retention::Nothing;
    let served = check(store, &keys(0..20));
    assert!(served.iter().all(|tier| tier.is_some() == (keeps == Retention::Bytes)), "{served:?}");
    assert_eq!(store.contains(&keys(0..20)), [has_keys; 20]);
    // A bitmap of present blocks, and the leading blocks of a chain with a gap.
    store.delete(&keys(10..11));
    let bitmap = store.contains(&keys(0..30));
    assert!(
        bitmap
            .iter()
            .enumerate()
            .all(|(at, is_here)| *is_here == (has_keys && at < 20 && at != 10))
    );
    let matched = store.lookup_prefix(&Request::new(&keys(0..30))).tiers;
    assert_eq!(matched.len(), if has_keys { 10 } else { 0 });
    assert_eq!(store.lookup_prefix(&Request::new(&keys(10..30))).tiers.len(), 0);
    // Other bytes under a stored key never replace its block.
    if keeps == Retention::Bytes {
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
fn every_pipeline_conforms_with_write_back() {
    let directory = tempfile::tempdir().unwrap();
    for (pipeline, keeps) in PIPELINES {
        check_pipeline(&open(pipeline, directory.path(), WritePolicy::Back), keeps);
    }
}

#[test]
fn every_pipeline_conforms_with_write_through() {
    let directory = tempfile::tempdir().unwrap();
    for (pipeline, keeps) in PIPELINES {
        check_pipeline(&open(pipeline, directory.path(), WritePolicy::Through), keeps);
    }
}

#[test]
fn an_absent_tier_is_named_in_the_notes() {
    let directory = tempfile::tempdir().unwrap();
    let store = open("Hbm|Dram|Files", directory.path(), WritePolicy::Back);
    let notes = store.stats().notes.join("; ");
    assert!(notes.contains("Hbm"), "{notes}");
}
