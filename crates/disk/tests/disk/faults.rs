//! A disk that fails at the k-th call, for every k: no acknowledged block is lost or wrong.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use cascade_disk::conformance::{
    self, StoredBlock, assert_gone, assert_hits, content, deadline, key, meta, open_with,
};
use cascade_disk::io::FileIo;
use cascade_disk::io::fault::{Fault, FaultPlan};
use cascade_disk::{Address, FilesConfig, IoEngine, Load, LoadOutcome, Recovery, SegmentFiles};
use cascade_memory::{HugePages, Pool, PoolConfig};
use cascade_runtime::SystemClock;
use cascade_tier::tier::Tier as _;

/// The state that the tier acknowledged for a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExpectedState {
    Stored(Address),
    Removed,
    /// An operation on it failed: the block may be stored or not, but is never wrong.
    Unknown,
}

type ExpectedStates = BTreeMap<u64, ExpectedState>;

fn config(directory: &Path) -> FilesConfig {
    FilesConfig {
        capacity_bytes: 2 << 20,
        segment_bytes: 128 << 10,
        durable: true,
        ..FilesConfig::new(directory)
    }
}

fn small_pool() -> Pool {
    let config =
        PoolConfig { capacity_bytes: 8 << 20, huge_pages: HugePages::Never, populate: false };
    Pool::new(&config).unwrap()
}

fn file_io() -> FileIo {
    FileIo::system(IoEngine::Psync, false, 4, None, Arc::new(SystemClock)).unwrap()
}

fn length(number: u64) -> usize {
    [100, 4096, 5000, 12_288][usize::try_from(number % 4).unwrap()]
}

fn append(
    files: &SegmentFiles,
    pool: &Pool,
    numbers: std::ops::Range<u64>,
    to: &mut ExpectedStates,
) {
    let batch = numbers
        .clone()
        .map(|number| cascade_disk::conformance::block(pool, number, length(number)))
        .collect();
    for (number, result) in numbers.zip(files.append(batch, deadline())) {
        to.insert(number, result.map_or(ExpectedState::Unknown, ExpectedState::Stored));
    }
}

/// Runs every operation once. Errors are recorded.
fn run_every_operation(files: &SegmentFiles, pool: &Pool, states: &mut ExpectedStates) {
    append(files, pool, 0..8, states);
    append(files, pool, 8..20, states);
    for number in [1, 9] {
        if let ExpectedState::Stored(address) = states[&number] {
            let removed = files.remove(&[(key(number), address)], deadline());
            states.insert(
                number,
                removed.map_or(ExpectedState::Unknown, |()| ExpectedState::Removed),
            );
        }
    }
    if let ExpectedState::Stored(address) = states[&2] {
        let alias = files.alias_blocks(&[(meta(102, length(2)), address)], deadline()).remove(0);
        states.insert(102, alias.map_or(ExpectedState::Unknown, ExpectedState::Stored));
    }
    let checkpoint = files.checkpoint(deadline());
    drop(checkpoint);
    append(files, pool, 20..32, states);
    let mut offered = Vec::new();
    let reclaimed = files.reclaim(
        &mut |meta, _| {
            offered.push(meta.key);
            meta.is_prefix
        },
        deadline(),
    );
    match reclaimed {
        Ok(reclaimed) => {
            for (number, state) in states.iter_mut() {
                let named = |(key_of, _): &(_, _)| *key_of == key(*number);
                if reclaimed.dropped.iter().any(named) {
                    *state = ExpectedState::Removed;
                }
                let moved = reclaimed.moved.iter().find(|(moved, _, _)| *moved == key(*number));
                if let Some((_, _, to)) = moved {
                    *state = ExpectedState::Stored(*to);
                }
            }
        }
        Err(_failed) => {
            for (number, state) in states.iter_mut() {
                let was_kept = number.is_multiple_of(2);
                if offered.contains(&key(*number)) && !was_kept {
                    *state = ExpectedState::Unknown;
                }
            }
        }
    }
    append(files, pool, 32..40, states);
    for (number, state) in states.iter() {
        if let ExpectedState::Stored(address) = state {
            check(files, pool, *number, *address, false);
        }
    }
}

/// Reads a block. It must have the right bytes or, unless `must_hit`, be a miss or an error.
fn check(files: &SegmentFiles, pool: &Pool, number: u64, address: Address, must_hit: bool) {
    let body = number % 100;
    let slab = pool.allocate(length(body)).unwrap();
    let request = Load { address, key: key(number), slab };
    match files.load(vec![request], deadline()).remove(0) {
        LoadOutcome::Hit(slab) => {
            assert!(slab.host() == Some(&content(body, length(body))), "{number}");
        }
        other => assert!(!must_hit, "block {number}: {other:?}"),
    }
}

fn verify(files: &SegmentFiles, recovery: &Recovery, pool: &Pool, states: &ExpectedStates) {
    let found: BTreeMap<_, _> = recovery.live.iter().map(|(meta, at)| (meta.key, *at)).collect();
    for (&number, state) in states {
        match (state, found.get(&key(number))) {
            (ExpectedState::Stored(_), Some(&address)) => check(files, pool, number, address, true),
            (ExpectedState::Stored(_), None) => {
                panic!("block {number} was acknowledged but is lost")
            }
            (ExpectedState::Removed, Some(_)) => {
                panic!("block {number} was removed but was recovered")
            }
            (ExpectedState::Unknown, Some(&address)) => check(files, pool, number, address, false),
            (ExpectedState::Removed | ExpectedState::Unknown, None) => {}
        }
    }
}

/// A directory in memory if the machine has one: there are thousands of runs with many syncs each.
fn memory_directory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// One run. Returns the number of I/O calls.
fn run(fault: Fault, at_call: u64, is_permanent: bool) -> u64 {
    let directory = memory_directory();
    let pool = small_pool();
    let plan = FaultPlan::new(fault, at_call, is_permanent);
    let mut states = ExpectedStates::new();
    let config = config(directory.path());
    if let Ok((files, _)) = open_with(config.clone(), plan.wrap(&file_io()), deadline()) {
        run_every_operation(files.as_ref(), &pool, &mut states);
    }
    for _ in 0..2 {
        let (files, recovery) = open_with(config.clone(), file_io(), deadline()).unwrap();
        verify(files.as_ref(), &recovery, &pool, &states);
    }
    assert_eq!(pool.stats().requested_bytes, 0, "every slab was released");
    plan.calls()
}

/// Each call fails once. With `CASCADE_FAULT_STEP=5`, every fifth does.
#[expect(clippy::disallowed_methods, reason = "the gate shortens the test by a variable")]
fn every_call(fault: Fault) {
    let step = std::env::var("CASCADE_FAULT_STEP").map_or(1, |text| text.parse().unwrap());
    let calls = run(fault, u64::MAX, false);
    for at_call in (0..calls).step_by(step) {
        for is_permanent in [false, true] {
            run(fault, at_call, is_permanent);
        }
    }
}

/// Reclaims a segment twice; the call with this number fails. Every key that was not reported as
/// dropped is a hit. Returns the calls of the first reclaim, and whether it failed.
fn reclaim_twice(at_call: u64) -> (std::ops::Range<u64>, bool) {
    let directory = memory_directory();
    let pool = small_pool();
    let plan = FaultPlan::new(Fault::Io, at_call, false);
    let config = config(directory.path());
    let (files, _) = open_with(config, plan.wrap(&file_io()), deadline()).unwrap();
    let mut states = ExpectedStates::new();
    append(files.as_ref(), &pool, 0..40, &mut states);
    let address = |state: ExpectedState| match state {
        ExpectedState::Stored(address) => address,
        other => panic!("{other:?}"),
    };
    let mut addresses: BTreeMap<u64, Address> =
        states.into_iter().map(|(number, state)| (number, address(state))).collect();
    let second_keys = [2, 3].map(|number| (meta(100 + number, length(number)), addresses[&number]));
    for (number, alias) in [102, 103].into_iter().zip(files.alias_blocks(&second_keys, deadline()))
    {
        addresses.insert(number, alias.unwrap());
    }
    // Ends the seal of the segment before, whose calls are not those of the reclaim.
    files.sync(deadline()).unwrap();
    let first_call = plan.calls();
    let first = files.reclaim(&mut |_, _| true, deadline());
    let calls = first_call..plan.calls();
    let has_failed = first.is_err();
    for reclaimed in [first, files.reclaim(&mut |_, _| true, deadline())].into_iter().flatten() {
        addresses.retain(|number, address| {
            let of_key = |moved: &&(_, _, _)| moved.0 == key(*number);
            *address = reclaimed.moved.iter().find(of_key).map_or(*address, |moved| moved.2);
            !reclaimed.dropped.iter().any(|(dropped, _)| *dropped == key(*number))
        });
    }
    for (number, address) in addresses {
        check(files.as_ref(), &pool, number, address, true);
    }
    (calls, has_failed)
}

/// Appends one batch over several segments; the call with this number fails. Then removes blocks
/// and opens the directory again. Returns the number of I/O calls.
fn append_over_segments(fault: Fault, at_call: u64, durable: bool) -> u64 {
    let directory = memory_directory();
    let pool = small_pool();
    let plan = FaultPlan::new(fault, at_call, false);
    let config = FilesConfig { durable, ..config(directory.path()) };
    let mut states = ExpectedStates::new();
    if let Ok((files, _)) = open_with(config.clone(), plan.wrap(&file_io()), deadline()) {
        append(files.as_ref(), &pool, 0..40, &mut states);
        append(files.as_ref(), &pool, 40..60, &mut states);
        for number in (0..60).step_by(9) {
            let ExpectedState::Stored(address) = states[&number] else { continue };
            let removed = files.remove(&[(key(number), address)], deadline());
            let state = removed.map_or(ExpectedState::Unknown, |()| ExpectedState::Removed);
            states.insert(number, state);
        }
        drop(files.sync(deadline()));
        for (number, state) in &states {
            if let ExpectedState::Stored(address) = state {
                check(files.as_ref(), &pool, *number, *address, false);
            }
        }
        if at_call == u64::MAX {
            let stats = files.disk_stats();
            let sealed_bytes = stats.files * config.segment_bytes - stats.used_bytes;
            assert!(stats.files > 2 && stats.segments_failed == 0, "{stats:?}");
            assert!(sealed_bytes > 0, "full segments are sealed when the call returns: {stats:?}");
        }
    }
    let (files, recovery) = open_with(config, file_io(), deadline()).unwrap();
    verify(files.as_ref(), &recovery, &pool, &states);
    drop(files);
    assert_eq!(pool.stats().requested_bytes, 0, "every slab was released");
    plan.calls()
}

/// Full segments are sealed, and the next ones created, while others are written.
#[test]
fn a_batch_over_several_segments_survives_every_fault() {
    for durable in [false, true] {
        for fault in [Fault::Io, Fault::NoSpace, Fault::Torn, Fault::Hang] {
            let calls = append_over_segments(fault, u64::MAX, durable);
            for at_call in 0..calls {
                append_over_segments(fault, at_call, durable);
            }
        }
    }
}

/// A reclaim that failed after it had moved a block lost the block's second key.
#[test]
fn a_failed_reclaim_loses_no_key() {
    let (calls, _) = reclaim_twice(u64::MAX);
    let failed = calls.filter(|at_call| reclaim_twice(*at_call).1).count();
    assert!(failed > 0, "no fault made the reclaim fail");
}

/// The checkpoint after a failed reclaim brought back keys that were removed in between.
#[test]
fn keys_removed_after_a_failed_reclaim_stay_removed() {
    let run = |at_call: u64| {
        let directory = memory_directory();
        let pool = small_pool();
        let plan = FaultPlan::new(Fault::Io, at_call, false);
        let config = config(directory.path());
        let (files, _) = open_with(config.clone(), plan.wrap(&file_io()), deadline()).unwrap();
        let mut states = ExpectedStates::new();
        append(files.as_ref(), &pool, 0..40, &mut states);
        let ExpectedState::Stored(address) = states[&2] else { panic!("{states:?}") };
        files.alias_blocks(&[(meta(102, length(2)), address)], deadline()).remove(0).unwrap();
        let reclaimed = files.reclaim(&mut |_, _| true, deadline());
        let calls = plan.calls();
        let removed = [2, 102].map(|number| (key(number), address));
        files.remove(&removed, deadline()).unwrap();
        files.checkpoint(deadline()).unwrap();
        drop(files);
        let (_, recovery) = open_with(config, file_io(), deadline()).unwrap();
        let is_removed = |key| removed.iter().any(|(removed, _)| *removed == key);
        assert!(!recovery.live.iter().any(|(meta, _)| is_removed(meta.key)), "{reclaimed:?}");
        (calls, reclaimed.is_err())
    };
    let (calls, _) = run(u64::MAX);
    // The last call of a reclaim removes the file, after all blocks were moved.
    assert!(run(calls - 1).1, "the reclaim fails");
}

macro_rules! faults {
    ($($name:ident: $fault:expr;)*) => {$(
        #[test]
        fn $name() {
            every_call($fault);
        }
    )*};
}

faults! {
    segments_survive_io_errors: Fault::Io;
    segments_survive_full_disks: Fault::NoSpace;
    segments_survive_short_transfers: Fault::Short;
    segments_survive_torn_writes: Fault::Torn;
    segments_survive_hangs: Fault::Hang;
}

/// Reclaims a segment after the faulty call, removes every block and opens the directory again.
/// Returns the numbers of the first and the last call of the first reclaim.
fn remove_after_reclaim(fault: Fault, at_call: u64) -> (u64, u64) {
    let directory = memory_directory();
    let pool = conformance::pool();
    let plan = FaultPlan::new(fault, at_call, false);
    let config = config(directory.path());
    let (files, _) = open_with(config.clone(), plan.wrap(&file_io()), deadline()).unwrap();
    let mut stored: Vec<StoredBlock> = Vec::new();
    // Each batch fills most of a segment.
    for batch in 0..5 {
        let blocks: Vec<_> = (batch * 12..batch * 12 + 12).map(|number| (number, 8000)).collect();
        stored.extend(conformance::append(files.as_ref(), &pool, &blocks));
    }
    // Ends the seal of the segment before, whose calls are not those of the reclaim.
    files.sync(deadline()).unwrap();
    let first = plan.calls();
    let reclaim = |stored: &mut Vec<StoredBlock>| {
        let reclaimed = files.reclaim(&mut |_, _| true, deadline())?;
        for (moved, from, to) in &reclaimed.moved {
            let is_moved =
                |each: &&mut StoredBlock| key(each.number) == *moved && each.address == *from;
            if let Some(each) = stored.iter_mut().find(is_moved) {
                each.address = *to;
            }
        }
        // A move that failed may count as damage.
        stored.retain(|each| !reclaimed.dropped.contains(&(key(each.number), each.address)));
        Ok::<_, cascade_disk::DiskError>(())
    };
    drop(reclaim(&mut stored));
    let last = plan.calls();
    assert_hits(files.as_ref(), &pool, &stored);
    // Another segment is almost empty now, so the second reclaim chooses that one.
    let is_removed = |each: &StoredBlock| (24..34).contains(&each.number);
    let (mut removed, mut stored): (Vec<_>, Vec<_>) = stored.into_iter().partition(is_removed);
    let remove = |blocks: &[StoredBlock]| {
        let keys: Vec<_> = blocks.iter().map(|each| (key(each.number), each.address)).collect();
        files.remove(&keys, deadline()).unwrap();
    };
    remove(&removed);
    reclaim(&mut stored).unwrap();
    assert_hits(files.as_ref(), &pool, &stored);
    remove(&stored);
    removed.extend(stored);
    assert_gone(files.as_ref(), &pool, &removed);
    drop(files);
    let (_, recovery) = open_with(config, file_io(), deadline()).unwrap();
    let live: Vec<_> = recovery.live.iter().map(|(meta, at)| (meta.written_unix_ms, *at)).collect();
    assert!(live.is_empty(), "{fault:?} at call {at_call}: removed but recovered: {live:?}");
    (first, last)
}

/// A failed reclaim left two copies of the blocks that it had moved. A removal removed one of them,
/// and the next opening recovered the other.
#[test]
fn blocks_removed_after_a_failed_reclaim_are_not_recovered() {
    for fault in [Fault::Io, Fault::NoSpace, Fault::Torn, Fault::Hang] {
        let (first, last) = remove_after_reclaim(fault, u64::MAX);
        for at_call in first..last {
            remove_after_reclaim(fault, at_call);
        }
    }
}
