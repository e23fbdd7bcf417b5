//! The device probe succeeds on a working device and fails for each kind of fault.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cascade_disk::conformance::{append, assert_hits, deadline, open_with, pool};
use cascade_disk::io::FileIo;
use cascade_disk::io::fault::{Fault, FaultPlan};
use cascade_disk::{DiskError, FilesConfig, IoEngine, SegmentFiles};
use cascade_runtime::{Deadline, SystemClock};

fn config(directory: &Path) -> FilesConfig {
    FilesConfig { direct: false, ..FilesConfig::new(directory) }
}

fn file_io() -> FileIo {
    FileIo::system(IoEngine::Psync, false, 4, None, Arc::new(SystemClock)).unwrap()
}

fn opened(directory: &Path, io: FileIo) -> Arc<SegmentFiles> {
    open_with(config(directory), io, deadline()).unwrap().0
}

#[test]
fn a_probe_changes_no_block_and_works_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool();
    let files = opened(directory.path(), file_io());
    let stored = append(files.as_ref(), &pool, &[(1, 5000), (2, 9000)]);
    for _ in 0..3 {
        files.probe_device(deadline()).unwrap();
    }
    assert_hits(files.as_ref(), &pool, &stored);
    files.checkpoint(deadline()).unwrap();
    drop(files);
    let files = opened(directory.path(), file_io());
    files.probe_device(deadline()).unwrap();
    assert_hits(files.as_ref(), &pool, &stored);
    assert_eq!(files.disk_stats().stuck_calls, 0);
}

/// The number of I/O calls after an opening, and after a probe that follows.
fn calls() -> (u64, u64) {
    let directory = tempfile::tempdir().unwrap();
    let plan = FaultPlan::new(Fault::Io, u64::MAX, false);
    let files = opened(directory.path(), plan.wrap(&file_io()));
    let opening = plan.calls();
    files.probe_device(deadline()).unwrap();
    (opening, plan.calls())
}

#[test]
fn a_probe_returns_the_error_of_each_step() {
    let (opening, probed) = calls();
    assert!(probed > opening + 3, "a probe opens, writes, syncs and reads");
    for fault in [Fault::Io, Fault::NoSpace, Fault::Torn, Fault::Hang] {
        for at in opening..probed {
            let directory = tempfile::tempdir().unwrap();
            let plan = FaultPlan::new(fault, at, true);
            let files = opened(directory.path(), plan.wrap(&file_io()));
            let soon = Deadline::after(&SystemClock, Duration::from_secs(30));
            let result = files.probe_device(soon);
            let is_right = match fault {
                Fault::NoSpace => matches!(result, Err(DiskError::NoSpace { .. })),
                Fault::Hang => matches!(result, Err(DiskError::Timeout { .. })),
                _ => matches!(result, Err(DiskError::Io { .. })),
            };
            assert!(is_right, "{fault:?} at call {at}: {result:?}");
        }
    }
}

#[test]
fn a_probe_fails_if_the_directory_was_replaced() {
    let parent = tempfile::tempdir().unwrap();
    let (here, away) = (parent.path().join("here"), parent.path().join("away"));
    let files = opened(&here, file_io());
    std::fs::rename(&here, &away).unwrap();
    let error = files.probe_device(deadline()).unwrap_err();
    assert!(matches!(error, DiskError::Io { .. }), "{error:?}");
    let other = opened(&here, file_io());
    let DiskError::Io { source, .. } = files.probe_device(deadline()).unwrap_err() else {
        panic!("the probe must detect another directory")
    };
    assert!(source.to_string().contains("mounted"), "{source}");
    other.probe_device(deadline()).unwrap();
}

/// The lock and the identity of the directory bypassed `FileOperations`, so no test could make them
/// fail.
#[test]
fn an_opening_returns_the_error_of_each_step_of_the_lock() {
    // Directory looked for, created, its identity, its permissions, lock taken.
    for at in 0..5 {
        let directory = tempfile::tempdir().unwrap();
        let plan = FaultPlan::new(Fault::Io, at, false);
        let config = config(directory.path());
        let failed = open_with(config.clone(), plan.wrap(&file_io()), deadline()).map(drop);
        assert!(matches!(failed, Err(DiskError::Io { .. })), "call {at}: {failed:?}");
        drop(open_with(config, file_io(), deadline()).unwrap());
    }
}
