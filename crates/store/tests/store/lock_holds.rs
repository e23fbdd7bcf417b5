//! Whatever a call is asked, it handles a bounded number of keys while it holds the store's lock.
//!
//! The store counts the keys; no test here measures time.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::time::Duration;

use cascade_store::{
    CallOptions, Change, DeclineReason, FilesConfig, GetOutcome, HoldRecorder, ListRequest, Loss,
    Put, PutOutcome, Request, Store, StoreConfig, ViewOutcome,
};

use crate::blocks::{bytes_of, check, dram, keys, put};

/// Keys of one hold, and what its last key may cost beyond: walks over the names of a content.
const KEYS_MAX: u64 = 256 + 128 + 8;
const MANY: u64 = 3000;
/// What the removal of a block counts as, in keys.
const REMOVAL_COST: u64 = 4;

/// A store, and the recorder of its holds.
fn open(config: StoreConfig) -> (Store, HoldRecorder) {
    let holds = HoldRecorder::new();
    let config = StoreConfig { holds: Some(holds.clone()), ..config };
    (Store::open(config).unwrap(), holds)
}

/// Checks the holds since the last call: each of a bounded number of keys, and `least` in all.
#[track_caller]
fn check_holds(holds: &HoldRecorder, least: u64) {
    let keys: Vec<u64> = holds.take().iter().map(|hold| hold.keys).collect();
    let most = keys.iter().max().copied().unwrap_or(0);
    assert!(most <= KEYS_MAX, "{most} keys in one hold");
    let sum: u64 = keys.iter().sum();
    assert!(sum >= least, "{sum} of {least} keys are counted");
}

#[test]
fn each_call_over_many_keys_ends_its_holds() {
    let (store, holds) = open(dram(16));
    let many = keys(0..MANY);
    assert!(put(&store, &many, 8).iter().all(|it| matches!(it, PutOutcome::Stored)));
    check_holds(&holds, MANY);
    assert!(put(&store, &many, 8).iter().all(|it| matches!(it, PutOutcome::Present)));
    check_holds(&holds, MANY);

    assert!(store.contains(&many).iter().all(|is_here| *is_here));
    check_holds(&holds, MANY);
    assert!(store.locate(&many).iter().all(|tiers| tiers == &["dram"]));
    check_holds(&holds, MANY);
    assert!(store.pin(&many).iter().all(|is_pinned| *is_pinned));
    check_holds(&holds, MANY);
    assert!(store.unpin(&many).iter().all(|was_pinned| *was_pinned));
    check_holds(&holds, MANY);

    let mut memory = vec![[0_u8; 8]; many.len()];
    let mut buffers: Vec<&mut [u8]> = memory.iter_mut().map(|it| &mut it[..]).collect();
    let gets = store.get(&many, &mut buffers, CallOptions::default());
    assert!(gets.iter().all(|it| matches!(it, GetOutcome::Hit { .. })));
    check_holds(&holds, MANY);
    for (key, bytes) in many.iter().zip(&memory) {
        assert_eq!(bytes[..], bytes_of(key, 8)[..]);
    }
    let views = store.view(&many, CallOptions::default());
    assert!(views.iter().all(|it| matches!(it, ViewOutcome::Hit { .. })));
    check_holds(&holds, MANY);
    drop(views);

    let request = Request::new(&many);
    assert_eq!(store.lookup_prefix(&request).tiers, vec!["dram"; many.len()]);
    // The report to the eviction policy visits each block again, twice.
    check_holds(&holds, 3 * MANY);
    assert_eq!(store.acquire(&request, CallOptions::default()).len(), many.len());
    check_holds(&holds, MANY);
    store.hint(&request);
    check_holds(&holds, 3 * MANY);

    assert_eq!(store.explain(&many, None, CallOptions::default()).unwrap().leading, many.len());
    check_holds(&holds, MANY);
    assert_eq!(store.find_keys(|_| true, 5000, CallOptions::default()).unwrap().len(), many.len());
    check_holds(&holds, MANY);
    let request = ListRequest { most: usize::MAX, ..ListRequest::default() };
    let page = store.list_keys(&request, |_| true, CallOptions::default()).unwrap();
    assert_eq!((page.keys.len(), page.next), (many.len(), None));
    check_holds(&holds, 2 * MANY);
    let changes = store.changes(None, usize::MAX).unwrap();
    assert!(changes.is_current && changes.changes.len() == many.len());
    check_holds(&holds, MANY);

    assert!(store.delete(&many).iter().all(|is_deleted| *is_deleted));
    check_holds(&holds, REMOVAL_COST * MANY);
    // The memory of the last blocks is free, too.
    let pool = store.stats().pool;
    assert_eq!(pool.reserved_bytes, 0);
}

#[test]
fn a_large_block_ends_its_holds_while_it_evicts_small_ones() {
    let (store, holds) = open(dram(4));
    let many = keys(0..(4 << 20) / 64);
    put(&store, &many, 64);
    check_holds(&holds, many.len() as u64);
    let large = keys(1_000_000..1_000_001);
    assert!(matches!(put(&store, &large, 2 << 20)[..], [PutOutcome::Stored]));
    assert!(store.stats().counters.evicted_blocks >= (2 << 20) / 64);
    check_holds(&holds, 4 * (2 << 20) / 64);
    assert_eq!(check(&store, &large), [Some("dram")]);
}

#[test]
fn clear_ends_its_holds_and_leaves_nothing() {
    let (store, holds) = open(dram(16));
    let many = keys(0..MANY);
    put(&store, &many, 8);
    let cursor = store.changes(None, usize::MAX).unwrap().next;
    holds.take();
    store.clear();
    check_holds(&holds, REMOVAL_COST * MANY);
    let stats = store.stats();
    assert_eq!((stats.keys, stats.contents, stats.content_bytes), (0, 0, 0));
    assert_eq!((stats.dram_blocks, stats.dram_bytes), (0, 0));
    // One change in place of one for each key.
    let changes = store.changes(Some(cursor), usize::MAX).unwrap();
    assert_eq!(changes.changes, [Change::Cleared]);
    let explained = store.explain(&many[..1], None, CallOptions::default()).unwrap();
    let state = format!("{:?}", explained.first_missing().unwrap().state);
    assert!(state.contains(&format!("{:?}", Loss::Cleared)), "{state}");

    assert!(put(&store, &many, 16).iter().all(|it| matches!(it, PutOutcome::Stored)));
    assert_eq!(store.lookup_prefix(&Request::new(&many)).tiers.len(), many.len());
    assert!(check(&store, &many).iter().all(|tier| *tier == Some("dram")));
}

#[test]
fn erase_ends_its_holds_and_counts_each_content_once() {
    let digest = cascade_block::DigestMode::On(cascade_block::DigestAlgorithm::Blake3);
    let (store, holds) = open(StoreConfig { digest, ..dram(16) });
    let many = keys(0..MANY);
    put(&store, &many, 8);
    // Two more names for the first content.
    let bytes = bytes_of(&many[0], 8);
    let names = keys(MANY..MANY + 2);
    let puts: Vec<Put<'_>> = names.iter().map(|key| Put::new(*key, &bytes)).collect();
    let outcomes = store.put(&puts, CallOptions::default());
    assert!(outcomes.iter().all(|it| matches!(it, PutOutcome::Deduplicated)));
    holds.take();
    let erased = store.erase(CallOptions::default()).unwrap();
    check_holds(&holds, MANY + 2);
    assert!(erased.is_complete(), "{erased:?}");
    assert_eq!((erased.tiers[0].blocks, erased.tiers[0].bytes), (MANY + 2, MANY * 8));
    assert_eq!(store.stats().keys, 0);
    put(&store, &many, 8);
    assert!(check(&store, &many).iter().all(|tier| *tier == Some("dram")));
}

#[test]
fn names_of_one_content_are_deleted_in_several_holds() {
    let digest = cascade_block::DigestMode::On(cascade_block::DigestAlgorithm::Blake3);
    let (store, holds) = open(StoreConfig { digest, ..dram(16) });
    let names = keys(0..MANY);
    let puts: Vec<Put<'_>> = names.iter().map(|key| Put::new(*key, b"the same")).collect();
    store.put(&puts, CallOptions::default());
    assert!(store.stats().contents < 10);
    holds.take();
    assert!(store.delete(&names).iter().all(|is_deleted| *is_deleted));
    // A walk over 1,024 names costs as much as 128 keys.
    check_holds(&holds, 10 * MANY);
    assert_eq!(store.stats().contents, 0);
}

#[test]
fn a_store_with_files_ends_its_holds_while_it_writes_reads_and_deletes() {
    let directory = tempfile::tempdir().unwrap();
    let (store, holds) = open(StoreConfig {
        pipeline: "Dram|Files".to_owned(),
        files: Some(FilesConfig::new(directory.path().join("store"))),
        ..dram(4)
    });
    let many = keys(0..MANY);
    let options = CallOptions { timeout: Some(Duration::from_secs(300)), ..Default::default() };
    for some in many.chunks(500) {
        put(&store, some, 4096);
    }
    store.flush(options).unwrap();
    check_holds(&holds, MANY);
    // Most are in files only.
    assert!(check(&store, &many).iter().all(Option::is_some));
    check_holds(&holds, MANY);

    store.clear();
    store.flush(options).unwrap();
    check_holds(&holds, MANY);
    // Put again while the removals of the old blocks are on their way.
    put(&store, &many, 512);
    store.clear();
    put(&store, &many, 1024);
    store.flush(options).unwrap();
    store.close().unwrap();
    drop(store);

    let (store, _) = open(StoreConfig {
        pipeline: "Dram|Files".to_owned(),
        files: Some(FilesConfig::new(directory.path().join("store"))),
        ..dram(4)
    });
    assert!(check(&store, &many).iter().all(Option::is_some), "the last blocks are recovered");
    let views = store.view(&many[..10], CallOptions::default());
    let is_last =
        |it: &ViewOutcome| matches!(it, ViewOutcome::Hit { slab, .. } if slab.len() == 1024);
    assert!(views.iter().all(is_last));
}

/// A removal of a cleared block that came after the new one would remove that.
#[test]
fn a_block_that_is_put_while_it_is_cleared_stays_in_files() {
    let directory = tempfile::tempdir().unwrap();
    let config = || {
        let files = FilesConfig::new(directory.path().join("store"));
        StoreConfig { pipeline: "Dram|Files".to_owned(), files: Some(files), ..dram(16) }
    };
    let (store, _) = open(config());
    let many = keys(0..2000);
    let options = CallOptions { timeout: Some(Duration::from_secs(300)), ..Default::default() };
    put(&store, &many, 64);
    store.flush(options).unwrap();
    let others = store.clone();
    let clear = std::thread::spawn(move || others.clear());
    // From the last one on, while the clear removes them from the first one on.
    let outcomes: Vec<_> = many.rchunks(10).flat_map(|some| put(&store, some, 64)).collect();
    clear.join().unwrap();
    let is_known = |it: &PutOutcome| matches!(it, PutOutcome::Stored | PutOutcome::Present);
    assert!(outcomes.iter().all(is_known), "{outcomes:?}");
    // Those that were put before the clear are gone; the others must be in files.
    let kept: Vec<_> = many.iter().copied().filter(|key| store.contains(&[*key])[0]).collect();
    store.flush(options).unwrap();
    store.close().unwrap();
    drop(store);
    let (store, _) = open(config());
    assert!(check(&store, &kept).iter().all(Option::is_some));
    assert_eq!(store.stats().keys, kept.len() as u64, "no removed block is back");
}

#[test]
fn a_put_that_is_refused_says_so_for_each_block() {
    let (store, holds) = open(dram(4));
    let many = keys(0..(4 << 20) / 64);
    for some in many.chunks(256) {
        put(&store, some, 64);
        store.pin(some);
    }
    holds.take();
    let more = keys(1_000_000..1_000_300);
    let outcomes = put(&store, &more, 64);
    let is_full = |it: &PutOutcome| matches!(it, PutOutcome::Declined(DeclineReason::Full));
    assert!(outcomes.iter().filter(|it| is_full(it)).count() > 200, "{outcomes:?}");
    check_holds(&holds, 300);
}
