//! The number of syncs that writes make.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cascade_disk::conformance::{append, assert_hits, assert_recovered, deadline, open_with, pool};
use cascade_disk::io::{
    FileIo, Transfer, TransferEngine, TransferKind, TransferOutcome, TransferQueue,
};
use cascade_disk::{DiskError, FilesConfig, IoEngine};
use cascade_runtime::{Deadline, SystemClock};

/// Counts the syncs of another engine, and lets the next ones fail.
#[derive(Debug)]
struct CountingEngine {
    inner: Arc<dyn TransferEngine>,
    syncs: AtomicU64,
    failures: AtomicU64,
    /// Of the failures.
    kind: ErrorKind,
}

struct CountingQueue<'a> {
    inner: &'a mut dyn TransferQueue,
    engine: &'a CountingEngine,
}

impl CountingEngine {
    fn new(inner: &Arc<dyn TransferEngine>, kind: ErrorKind) -> Arc<Self> {
        let (syncs, failures) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { inner: Arc::clone(inner), syncs, failures, kind })
    }

    fn takes_failure(&self) -> bool {
        let less = |left: u64| left.checked_sub(1);
        self.failures.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }
}

impl TransferEngine for CountingEngine {
    fn name(&self) -> &'static str {
        "counting"
    }

    fn run(&self, queue: &mut dyn TransferQueue, deadline: Deadline) {
        self.inner.run(&mut CountingQueue { inner: queue, engine: self }, deadline);
    }
}

impl TransferQueue for CountingQueue<'_> {
    fn next_transfer(&mut self) -> Option<(usize, Transfer)> {
        let next = self.inner.next_transfer();
        if next.as_ref().is_some_and(|(_, transfer)| transfer.kind == TransferKind::Sync) {
            self.engine.syncs.fetch_add(1, Ordering::Relaxed);
        }
        next
    }

    fn complete(&mut self, number: usize, mut outcome: TransferOutcome) {
        let is_sync = |transfer: &Transfer| transfer.kind == TransferKind::Sync;
        if outcome.transfer.as_ref().is_some_and(is_sync) && self.engine.takes_failure() {
            outcome.result = Err(self.engine.kind.into());
        }
        self.inner.complete(number, outcome);
    }
}

/// Appends blocks that fill three segments. Returns the syncs until a checkpoint after it.
fn syncs_of_three_segments(durable: bool) -> u64 {
    let directory = tempfile::tempdir().unwrap();
    let config = FilesConfig {
        capacity_bytes: 2 << 20,
        segment_bytes: 128 << 10,
        durable,
        ..FilesConfig::new(directory.path())
    };
    let io = FileIo::system(IoEngine::Psync, false, 4, None, Arc::new(SystemClock)).unwrap();
    let engine = CountingEngine::new(&io.engine, ErrorKind::TimedOut);
    let syncs = || engine.syncs.load(Ordering::Relaxed);
    let io = FileIo { engine: Arc::<CountingEngine>::clone(&engine), ..io };
    let (files, _) = open_with(config.clone(), io, deadline()).unwrap();
    let pool = pool();
    let blocks: Vec<_> = (0..24).map(|number| (number, 12_288)).collect();
    let stored = append(files.as_ref(), &pool, &blocks);
    assert_eq!(files.disk_stats().files, 3);
    files.checkpoint(deadline()).unwrap();
    let syncs = syncs();
    assert_hits(files.as_ref(), &pool, &stored);
    drop(files);
    let io = FileIo::system(IoEngine::Psync, false, 4, None, Arc::new(SystemClock)).unwrap();
    let (_, recovery) = open_with(config, io, deadline()).unwrap();
    assert_recovered(&recovery, &stored);
    syncs
}

/// A full segment was synced again when it was sealed, after the sync that made its blocks durable.
#[test]
fn a_durable_tier_syncs_each_segment_once() {
    assert_eq!(syncs_of_three_segments(true), 4, "the checkpoint syncs the active one");
}

#[test]
fn other_tiers_sync_a_segment_when_it_is_sealed() {
    assert_eq!(syncs_of_three_segments(false), 3, "the checkpoint syncs the active one");
}

/// A sync that failed or timed out closed its segment, and the next sync left that segment out.
/// It reported success to another caller whose blocks were there.
#[test]
fn a_segment_whose_sync_failed_is_synced_by_the_next_one() {
    let directory = tempfile::tempdir().unwrap();
    let io = FileIo::system(IoEngine::Psync, false, 4, None, Arc::new(SystemClock)).unwrap();
    let engine = CountingEngine::new(&io.engine, ErrorKind::TimedOut);
    let syncs = || engine.syncs.load(Ordering::Relaxed);
    let io = FileIo { engine: Arc::<CountingEngine>::clone(&engine), ..io };
    let (files, _) = open_with(FilesConfig::new(directory.path()), io, deadline()).unwrap();
    let pool = pool();
    let stored = append(files.as_ref(), &pool, &[(1, 5000)]);
    for failures in 1..3 {
        engine.failures.store(1, Ordering::Relaxed);
        files.sync(deadline()).unwrap_err();
        assert_eq!(syncs(), failures);
    }
    files.checkpoint(deadline()).unwrap();
    assert_eq!(syncs(), 3);
    files.sync(deadline()).unwrap();
    assert_eq!(syncs(), 3, "nothing is left to sync");
    assert_hits(files.as_ref(), &pool, &stored);
}

/// The sync of a full segment failed in the background. The next flush synced the segment again and
/// succeeded, although a sync after a failed one says nothing about what that has lost.
#[test]
fn a_failed_sync_of_a_full_segment_fails_the_next_flush() {
    let directory = tempfile::tempdir().unwrap();
    let io = FileIo::system(IoEngine::Psync, false, 4, None, Arc::new(SystemClock)).unwrap();
    let engine = CountingEngine::new(&io.engine, ErrorKind::Other);
    let io = FileIo { engine: Arc::<CountingEngine>::clone(&engine), ..io };
    let config = FilesConfig {
        capacity_bytes: 2 << 20,
        segment_bytes: 128 << 10,
        ..FilesConfig::new(directory.path())
    };
    let (files, _) = open_with(config, io, deadline()).unwrap();
    let pool = pool();
    engine.failures.store(1, Ordering::Relaxed);
    let blocks: Vec<_> = (0..24).map(|number| (number, 12_288)).collect();
    let stored = append(files.as_ref(), &pool, &blocks);
    assert_eq!(engine.failures.load(Ordering::Relaxed), 0, "a segment was full");
    let error = files.checkpoint(deadline()).expect_err("its blocks may be lost");
    assert!(matches!(error, DiskError::Io { operation: "sync", .. }), "{error}");
    files.checkpoint(deadline()).expect("reported once");
    assert_hits(files.as_ref(), &pool, &stored);
}
