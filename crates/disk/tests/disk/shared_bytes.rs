//! Names of the same bytes: the tier and its caller mean the same address, over reopenings too.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::sync::Arc;

use cascade_block::{BlockKey, Digest};
use cascade_disk::conformance::{block, deadline, key, meta, pool};
use cascade_disk::io::FileIo;
use cascade_disk::io::fault::{Fault, FaultPlan};
use cascade_disk::{Address, BlockFacts, FilesConfig, IoEngine, SegmentFiles};
use cascade_memory::Pool;
use cascade_runtime::SystemClock;
use cascade_tier::tier::{Load, LoadOutcome, Tier};

const LENGTH: usize = 5000;
const CAPACITY_BYTES: u64 = 1 << 20;

fn config(directory: &Path) -> FilesConfig {
    FilesConfig {
        capacity_bytes: CAPACITY_BYTES,
        segment_bytes: 256 << 10,
        ..FilesConfig::new(directory)
    }
}

fn open(directory: &Path, pool: &Pool) -> SegmentFiles {
    SegmentFiles::open(config(directory), Arc::new(SystemClock), pool, deadline()).unwrap()
}

/// Block `number` with the bytes and the digest of block 1.
fn twin(number: u64) -> BlockFacts {
    BlockFacts { digest: Some(Digest::from_bytes([1; 32])), ..meta(number, LENGTH) }
}

fn store(tier: &SegmentFiles, pool: &Pool, facts: BlockFacts, body: u64) -> Address {
    let (_, slab) = block(pool, body, LENGTH);
    tier.store(vec![(facts, slab)], deadline()).remove(0).unwrap()
}

fn recovered(tier: &SegmentFiles) -> Vec<(BlockKey, Address)> {
    tier.recover().into_iter().map(|(facts, address)| (facts.key, address)).collect()
}

fn is_hit(tier: &SegmentFiles, pool: &Pool, key: BlockKey, address: Address) -> bool {
    let slab = pool.allocate(LENGTH).unwrap();
    let outcome = tier.load(vec![Load { key, address, slab }], deadline()).remove(0);
    matches!(outcome, LoadOutcome::Hit(_))
}

/// Stores two blocks with the same bytes, under keys 1 and 2, and closes the tier.
fn store_twins(directory: &Path, pool: &Pool) {
    let tier = open(directory, pool);
    store(&tier, pool, twin(1), 1);
    store(&tier, pool, twin(2), 1);
}

/// Two blocks with the same bytes are found with one address, by which both are read and removed,
/// whichever the tier takes for the first.
#[test]
fn one_address_names_both() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool();
    store_twins(directory.path(), &pool);
    let tier = open(directory.path(), &pool);
    let found = recovered(&tier);
    let [(_, address), (_, other)] = found[..] else { panic!("{found:?}") };
    assert_eq!(address, other);
    assert!([1, 2].iter().all(|number| is_hit(&tier, &pool, key(*number), address)));
    tier.remove(&[(key(1), address), (key(2), address)], deadline()).unwrap();
    drop(tier);
    assert_eq!(recovered(&open(directory.path(), &pool)), []);
}

/// Reclaim moves the first of them: its caller knows both by the new address from then on.
#[test]
fn one_address_names_both_after_a_move() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool();
    let tier = open(directory.path(), &pool);
    store(&tier, &pool, twin(1), 1);
    // The second one is in another segment, which is younger.
    for number in 10..60 {
        store(&tier, &pool, meta(number, LENGTH), number);
    }
    store(&tier, &pool, twin(2), 1);
    drop(tier);
    let tier = open(directory.path(), &pool);
    let found = recovered(&tier);
    let mut address = found.iter().find(|(found, _)| *found == key(1)).unwrap().1;
    let is_twin = |found: &BlockKey| [key(1), key(2)].contains(found);
    let room = tier.make_room(&mut |found, _| is_twin(found), deadline()).unwrap();
    for (found, old, new) in &room.moved {
        if *found == key(1) && *old == address {
            address = *new;
        }
    }
    assert!(!room.moved.is_empty(), "{room:?}");
    assert!([1, 2].iter().all(|number| is_hit(&tier, &pool, key(*number), address)));
    tier.remove(&[(key(1), address), (key(2), address)], deadline()).unwrap();
    drop(tier);
    let left = recovered(&open(directory.path(), &pool));
    assert!(!left.iter().any(|(found, _)| is_twin(found)), "{left:?}");
}

/// Reclaims the segment of block 1, and names its bytes by key 2 while the tier asks whether to
/// keep it.
fn named_during_a_reclaim(is_kept: bool) {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool();
    let tier = open(directory.path(), &pool);
    let address = store(&tier, &pool, twin(1), 1);
    for number in 10..60 {
        store(&tier, &pool, meta(number, LENGTH), number);
    }
    let mut keep = |found: &BlockKey, _| {
        if *found != key(1) {
            return true;
        }
        tier.alias(vec![(twin(2), address)], deadline()).unwrap();
        is_kept
    };
    let room = tier.make_room(&mut keep, deadline()).unwrap();
    if is_kept {
        let new = room.moved.iter().find(|(moved, _, _)| *moved == key(2));
        let (_, _, new) = *new.expect("its caller knows its new address");
        for place in [address, new] {
            assert!([1, 2].iter().all(|number| is_hit(&tier, &pool, key(*number), place)));
        }
    } else {
        let dropped: Vec<_> = room.dropped.iter().filter(|(_, at)| *at == address).collect();
        assert_eq!(dropped, [&(key(1), address), &(key(2), address)]);
    }
    drop(tier);
    let tier = open(directory.path(), &pool);
    let left = recovered(&tier);
    assert_eq!([1, 2].map(|number| left.iter().any(|(it, _)| *it == key(number))), [is_kept; 2]);
}

/// The name was lost with the segment, and its caller was not told. Found by `cascade sim`.
#[test]
fn a_key_that_is_added_during_a_reclaim_moves_with_its_block() {
    named_during_a_reclaim(true);
}

#[test]
fn a_key_that_is_added_during_a_reclaim_is_dropped_with_its_block() {
    named_during_a_reclaim(false);
}

/// Both are there after any later opening, with a checkpoint and without one, and neither comes
/// back once it was removed.
#[test]
fn merged_blocks_stay_merged_and_removed() {
    for (has_checkpoint, removed) in [(false, 1), (false, 2), (true, 1), (true, 2)] {
        let directory = tempfile::tempdir().unwrap();
        let pool = pool();
        store_twins(directory.path(), &pool);
        let tier = open(directory.path(), &pool);
        if has_checkpoint {
            tier.flush(deadline()).unwrap();
        }
        drop(tier);
        let tier = open(directory.path(), &pool);
        let found = recovered(&tier);
        assert_eq!(found.len(), 2, "{found:?}");
        let address = found[0].1;
        tier.remove(&[(key(removed), address)], deadline()).unwrap();
        assert!(is_hit(&tier, &pool, key(3 - removed), address));
        drop(tier);
        let tier = open(directory.path(), &pool);
        assert_eq!(recovered(&tier), [(key(3 - removed), address)]);
        assert!(is_hit(&tier, &pool, key(3 - removed), address));
        // Nor does a reclaim bring the removed key back.
        tier.make_room(&mut |_, _| true, deadline()).unwrap();
        drop(tier);
        let left = recovered(&open(directory.path(), &pool));
        assert!(matches!(left[..], [(found, _)] if found == key(3 - removed)), "{left:?}");
    }
}

/// From any call of an opening on, all fail. That opening may miss the second key, whose alias it
/// could not write, or both, whose segment it could not read. The next one has both, and what is
/// removed then stays removed.
#[test]
fn a_fault_while_blocks_are_merged_loses_none() {
    let pool = pool();
    let io = FileIo::system(IoEngine::Psync, false, 4, None, Arc::new(SystemClock)).unwrap();
    let run = |at_call| {
        let directory = tempfile::tempdir().unwrap();
        store_twins(directory.path(), &pool);
        let plan = FaultPlan::new(Fault::Io, at_call, true);
        let opened = SegmentFiles::open_with(config(directory.path()), plan.wrap(&io), deadline());
        let Ok(tier) = opened else { return (plan.calls(), 0) };
        let found = recovered(&tier);
        assert!(found.first().is_none_or(|(first, _)| *first == key(1)), "{found:?}");
        drop(tier);
        let tier = open(directory.path(), &pool);
        let again = recovered(&tier);
        assert_eq!(again.len(), 2, "{again:?}");
        let address = again[0].1;
        tier.remove(&[(key(1), address), (key(2), address)], deadline()).unwrap();
        drop(tier);
        assert_eq!(recovered(&open(directory.path(), &pool)), []);
        (plan.calls(), found.len())
    };
    let (calls, found) = run(u64::MAX);
    assert_eq!(found, 2);
    let found: Vec<_> = (0..calls).map(|at_call| run(at_call).1).collect();
    assert!(found.contains(&1), "no fault kept the blocks from being merged: {found:?}");
}
