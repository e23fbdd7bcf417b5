//! Shadow caches predict the hit rate of other tier sizes, exactly while they sample every block.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::time::Duration;

use cascade_block::BlockKey;
use cascade_store::{
    CallOptions, FilesConfig, PolicyKind, Put, Request, ShadowFigure, Store, StoreConfig,
    StoreStats,
};
use proptest::prelude::*;

use crate::blocks::{bytes_of, dram, key};

const BLOCK: usize = 64;

fn open(policy: PolicyKind, blocks: u64) -> Store {
    Store::open(StoreConfig { dram_blocks: Some(blocks), policy, ..dram(4) }).unwrap()
}

/// Looks up a chain, then puts the missing blocks.
fn serve(store: &Store, at: u64, keys: &[BlockKey], length: usize) {
    let at = Some(Duration::from_secs(at));
    let matched = store.lookup_prefix(&Request { at, ..Request::new(keys) }).tiers.len();
    let bytes = bytes_of(&keys[0], length);
    let put = |at: usize| Put {
        parent: at.checked_sub(1).map(|before| keys[before]),
        ..Put::new(keys[at], &bytes)
    };
    let batch: Vec<_> = (matched..keys.len()).map(put).collect();
    store.put(&batch, CallOptions::default());
}

fn figure(stats: &StoreStats, tier: &str, percent: u64) -> ShadowFigure {
    let mut all = stats.shadows.iter();
    let is_it = |f: &&ShadowFigure| f.tier == tier && f.capacity_percent == percent;
    all.find(is_it).unwrap_or_else(|| panic!("{tier} at {percent} %")).clone()
}

fn chain(name: u64, blocks: u64) -> Vec<BlockKey> {
    (0..blocks).map(|block| key(1000 * name + block)).collect()
}

#[test]
fn a_loop_larger_than_the_tier_fits_a_shadow_of_150_percent() {
    let store = open(PolicyKind::Lru, 100);
    assert!(store.stats().shadows.is_empty(), "no shadows before the first block");
    for at in 0..300 {
        serve(&store, at, &chain(at % 30, 5), BLOCK);
    }
    let stats = store.stats();
    let rates = |percent| figure(&stats, "dram", percent).since_start;
    let requested = rates(100).blocks_requested;
    assert_eq!(requested, 299 * 5, "all but the first request, which met an empty store");
    assert_eq!((rates(100).blocks_matched, rates(100).blocks_simulated), (0, 0));
    // Every chain misses once; the miss of the first one is not counted.
    assert_eq!(rates(150).blocks_predicted, requested - 29 * 5);
    assert_eq!(rates(200).blocks_predicted, requested - 29 * 5);
    assert!((rates(150).predicted_hit_rate() - 270.0 / 299.0).abs() < 1e-9);
    assert_eq!(figure(&stats, "dram", 150).capacity_bytes, 6 << 20);
    assert_eq!(figure(&stats, "dram", 100).sampled_one_in, 1);
}

#[test]
fn recent_figures_exclude_old_requests() {
    let store = open(PolicyKind::Lru, 100);
    for at in 0..30 {
        serve(&store, at, &chain(at, 5), BLOCK);
    }
    for at in 0..10 {
        serve(&store, 7200 + at, &chain(29, 5), BLOCK);
    }
    let figure = figure(&store.stats(), "dram", 100);
    assert_eq!((figure.recent.blocks_requested, figure.recent.blocks_matched), (50, 50));
    assert_eq!(figure.since_start.blocks_requested, 39 * 5);
}

#[test]
fn deleted_blocks_are_removed_from_the_shadows() {
    let store = open(PolicyKind::PrefixCost, 100);
    let keys = chain(1, 5);
    serve(&store, 0, &keys, BLOCK);
    store.delete(&keys);
    store.lookup_prefix(&Request::new(&keys));
    let missed = |percent| figure(&store.stats(), "dram", percent).since_start;
    assert!([100, 150, 200].map(missed).iter().all(|rates| rates.blocks_simulated == 0));
    store.clear();
    serve(&store, 1, &keys, BLOCK);
    serve(&store, 2, &keys, BLOCK);
    assert_eq!(missed(200).blocks_simulated, 5);
}

#[test]
fn memory_of_the_shadows_is_bounded_with_smaller_blocks() {
    let store = Store::open(StoreConfig { policy: PolicyKind::Lru, ..dram(16) }).unwrap();
    serve(&store, 0, &chain(0, 1), 256 << 10);
    assert_eq!(figure(&store.stats(), "dram", 100).sampled_one_in, 1);
    for at in 1..2000 {
        serve(&store, at, &chain(at, 20), 512);
    }
    let stats = store.stats();
    assert!(figure(&stats, "dram", 100).sampled_one_in >= 4);
    assert!(stats.insight_bytes <= 8 << 20, "{} bytes", stats.insight_bytes);
    let rates = figure(&stats, "dram", 200).since_start;
    assert!(rates.predicted_hit_rate() < 0.02, "no block is requested twice: {rates:?}");
}

#[test]
fn the_file_tier_has_shadows_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let files = FilesConfig {
        capacity_bytes: 6 << 20,
        segment_bytes: 1 << 20,
        ..FilesConfig::new(directory.path())
    };
    let config = StoreConfig {
        pipeline: "Dram|Files".to_owned(),
        files: Some(files),
        dram_blocks: Some(16),
        policy: PolicyKind::Lru,
        ..dram(4)
    };
    let store = Store::open(config).unwrap();
    // 8 MiB of blocks in turn: more than 6 MiB of files hold, less than 150 % of that.
    for at in 0..128 {
        serve(&store, at, &chain(at % 16, 8), 64 << 10);
        store.flush(CallOptions::default()).unwrap();
    }
    let stats = store.stats();
    let rates = |percent| figure(&stats, "files", percent).since_start;
    assert!(rates(100).simulated_hit_rate() < 0.05, "{:?}", rates(100));
    assert!(rates(200).predicted_hit_rate() > 0.8, "{:?}", rates(200));
    assert_eq!(rates(100).blocks_matched, stats.counters.blocks_matched);
    assert_eq!(figure(&stats, "files", 200).capacity_bytes, 12 << 20);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// While every block is sampled, the shadow at 100 % matches the tier exactly.
    #[test]
    fn the_calibration_shadow_matches_the_tier(
        requests in prop::collection::vec((0_u64..12, 1_u64..8), 1..200),
    ) {
        let store = open(PolicyKind::Lru, 40);
        for (at, (name, blocks)) in requests.iter().enumerate() {
            serve(&store, at as u64, &chain(*name, *blocks), BLOCK);
        }
        let stats = store.stats();
        if let Some(figure) = stats.shadows.first() {
            let rates = figure.since_start;
            prop_assert_eq!(rates.blocks_simulated, rates.blocks_matched);
        }
    }
}
