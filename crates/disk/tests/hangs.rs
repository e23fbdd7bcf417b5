//! Files that really hang: a caller is released by its deadline, and the buffers come back later.
//!
//! A named pipe stands in for a dead disk: its opening, and a read of it, block in the kernel.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cascade_block::{Deadline, SystemClock};
use cascade_disk::conformance::{StoredBlock, append, assert_hits, deadline, key, pool, read_as};
use cascade_disk::io::{
    Buffer, Engine, Transfer, TransferKind, TransferOutcome, TransferQueue, UringEngine,
};
use cascade_disk::{
    Address, DiskError, EngineKind, FileTierConfig, Layout, ReadOutcome, ReadRequest, open,
};
use rustix::fs::{CWD, FileType, Mode, mknodat};

fn soon() -> Deadline {
    Deadline::after(&SystemClock, Duration::from_millis(50))
}

fn pipe(path: &Path) {
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
}

/// Both ends at once, which blocks nobody and lets a blocked opening of either go on.
fn both_ends(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

#[test]
fn a_hung_call_releases_its_caller_and_leaves_the_tier_in_order() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool();
    let config = FileTierConfig {
        layout: Layout::FilePerBlock,
        engine: EngineKind::Psync,
        direct: false,
        ..FileTierConfig::new(directory.path())
    };
    let (files, _) = open(config, Arc::new(SystemClock), &pool, deadline()).unwrap();
    let stored = append(files.as_ref(), &pool, &[(1, 5000)]);
    let name = key(2).to_string();
    let hung = directory.path().join("blocks").join(&name[..2]);
    fs::create_dir_all(&hung).unwrap();
    let hung = hung.join(format!("{name}.block"));
    pipe(&hung);
    let address = Address::from_u64(7);
    let slab = pool.allocate(5000).unwrap();
    let request = ReadRequest { address, key: key(2), slab };
    let outcome = files.read(vec![request], soon()).remove(0);
    let is_late = matches!(outcome, ReadOutcome::Failed(DiskError::Timeout { .. }));
    assert!(is_late, "{outcome:?}");
    let removed = files.remove(&[(key(2), address)], soon());
    assert!(matches!(removed, Err(DiskError::Timeout { .. })), "{removed:?}");
    // The removal still hangs with the turn for names; reads do not need it.
    assert_hits(files.as_ref(), &pool, &stored);
    let ends = both_ends(&hung);
    fs::remove_file(&hung).unwrap();
    drop(ends);
    let late = StoredBlock { number: 2, length: 5000, address };
    let outcome = read_as(files.as_ref(), &pool, &[(key(2), late)]).remove(0);
    assert!(matches!(outcome, ReadOutcome::Gone), "{outcome:?}");
    files.remove(&[(key(1), stored[0].address)], deadline()).unwrap();
}

/// One transfer, and what became of it.
struct Single {
    waiting: Option<Transfer>,
    finished: Option<TransferOutcome>,
}

impl TransferQueue for Single {
    fn next_transfer(&mut self) -> Option<(usize, Transfer)> {
        self.waiting.take().map(|transfer| (0, transfer))
    }

    fn complete(&mut self, _number: usize, finished: TransferOutcome) {
        self.finished = Some(finished);
    }
}

#[test]
fn a_hung_ring_keeps_its_buffers_until_the_kernel_is_done() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pipe");
    pipe(&path);
    let pool = pool();
    let Ok(engine) = UringEngine::new(2, Some(&pool), Arc::new(SystemClock)) else {
        return; // A kernel without io_uring has no ring that could hang.
    };
    let ends = Arc::new(both_ends(&path));
    let slab = pool.allocate(4096).unwrap();
    let buffers = vec![Buffer::Open(slab, 0..4096)];
    let transfer = Transfer::new(TransferKind::Read, Arc::clone(&ends), 0, buffers);
    let mut queue = Single { waiting: Some(transfer), finished: None };
    engine.run(&mut queue, soon());
    let finished = queue.finished.expect("it was told of");
    assert_eq!(finished.result.unwrap_err().kind(), ErrorKind::TimedOut);
    assert!(finished.transfer.is_none(), "the kernel still has the buffer");
    assert!(pool.stats().requested_bytes > 0, "and so nobody else gets its memory");
    std::io::Write::write_all(&mut ends.as_ref(), &[1; 4096]).unwrap();
    let limit = deadline();
    while pool.stats().requested_bytes > 0 {
        assert!(!limit.has_passed(&SystemClock), "the buffer never came back");
        std::thread::yield_now();
    }
}
