//! One file per block: an address refers to one write, whatever file has the key's name later.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cascade_disk::conformance::{
    StoredBlock, append, assert_gone, assert_hits, assert_recovered, block, content, deadline, key,
    meta, pool, read_as,
};
use cascade_disk::io::FileIo;
use cascade_disk::io::fault::{Fault, FaultPlan};
use cascade_disk::{
    Address, BlockFiles, DiskError, FileLayout, FilesConfig, IoEngine, LoadOutcome, Recovery,
    WriterName, open, open_with,
};
use cascade_memory::Pool;
use cascade_runtime::SystemClock;

const LENGTH: usize = 5000;

fn config(directory: &Path) -> FilesConfig {
    FilesConfig {
        capacity_bytes: 1 << 20,
        layout: FileLayout::FilePerBlock,
        ..FilesConfig::new(directory)
    }
}

fn open_tier(directory: &Path, pool: &Pool) -> (Arc<dyn BlockFiles>, Recovery) {
    open(config(directory), Arc::new(SystemClock), pool, deadline()).unwrap()
}

fn file_of(directory: &Path, number: u64) -> PathBuf {
    let name = key(number).to_string();
    directory.join("blocks").join(&name[..2]).join(format!("{name}.block"))
}

/// Stores block 1 with the bytes of another block.
fn append_other(files: &dyn BlockFiles, pool: &Pool, body: u64) -> Address {
    let (_, slab) = block(pool, body, LENGTH);
    files.append(vec![(meta(1, LENGTH), slab)], deadline()).remove(0).unwrap()
}

fn assert_body(files: &dyn BlockFiles, pool: &Pool, address: Address, body: u64) {
    let stored = StoredBlock { number: 1, length: LENGTH, address };
    match read_as(files, pool, &[(key(1), stored)]).remove(0) {
        LoadOutcome::Hit(slab) => {
            assert!(slab.host() == Some(&content(body, LENGTH)), "{address:?}");
        }
        other => panic!("{address:?}: {other:?}"),
    }
}

/// Checks that a stale address does not read, alias or remove the file of a later write.
fn assert_stale(files: &dyn BlockFiles, pool: &Pool, stale: Address) {
    assert_gone(files, pool, &[StoredBlock { number: 1, length: LENGTH, address: stale }]);
    let alias = files.alias(&[(meta(2, LENGTH), stale)], deadline()).remove(0);
    assert!(matches!(alias, Err(DiskError::NoTarget)), "{alias:?}");
    files.remove(&[(key(1), stale)], deadline()).unwrap();
}

#[test]
fn an_address_is_never_reused() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool();
    let (files, _) = open_tier(directory.path(), &pool);
    let old = append(files.as_ref(), &pool, &[(1, LENGTH)])[0].address;
    files.remove(&[(key(1), old)], deadline()).unwrap();
    let removed_then_stored = append_other(files.as_ref(), &pool, 77);
    assert_ne!(removed_then_stored, old);
    assert_stale(files.as_ref(), &pool, old);
    assert_body(files.as_ref(), &pool, removed_then_stored, 77);
    let stored_over = append_other(files.as_ref(), &pool, 78);
    assert_stale(files.as_ref(), &pool, removed_then_stored);
    assert_body(files.as_ref(), &pool, stored_over, 78);
    assert_eq!(files.stats().files, 1);
    drop(files);
    let (files, recovery) = open_tier(directory.path(), &pool);
    assert_eq!(recovery.live, [(meta(1, LENGTH), stored_over)]);
    assert_stale(files.as_ref(), &pool, old);
    assert_body(files.as_ref(), &pool, stored_over, 78);
    let next = append_other(files.as_ref(), &pool, 79);
    assert!(![old, removed_then_stored, stored_over].contains(&next), "{next:?}");
}

/// A rename that had timed out completes late and replaces a new file with an old one.
#[test]
fn a_late_rename_never_returns_wrong_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool();
    let (files, _) = open_tier(directory.path(), &pool);
    let path = file_of(directory.path(), 1);
    let late = path.with_extension("late");
    let old = append(files.as_ref(), &pool, &[(1, LENGTH)])[0];
    fs::rename(&path, &late).unwrap();
    files.remove(&[(key(1), old.address)], deadline()).unwrap();
    let new = append_other(files.as_ref(), &pool, 77);
    fs::rename(&late, &path).unwrap();
    assert_stale(files.as_ref(), &pool, new);
    assert!(path.exists(), "a stale address removes nothing");
    assert_eq!(files.stats().files, 1, "the file under the name is counted");
    let newest = append_other(files.as_ref(), &pool, 78);
    assert_body(files.as_ref(), &pool, newest, 78);
    fs::copy(&path, &late).unwrap();
    files.remove(&[(key(1), newest)], deadline()).unwrap();
    fs::rename(&late, &path).unwrap();
    drop(files);
    let (files, recovery) = open_tier(directory.path(), &pool);
    assert_recovered_body(&recovery, newest);
    assert_body(files.as_ref(), &pool, newest, 78);
}

fn assert_recovered_body(recovery: &Recovery, address: Address) {
    assert_recovered(recovery, &[StoredBlock { number: 1, length: LENGTH, address }]);
}

#[test]
fn a_reclaim_keeps_files_of_other_writers() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool();
    let (ours, _) = open_tier(directory.path(), &pool);
    let old = append(ours.as_ref(), &pool, &[(1, LENGTH)])[0].address;
    let writer = WriterName::new("w1").unwrap();
    let config = FilesConfig { writer, ..config(directory.path()) };
    let (theirs, _) = open(config, Arc::new(SystemClock), &pool, deadline()).unwrap();
    let new = append_other(theirs.as_ref(), &pool, 77);
    let reclaimed = ours.reclaim(&mut |_, _| false, deadline()).unwrap();
    assert_eq!(reclaimed.dropped, [(key(1), old)]);
    assert_body(theirs.as_ref(), &pool, new, 77);
    let probed = ours.lookup(&key(1), deadline()).unwrap();
    assert_eq!(probed, Some((meta(1, LENGTH), new)));
    assert_body(ours.as_ref(), &pool, new, 77);
    let reclaimed = ours.reclaim(&mut |_, _| false, deadline()).unwrap();
    assert_eq!(reclaimed.dropped, [(key(1), new)]);
    assert!(!file_of(directory.path(), 1).exists());
}

/// The contract of `remove`: reads return `Gone` from now on, even if the file could not be
/// removed.
#[test]
fn a_failed_removal_hides_the_block() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool();
    let (files, _) = open_tier(directory.path(), &pool);
    let stored = append(files.as_ref(), &pool, &[(1, LENGTH), (2, LENGTH)]);
    drop(files);
    let file_io = FileIo::system(IoEngine::Psync, false, 4, None, Arc::new(SystemClock)).unwrap();
    let counting = FaultPlan::new(Fault::Io, u64::MAX, false);
    let opened = open_with(config(directory.path()), counting.wrap(&file_io), deadline());
    drop(opened.unwrap());
    let plan = FaultPlan::new(Fault::Io, counting.calls(), true);
    let opened = open_with(config(directory.path()), plan.wrap(&file_io), deadline());
    let (files, _) = opened.unwrap();
    files.remove(&[(key(1), stored[0].address)], deadline()).unwrap_err();
    assert_gone(files.as_ref(), &pool, &stored[..1]);
    drop(files);
    let (files, _) = open_tier(directory.path(), &pool);
    assert_hits(files.as_ref(), &pool, &stored);
}

/// A sync covered every write since the last one, also those whose files were gone. After days
/// without a flush, no flush came to its end.
#[test]
fn a_sync_covers_only_files_that_are_there() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool();
    let plan = FaultPlan::new(Fault::Io, u64::MAX, false);
    let file_io = FileIo::system(IoEngine::Psync, false, 4, None, Arc::new(SystemClock)).unwrap();
    let opened = open_with(config(directory.path()), plan.wrap(&file_io), deadline());
    let (files, _) = opened.unwrap();
    for _ in 0..50 {
        for stored in append(files.as_ref(), &pool, &[(1, LENGTH), (2, LENGTH), (3, LENGTH)]) {
            files.remove(&[(key(stored.number), stored.address)], deadline()).unwrap();
        }
    }
    let kept = append(files.as_ref(), &pool, &[(4, LENGTH)]);
    let before = plan.calls();
    files.sync(deadline()).unwrap();
    let calls = plan.calls() - before;
    assert!(calls < 30, "{calls} calls for one file and the directories of three others");
    assert_hits(files.as_ref(), &pool, &kept);
}

/// Stores 40 blocks, and syncs twice. Call number `at` of the first sync times out. Returns the
/// calls of both syncs.
fn calls_of_syncs(at: u64) -> [u64; 2] {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool();
    let file_io = FileIo::system(IoEngine::Psync, false, 4, None, Arc::new(SystemClock)).unwrap();
    let blocks: Vec<_> = (0..40).map(|number| (number, LENGTH)).collect();
    let until_stored = |directory: &Path, plan: &Arc<FaultPlan>| {
        let (files, _) = open_with(config(directory), plan.wrap(&file_io), deadline()).unwrap();
        append(files.as_ref(), &pool, &blocks);
        (files, plan.calls())
    };
    let counted = tempfile::tempdir().unwrap();
    let (_, before) = until_stored(counted.path(), &FaultPlan::new(Fault::Io, u64::MAX, false));
    let plan = FaultPlan::new(Fault::Hang, before.saturating_add(at), false);
    let (files, before) = until_stored(directory.path(), &plan);
    assert_eq!(files.sync(deadline()).is_err(), at < u64::MAX);
    let between = plan.calls();
    files.sync(deadline()).unwrap();
    [between - before, plan.calls() - between]
}

/// It began again with the first file, so that it never ended where all took longer than a flush
/// may.
#[test]
fn a_sync_goes_on_where_an_earlier_one_timed_out() {
    let [all, none] = calls_of_syncs(u64::MAX);
    assert_eq!(none, 0, "nothing is left to sync");
    let [until_late, rest] = calls_of_syncs(all * 3 / 4);
    assert!(until_late + rest < all * 5 / 4, "{until_late} and {rest} calls of {all}");
}
