//! Scripted histories and their exact explanations.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use cascade_block::{BlockKey, Manifest, Namespace, TenantSecret};
use cascade_runtime::ManualClock;
use cascade_store::stages::StageRegistry;
use cascade_store::{
    BlockExplanation, BlockState, CallOptions, Explanation, Loss, PolicyKind, PresentBlock, Put,
    PutOutcome, Request, Store, StoreConfig, TierBytes, WriterId,
};

use crate::blocks::{self, bytes_of, check, dram, key, keys};
use crate::third_party::{self, MapStage};

const BLOCK: usize = 4096;

/// A store of this many blocks with LRU and a manual clock.
fn small(blocks: u64) -> (Store, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::default());
    let config = StoreConfig { dram_blocks: Some(blocks), policy: PolicyKind::Lru, ..dram(4) };
    let store = Store::open_with(config, &StageRegistry::default(), clock.clone()).unwrap();
    (store, clock)
}

/// As `small`, over a map stage.
fn small_over_map(blocks: u64) -> (Store, Arc<MapStage>) {
    let stage = MapStage::new();
    let config = StoreConfig {
        pipeline: "Dram|Map".to_owned(),
        dram_blocks: Some(blocks),
        policy: PolicyKind::Lru,
        ..dram(4)
    };
    let clock = Arc::new(ManualClock::default());
    (Store::open_with(config, &stage.registry(), clock).unwrap(), stage)
}

fn put_chain(store: &Store, keys: &[BlockKey], options: CallOptions) -> Vec<PutOutcome> {
    let bytes: Vec<_> = keys.iter().map(|key| bytes_of(key, BLOCK)).collect();
    let put = |at: usize| Put {
        parent: at.checked_sub(1).map(|before| keys[before]),
        ..Put::new(keys[at], &bytes[at])
    };
    let batch: Vec<_> = (0..keys.len()).map(put).collect();
    store.put(&batch, options)
}

fn explain(store: &Store, keys: &[BlockKey]) -> Explanation {
    store.explain(keys, None, CallOptions::default()).unwrap()
}

fn why(store: &Store, key: BlockKey) -> Option<Loss> {
    match explain(store, &[key]).blocks[0].state {
        BlockState::Absent { why, .. } => Some(why),
        _ => None,
    }
}

/// The explanation of a block right after its put.
fn fresh() -> PresentBlock {
    PresentBlock {
        tiers: vec!["dram"],
        queued_for: Vec::new(),
        bytes: 4096,
        put_unix_ms: None,
        used_unix_ms: None,
        uses: 0,
        writer: None,
        pins: 0,
        holders: 0,
        names: 1,
        is_prefix: false,
        parent: None,
        expires_unix_ms: None,
    }
}

#[test]
fn an_explanation_names_the_first_missing_block_and_the_reason() {
    let (store, clock) = small(4);
    clock.set(Duration::from_secs(10));
    let writer = Some(WriterId(NonZeroU32::new(7).unwrap()));
    let first = keys(0..3);
    put_chain(&store, &first, CallOptions { writer, ..CallOptions::default() });
    clock.set(Duration::from_secs(20));
    check(&store, &first[..2]);
    clock.set(Duration::from_secs(30));
    let second = keys(10..12);
    put_chain(&store, &second, CallOptions::default());
    store.pin(&second[..1]);
    let views = store.view(&second[..1], CallOptions::default());
    let explanation = explain(&store, &[&first[..], &second[..]].concat());
    let here = |key: BlockKey, here| BlockExplanation { key, state: BlockState::Present(here) };
    let of_first = |parent| PresentBlock {
        put_unix_ms: Some(10_000),
        used_unix_ms: Some(20_000),
        uses: 1,
        writer,
        parent,
        ..fresh()
    };
    let gone = BlockState::Absent { why: Loss::EvictedUnread, since_unix_ms: 30_000 };
    let of_second = PresentBlock { put_unix_ms: Some(30_000), ..fresh() };
    let read = PresentBlock {
        used_unix_ms: Some(30_000),
        uses: 1,
        pins: 1,
        holders: 1,
        ..of_second.clone()
    };
    let expected = Explanation {
        blocks: vec![
            here(first[0], of_first(None)),
            here(first[1], of_first(Some(first[0]))),
            BlockExplanation { key: first[2], state: gone },
            here(second[0], read),
            here(second[1], PresentBlock { parent: Some(second[0]), ..of_second }),
        ],
        leading: 2,
        behind_gap: 2,
        namespaces: Vec::new(),
    };
    assert_eq!(explanation, expected);
    assert_eq!(explanation.first_missing().unwrap().key, first[2]);
    drop(views);
}

#[test]
fn deletions_expiry_and_clears_are_explained() {
    let (store, clock) = small(8);
    put_chain(&store, &keys(0..4), CallOptions::default());
    assert_eq!(explain(&store, &[key(9)]).blocks[0].state, BlockState::Unknown);
    clock.set(Duration::from_secs(5));
    store.delete(&[key(3)]);
    let deleted = BlockState::Absent { why: Loss::Deleted, since_unix_ms: 5_000 };
    assert_eq!(explain(&store, &[key(3)]).blocks[0].state, deleted);
    let bytes = bytes_of(&key(4), BLOCK);
    let brief = Put { ttl_ms: Some(1_500), ..Put::new(key(4), &bytes) };
    store.put(&[brief], CallOptions::default());
    let BlockState::Present(here) = &explain(&store, &[key(4)]).blocks[0].state else { panic!() };
    assert_eq!(here.expires_unix_ms, Some(6_500));
    clock.set(Duration::from_secs(60));
    let expired = BlockState::Absent { why: Loss::Expired, since_unix_ms: 6_500 };
    assert_eq!(explain(&store, &[key(4)]).blocks[0].state, expired);
    // After an access it is removed, and the reason is kept.
    assert_eq!(check(&store, &[key(4)]), [None]);
    assert_eq!(why(&store, key(4)), Some(Loss::Expired));
    store.clear();
    assert_eq!(why(&store, key(0)), Some(Loss::Cleared));
    put_chain(&store, &keys(0..1), CallOptions::default());
    assert_eq!(why(&store, key(0)), None, "it is present again");
}

#[test]
fn declined_and_failed_puts_are_explained() {
    let (store, _) = small(2);
    let bytes = bytes_of(&key(0), BLOCK);
    let partial = Put { is_partial: true, ..Put::new(key(0), &bytes) };
    store.put(&[partial], CallOptions::default());
    assert_eq!(why(&store, key(0)), Some(Loss::DeclinedPartial));
    let huge = vec![0; 5 << 20];
    store.put(&[Put::new(key(1), &huge)], CallOptions::default());
    assert_eq!(why(&store, key(1)), Some(Loss::DeclinedTooLarge));
    put_chain(&store, &keys(2..4), CallOptions::default());
    store.pin(&keys(2..4));
    store.put(&[Put::new(key(5), &bytes)], CallOptions::default());
    assert_eq!(why(&store, key(5)), Some(Loss::DeclinedFull));
    let keeps_nothing = Store::open(StoreConfig { pipeline: "Empty".to_owned(), ..dram(4) });
    let keeps_nothing = keeps_nothing.unwrap();
    keeps_nothing.put(&[Put::new(key(6), &bytes)], CallOptions::default());
    assert_eq!(why(&keeps_nothing, key(6)), Some(Loss::DeclinedEmpty));
    store.close().unwrap();
    store.put(&[Put::new(key(7), &bytes)], CallOptions::default());
    assert_eq!(why(&store, key(7)), Some(Loss::PutFailed));
}

#[test]
fn evictions_are_explained_with_earlier_use() {
    let (store, _) = small(3);
    let bytes = bytes_of(&key(0), BLOCK);
    let protected = Put { is_prefix: true, ..Put::new(key(0), &bytes) };
    store.put(&[protected], CallOptions::default());
    put_chain(&store, &keys(1..3), CallOptions::default());
    check(&store, &keys(1..2));
    for at in 3..5 {
        put_chain(&store, &keys(at..at + 1), CallOptions::default());
    }
    assert_eq!(why(&store, key(2)), Some(Loss::EvictedUnread));
    assert_eq!(why(&store, key(1)), Some(Loss::EvictedRead));
    store.pin(&keys(3..5));
    let protected = Put { is_prefix: true, ..Put::new(key(6), &bytes) };
    store.put(&[protected], CallOptions::default());
    assert_eq!(why(&store, key(0)), Some(Loss::EvictedProtected));
}

#[test]
fn losses_in_a_lower_tier_are_explained() {
    let (store, stage) = small_over_map(4);
    put_chain(&store, &keys(0..1), CallOptions::default());
    third_party::flush(&store);
    put_chain(&store, &keys(1..5), CallOptions::default());
    third_party::flush(&store);
    let BlockState::Present(here) = &explain(&store, &keys(0..1)).blocks[0].state else { panic!() };
    assert_eq!(here.tiers, ["map"]);
    stage.damages.store(true, Relaxed);
    assert_eq!(check(&store, &keys(0..1)), [None]);
    assert_eq!(why(&store, key(0)), Some(Loss::Damaged));
    stage.damages.store(false, Relaxed);

    put_chain(&store, &keys(30..34), CallOptions::default());
    third_party::flush(&store);
    stage.lose_everything();
    assert_eq!(check(&store, &keys(1..2)), [None]);
    assert_eq!(why(&store, key(1)), Some(Loss::Vanished));

    // Its circuit opens: blocks that are put now are not written to it.
    stage.fails.store(true, Relaxed);
    put_chain(&store, &keys(10..14), CallOptions::default());
    store.flush(CallOptions::default()).unwrap_err();
    put_chain(&store, &keys(20..24), CallOptions::default());
    assert_eq!(why(&store, key(10)), Some(Loss::EvictedUnwritten));
    store.flush(CallOptions::default()).unwrap_err();
}

#[test]
fn blocks_reclaimed_by_a_lower_tier_are_explained() {
    let directory = tempfile::tempdir().unwrap();
    let files = cascade_store::FilesConfig {
        capacity_bytes: 8 << 20,
        segment_bytes: 1 << 20,
        ..cascade_store::FilesConfig::new(directory.path())
    };
    let config = StoreConfig {
        pipeline: "Dram|Files".to_owned(),
        files: Some(files),
        policy: PolicyKind::Lru,
        ..dram(4)
    };
    let store = Store::open(config).unwrap();
    blocks::put(&store, &keys(0..8), 64 << 10);
    third_party::flush(&store);
    for from in (8..200).step_by(8) {
        blocks::put(&store, &keys(from..from + 8), 64 << 10);
        third_party::flush(&store);
    }
    assert_eq!(why(&store, key(0)), Some(Loss::Reclaimed));
}

#[test]
fn unknown_chains_are_explained_by_the_nearest_namespaces() {
    let (store, _) = small(8);
    let secret = TenantSecret::new("tenant");
    let manifest = |dtype: &str| Manifest::new().with("weights", "abc").with("dtype", dtype);
    let ours = Namespace::new(manifest("bf16"), &secret);
    let same = Namespace::new(manifest("bf16"), &TenantSecret::new("another"));
    let far = Namespace::new(manifest("fp8").with("layout", "NHD"), &secret);
    let near = Namespace::new(manifest("fp8"), &secret);
    for known in [&ours, &same, &far, &near] {
        store.register(known, CallOptions::default()).unwrap();
    }
    let wanted = [ours.key_of_id(b"a"), ours.key_of_id(b"b")];
    let explain = |namespace| store.explain(&wanted, namespace, CallOptions::default()).unwrap();
    let found: Vec<_> = explain(Some(&ours))
        .namespaces
        .into_iter()
        .map(|other| (other.id, other.fields.into_iter().map(|d| d.field).collect::<Vec<_>>()))
        .collect();
    let fields = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let expected = [
        (same.id(), fields(&[])),
        (near.id(), fields(&["dtype"])),
        (far.id(), fields(&["dtype", "layout"])),
    ];
    assert_eq!(found, expected);
    assert!(explain(None).namespaces.is_empty());
    put_chain(&store, &wanted[1..], CallOptions::default());
    assert!(explain(Some(&ours)).namespaces.is_empty(), "a block of it is present");
}

#[test]
fn hot_prefixes_have_depth_hits_and_tiers() {
    let (store, _) = small(64);
    let shared = keys(0..3);
    put_chain(&store, &shared, CallOptions::default());
    for session in 1..6 {
        let chain = [shared.clone(), keys(100 * session..100 * session + 2)].concat();
        store.lookup_prefix(&Request::new(&chain));
        put_chain(&store, &chain, CallOptions::default());
    }
    let hot = store.hot_prefixes(1);
    assert_eq!((hot[0].key, hot[0].depth_blocks, hot[0].hits), (shared[2], 3, 5));
    assert_eq!(hot[0].tiers, [TierBytes { tier: "dram", blocks: 3, bytes: 3 * 4096 }]);
    assert!(store.hot_prefixes(0).is_empty());
}

#[test]
fn keys_are_found_in_order_up_to_the_limit() {
    let (store, _) = small(64);
    let chain = keys(0..40);
    put_chain(&store, &chain, CallOptions::default());
    let mut expected = chain.clone();
    expected.sort_unstable();
    assert_eq!(store.find_keys(|_| true, 100, CallOptions::default()).unwrap(), expected);
    assert_eq!(store.find_keys(|_| true, 3, CallOptions::default()).unwrap(), expected[..3]);
    let is_match = |key: &BlockKey| key.as_bytes()[0] < 128;
    expected.retain(is_match);
    assert_eq!(store.find_keys(is_match, 100, CallOptions::default()).unwrap(), expected);
    store.lookup_prefix(&Request::new(&chain));
    store.clear();
    let found = store.find_keys(|_| true, 100, CallOptions::default()).unwrap();
    assert_eq!(found, [chain[39]], "the last block of a hot prefix is found after its removal");
}
