//! Calls that hang in the kernel: the caller returns at its deadline, and the buffers are released
//! later.
//!
//! A named pipe replaces a hung disk: reading it blocks in the kernel.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cascade_disk::conformance::{append, assert_hits, block, deadline, open, pool};
use cascade_disk::io::{
    Buffer, FileHandle, Transfer, TransferEngine, TransferKind, TransferOutcome, TransferQueue,
    UringEngine,
};
use cascade_disk::{DiskError, FilesConfig, IoEngine};
use cascade_runtime::{Deadline, SystemClock};
use rustix::fs::{CWD, FileType, Mode, mknodat};

fn short_deadline() -> Deadline {
    Deadline::after(&SystemClock, Duration::from_millis(50))
}

fn pipe(path: &Path) {
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
}

/// Opens both ends at once, which does not block.
fn both_ends(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// A write whose deadline passed between two segments was begun again and again for ever.
#[test]
fn a_write_after_its_deadline_fails_and_the_tier_works_on() {
    for engine in [IoEngine::Psync, IoEngine::Auto] {
        let directory = tempfile::tempdir().unwrap();
        let pool = pool();
        let config = FilesConfig { engine, direct: false, ..FilesConfig::new(directory.path()) };
        let (files, _) = open(config, Arc::new(SystemClock), &pool, deadline()).unwrap();
        // There is an active segment, so that no segment has to be created.
        let mut stored = append(files.as_ref(), &pool, &[(1, 5000)]);
        let (done, is_done) = std::sync::mpsc::channel();
        let (late, batch) = (Arc::clone(&files), vec![block(&pool, 2, 5000)]);
        std::thread::spawn(move || {
            done.send(late.append(batch, Deadline::at(Duration::ZERO))).unwrap();
        });
        let results = is_done.recv_timeout(Duration::from_secs(60)).expect("the write ends");
        let is_late = matches!(results[..], [Err(DiskError::Timeout { .. })]);
        assert!(is_late, "{results:?}");
        stored.extend(append(files.as_ref(), &pool, &[(2, 5000)]));
        assert_hits(files.as_ref(), &pool, &stored);
    }
}

/// A queue of one transfer.
struct SingleTransfer {
    waiting: Option<Transfer>,
    outcome: Option<TransferOutcome>,
}

impl TransferQueue for SingleTransfer {
    fn next_transfer(&mut self) -> Option<(usize, Transfer)> {
        self.waiting.take().map(|transfer| (0, transfer))
    }

    fn complete(&mut self, _number: usize, outcome: TransferOutcome) {
        self.outcome = Some(outcome);
    }
}

#[test]
fn a_hung_ring_keeps_its_buffers_until_the_kernel_is_done() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pipe");
    pipe(&path);
    let pool = pool();
    let Ok(engine) = UringEngine::new(2, Some(&pool), Arc::new(SystemClock)) else {
        return; // A kernel without io_uring has no ring.
    };
    let mut ends = both_ends(&path);
    let file = Arc::new(FileHandle::from(ends.try_clone().unwrap()));
    let slab = pool.allocate(4096).unwrap().into_host().unwrap();
    let buffers = vec![Buffer::Open(slab, 0..4096)];
    let transfer = Transfer::new(TransferKind::Read, file, 0, buffers);
    let mut queue = SingleTransfer { waiting: Some(transfer), outcome: None };
    engine.run(&mut queue, short_deadline());
    let outcome = queue.outcome.expect("the engine completed it");
    assert_eq!(outcome.result.unwrap_err().kind(), ErrorKind::TimedOut);
    assert!(outcome.transfer.is_none(), "the kernel still uses the buffer");
    assert!(pool.stats().requested_bytes > 0, "its memory is still allocated");
    std::io::Write::write_all(&mut ends, &[1; 4096]).unwrap();
    let limit = deadline();
    while pool.stats().requested_bytes > 0 {
        assert!(!limit.has_passed(&SystemClock), "the buffer was never released");
        std::thread::yield_now();
    }
}
