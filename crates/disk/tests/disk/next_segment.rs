//! A full segment is sealed, and the next one created, while blocks are written.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use cascade_disk::conformance::{append, assert_hits, assert_recovered, deadline, open_with, pool};
use cascade_disk::io::{FileIo, Transfer, TransferEngine, TransferKind, TransferQueue};
use cascade_disk::{DiskError, FilesConfig, IoEngine, SegmentFiles};
use cascade_runtime::{Deadline, SystemClock};

/// Time that another thread may take to get where the test waits for it.
const LIMIT: Duration = Duration::from_secs(60);

/// Another engine, whose first sync waits until the test lets it go on, and fails if the test says
/// so.
#[derive(Debug)]
struct GatedEngine {
    inner: Arc<dyn TransferEngine>,
    is_gated: AtomicBool,
    fails: AtomicBool,
    begun: Mutex<mpsc::Sender<()>>,
    go: Mutex<mpsc::Receiver<()>>,
}

struct GatedQueue<'a> {
    inner: &'a mut dyn TransferQueue,
    engine: &'a GatedEngine,
    was_gated: bool,
}

impl TransferEngine for GatedEngine {
    fn name(&self) -> &'static str {
        "gated"
    }

    fn run(&self, queue: &mut dyn TransferQueue, deadline: Deadline) {
        self.inner.run(&mut GatedQueue { inner: queue, engine: self, was_gated: false }, deadline);
    }
}

impl TransferQueue for GatedQueue<'_> {
    fn next_transfer(&mut self) -> Option<(usize, Transfer)> {
        let next = self.inner.next_transfer();
        let is_sync = next.as_ref().is_some_and(|(_, its)| its.kind == TransferKind::Sync);
        if is_sync && self.engine.is_gated.swap(false, Ordering::Relaxed) {
            self.engine.begun.lock().unwrap().send(()).unwrap();
            self.engine.go.lock().unwrap().recv().unwrap_or(());
            self.was_gated = true;
        }
        next
    }

    fn complete(&mut self, number: usize, mut outcome: cascade_disk::io::TransferOutcome) {
        if self.was_gated && self.engine.fails.load(Ordering::Relaxed) {
            outcome.result = Err(std::io::ErrorKind::Other.into());
        }
        self.inner.complete(number, outcome);
    }
}

fn config(directory: &tempfile::TempDir) -> FilesConfig {
    FilesConfig {
        capacity_bytes: 2 << 20,
        segment_bytes: 128 << 10,
        ..FilesConfig::new(directory.path())
    }
}

fn system() -> FileIo {
    FileIo::system(IoEngine::Psync, false, 4, None, Arc::new(SystemClock)).unwrap()
}

/// A tier with the seal of its first segment held at its sync.
struct Sealing {
    directory: tempfile::TempDir,
    files: Arc<SegmentFiles>,
    pool: cascade_memory::Pool,
    stored: Vec<cascade_disk::conformance::StoredBlock>,
    engine: Arc<GatedEngine>,
    go: mpsc::Sender<()>,
}

fn sealing() -> Sealing {
    let directory = tempfile::tempdir().unwrap();
    let io = system();
    let (begun, has_begun) = mpsc::channel();
    let (go, may_go) = mpsc::channel();
    let engine = Arc::new(GatedEngine {
        inner: Arc::clone(&io.engine),
        is_gated: AtomicBool::new(true),
        fails: AtomicBool::new(false),
        begun: Mutex::new(begun),
        go: Mutex::new(may_go),
    });
    let io = FileIo { engine: Arc::<GatedEngine>::clone(&engine), ..io };
    let (files, _) = open_with(config(&directory), io, deadline()).unwrap();
    let pool = pool();
    let blocks: Vec<_> = (0..12).map(|number| (number, 12_288)).collect();
    // Returns although the segment before is not sealed yet.
    let stored = append(files.as_ref(), &pool, &blocks);
    has_begun.recv_timeout(LIMIT).unwrap();
    Sealing { directory, files, pool, stored, engine, go }
}

/// Each write waited until the segment before was sealed: 2 to 8 ms for each segment.
#[test]
fn writes_do_not_wait_for_the_seal_of_the_segment_before() {
    let Sealing { directory, files, pool, mut stored, go, .. } = sealing();
    let later: Vec<_> = (12..15).map(|number| (number, 12_288)).collect();
    stored.extend(append(files.as_ref(), &pool, &later));
    assert_hits(files.as_ref(), &pool, &stored);
    assert_eq!(files.disk_stats().files, 2);
    drop(go);
    files.sync(deadline()).unwrap();
    assert_eq!(files.disk_stats().segments_failed, 0);
    drop(files);
    let (_, recovery) = open_with(config(&directory), system(), deadline()).unwrap();
    assert_recovered(&recovery, &stored);
}

/// What a flush reports must be on the device, also that of a segment that another thread seals.
#[test]
fn a_sync_waits_for_the_seal() {
    let Sealing { directory, files, pool, stored, go, .. } = sealing();
    let (sender, synced) = mpsc::channel();
    let its = Arc::clone(&files);
    let thread = std::thread::spawn(move || sender.send(its.sync(deadline())).unwrap());
    // A sync that did not wait would be done by now, or soon: then the test cannot fail.
    std::thread::yield_now();
    assert!(synced.try_recv().is_err());
    go.send(()).unwrap();
    synced.recv_timeout(LIMIT).unwrap().unwrap();
    thread.join().unwrap();
    assert_hits(files.as_ref(), &pool, &stored);
    drop(files);
    let (_, recovery) = open_with(config(&directory), system(), deadline()).unwrap();
    assert_recovered(&recovery, &stored);
}

/// A sync that timed out while it waited for the seal forgot the seal: its error was lost with it,
/// and the next sync reported blocks as written that no sync had written.
#[test]
fn the_error_of_a_seal_outlives_a_sync_that_timed_out() {
    let Sealing { directory: _directory, files, pool, stored, engine, go } = sealing();
    engine.fails.store(true, Ordering::Relaxed);
    for _ in 0..2 {
        let late = files.sync(Deadline::after(&SystemClock, Duration::from_millis(1)));
        assert!(matches!(late, Err(DiskError::Timeout { .. })), "{late:?}");
    }
    go.send(()).unwrap();
    let failed = files.sync(deadline());
    assert!(matches!(failed, Err(DiskError::Io { operation: "sync", .. })), "{failed:?}");
    files.sync(deadline()).unwrap();
    assert_eq!(files.disk_stats().segments_failed, 1, "the time-outs closed no segment");
    assert_hits(files.as_ref(), &pool, &stored);
}

/// The directory's lock was free while a segment was sealed: another process could open it.
#[test]
fn a_tier_that_is_dropped_waits_for_the_seal() {
    let Sealing { directory, files, stored, go, .. } = sealing();
    let thread = std::thread::spawn(move || drop(files));
    let locked = open_with(config(&directory), system(), deadline());
    assert!(matches!(locked, Err(DiskError::Locked { .. })), "{locked:?}");
    go.send(()).unwrap();
    thread.join().unwrap();
    let (_, recovery) = open_with(config(&directory), system(), deadline()).unwrap();
    assert_recovered(&recovery, &stored);
    assert_eq!(recovery.scanned_files, 1, "the first segment was sealed");
}

/// A segment that is created ahead and not written yet is neither a victim of a reclaim nor damage
/// after a restart.
#[test]
fn a_segment_created_ahead_is_kept_for_the_next_blocks() {
    for reclaims in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let (files, _) = open_with(config(&directory), system(), deadline()).unwrap();
        let pool = pool();
        let blocks: Vec<_> = (0..9).map(|number| (number, 12_288)).collect();
        let mut stored = append(files.as_ref(), &pool, &blocks[..7]);
        assert_eq!(files.disk_stats().files, 1);
        stored.extend(append(files.as_ref(), &pool, &blocks[7..]));
        assert_eq!(files.disk_stats().files, 2, "the first segment is almost full");
        if reclaims {
            let reclaimed = files.reclaim(&mut |_, _| true, deadline()).unwrap();
            assert_eq!(reclaimed.moved.len(), blocks.len());
            for (_, from, to) in reclaimed.moved {
                stored.iter_mut().filter(|its| its.address == from).for_each(|it| it.address = to);
            }
            assert_eq!(files.disk_stats().files, 1, "its blocks are in the segment created ahead");
        }
        files.sync(deadline()).unwrap();
        assert_hits(files.as_ref(), &pool, &stored);
        drop(files);
        let (files, recovery) = open_with(config(&directory), system(), deadline()).unwrap();
        assert_recovered(&recovery, &stored);
        assert_eq!((recovery.torn_records, recovery.damaged_structures), (0, 0));
        stored.extend(append(files.as_ref(), &pool, &[(20, 12_288)]));
        assert_hits(files.as_ref(), &pool, &stored);
    }
}
