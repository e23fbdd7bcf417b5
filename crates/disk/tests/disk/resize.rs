//! The capacity changes while the tier is in use, and between two runs.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::sync::Arc;

use cascade_block::with_causes;
use cascade_disk::conformance::{
    StoredBlock, append, assert_gone, assert_hits, assert_recovered, block, deadline, key, open,
    pool,
};
use cascade_disk::{BlockFacts, DiskError, FilesConfig, SegmentFiles};
use cascade_memory::Pool;
use cascade_runtime::SystemClock;
use cascade_tier::tier::Tier as _;

const MIB: u64 = 1 << 20;
const BLOCK: usize = 60 << 10;

fn config(directory: &Path, capacity_bytes: u64, segment_bytes: u64) -> FilesConfig {
    FilesConfig { capacity_bytes, segment_bytes, ..FilesConfig::new(directory) }
}

fn open_at(config: &FilesConfig, pool: &Pool) -> Arc<SegmentFiles> {
    open(config.clone(), Arc::new(SystemClock), pool, deadline()).unwrap().0
}

fn numbered(range: std::ops::Range<u64>) -> Vec<(u64, usize)> {
    range.map(|number| (number, BLOCK)).collect()
}

/// Reclaims until the tier has its capacity. Updates the list of blocks, and returns the number of
/// reclaims.
fn shrink(
    files: &SegmentFiles,
    stored: &mut Vec<StoredBlock>,
    keep: impl Fn(u64) -> bool,
) -> usize {
    let mut reclaims = 0;
    while files.is_shrinking() {
        let keeps = |facts: &BlockFacts, _| {
            keep(u64::from_le_bytes(facts.key.as_bytes()[8..16].try_into().unwrap()))
        };
        let room = files.reclaim(&mut { keeps }, deadline()).unwrap();
        let dropped = |it: &StoredBlock| room.dropped.contains(&(key(it.number), it.address));
        stored.retain(|it| !dropped(it));
        for it in stored.iter_mut() {
            let moved = room.moved.iter().find(|(_, from, _)| *from == it.address);
            it.address = moved.map_or(it.address, |(_, _, to)| *to);
        }
        reclaims += 1;
        assert!(reclaims < 200, "it gets smaller");
    }
    reclaims
}

#[test]
fn a_smaller_capacity_removes_the_oldest_blocks_and_no_more_than_needed() {
    let (directory, pool) = (tempfile::tempdir().unwrap(), pool());
    let config = config(directory.path(), 32 * MIB, MIB);
    let files = open_at(&config, &pool);
    let mut stored = append(&files, &pool, &numbered(0..400));
    files.resize(12 * MIB, deadline()).unwrap();
    assert!(files.is_shrinking());
    let all = stored.clone();
    shrink(&files, &mut stored, |_| false);
    let used = files.used_bytes();
    assert!(used + MIB <= 12 * MIB && used + 2 * MIB > 12 * MIB, "{used} bytes are used");
    let removed = all.len() - stored.len();
    assert!(stored.iter().map(|it| it.number).eq(removed as u64..400), "the oldest go first");
    assert_hits(&files, &pool, &stored);
    assert_gone(&files, &pool, &all[..removed]);
    // As a tier that was opened with this capacity.
    let full = files.append(vec![block(&pool, 999, BLOCK); 40], deadline()).pop().unwrap();
    assert!(
        matches!(full, Err(DiskError::Full { capacity_bytes, .. }) if capacity_bytes == 12 * MIB)
    );
    drop(files);
    let (files, recovery) = open(config, Arc::new(SystemClock), &pool, deadline()).unwrap();
    let extra = recovery.live.len() - stored.len();
    assert!(extra < 2 && !files.is_shrinking(), "{extra}");
    assert_hits(&files, &pool, &stored);
}

/// Blocks to keep move to new segments, also while the files use more than the new capacity.
#[test]
fn a_tier_that_shrinks_keeps_the_blocks_to_keep() {
    let (directory, pool) = (tempfile::tempdir().unwrap(), pool());
    let files = open_at(&config(directory.path(), 32 * MIB, MIB), &pool);
    let mut stored = append(&files, &pool, &numbered(0..400));
    files.resize(12 * MIB, deadline()).unwrap();
    let limit = files.used_bytes() + MIB;
    shrink(&files, &mut stored, |number| number % 4 == 0);
    let kept = stored.iter().filter(|it| it.number % 4 == 0).count();
    assert_eq!(kept, 100, "one block of four fits and is kept");
    assert!(files.used_bytes() + MIB <= 12 * MIB && files.used_bytes() < limit);
    assert_hits(&files, &pool, &stored);
}

#[test]
fn a_larger_capacity_has_room_at_once() {
    let (directory, pool) = (tempfile::tempdir().unwrap(), pool());
    let files = open_at(&config(directory.path(), 4 * MIB, MIB), &pool);
    let batch = |range: std::ops::Range<u64>| range.map(|at| block(&pool, at, BLOCK)).collect();
    let results = files.append(batch(0..100), deadline());
    assert!(results.iter().any(|it| matches!(it, Err(DiskError::Full { .. }))), "it is full");
    files.resize(16 * MIB, deadline()).unwrap();
    assert!(!files.is_shrinking());
    let stored = append(&files, &pool, &numbered(100..200));
    assert_hits(&files, &pool, &stored);
    // Reduced and enlarged before anything was reclaimed: nothing is removed.
    let used = files.used_bytes();
    files.resize(4 * MIB, deadline()).unwrap();
    files.resize(16 * MIB, deadline()).unwrap();
    assert!(!files.is_shrinking() && files.used_bytes() <= used);
    assert_hits(&files, &pool, &stored);
}

/// The segment that is written and the next one are allocated in full: with the old size they would
/// take more than all of the new capacity, and no reclaim takes them.
#[test]
fn segments_of_the_earlier_size_do_not_exceed_a_much_smaller_capacity() {
    let (directory, pool) = (tempfile::tempdir().unwrap(), pool());
    let files = open_at(&config(directory.path(), 64 * MIB, 8 * MIB), &pool);
    // The second segment is nearly full, so that the third exists.
    let mut stored = append(&files, &pool, &numbered(0..260));
    assert_eq!(files.disk_stats().files, 3);
    files.resize(2 * MIB, deadline()).unwrap();
    assert!(files.used_bytes() < 16 * MIB, "the next segment is removed");
    shrink(&files, &mut stored, |_| false);
    assert!(files.used_bytes() <= 2 * MIB, "{}", files.used_bytes());
    assert_hits(&files, &pool, &stored);
    let later = append(&files, &pool, &numbered(300..310));
    assert!(files.used_bytes() <= 2 * MIB, "new segments are shorter: {}", files.used_bytes());
    files.resize(64 * MIB, deadline()).unwrap();
    let more = append(&files, &pool, &numbered(400..560));
    assert!(files.disk_stats().files < 8, "new segments have the configured size again");
    for blocks in [&stored, &later, &more] {
        assert_hits(&files, &pool, blocks);
    }
}

#[test]
fn a_tier_that_holds_more_than_its_capacity_at_opening_shrinks() {
    let (directory, pool) = (tempfile::tempdir().unwrap(), pool());
    let files = open_at(&config(directory.path(), 32 * MIB, MIB), &pool);
    let mut stored = append(&files, &pool, &numbered(0..400));
    drop(files);
    let small = config(directory.path(), 8 * MIB, MIB);
    let (files, recovery) = open(small.clone(), Arc::new(SystemClock), &pool, deadline()).unwrap();
    assert_recovered(&recovery, &stored);
    assert!(files.is_shrinking());
    let reclaims = shrink(&files, &mut stored, |number| number >= 390);
    assert!(reclaims >= 16, "{reclaims}");
    assert!(files.used_bytes() + MIB <= 8 * MIB, "{}", files.used_bytes());
    assert!((390..400).all(|number| stored.iter().any(|it| it.number == number)));
    assert_hits(&files, &pool, &stored);
    drop(files);
    let (files, recovery) = open(small, Arc::new(SystemClock), &pool, deadline()).unwrap();
    assert!(!files.is_shrinking());
    assert_recovered(&recovery, &stored);
}

#[test]
fn a_capacity_out_of_range_is_refused_and_nothing_changes() {
    let (directory, pool) = (tempfile::tempdir().unwrap(), pool());
    let files = open_at(&config(directory.path(), 4 * MIB, MIB), &pool);
    let refused = with_causes(&files.resize(MIB - 1, deadline()).unwrap_err());
    assert!(refused.contains("at least 1 MiB"), "{refused}");
    let stored = append(&files, &pool, &numbered(0..30));
    assert_hits(&files, &pool, &stored);
    assert!(!files.is_shrinking());
}
