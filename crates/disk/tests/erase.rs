//! Erasing a file tier: nothing of it is left in the files, and it can be used again.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cascade_block::{Manifest, Namespace, SystemClock, TenantSecret};
use cascade_disk::conformance::{self, append, content, deadline};
use cascade_disk::io::FileIo;
use cascade_disk::io::fault::{Fault, FaultPlan};
use cascade_disk::{EngineKind, FileTierConfig, Layout, open, open_with};

const LENGTH: usize = 40_000;

fn config(directory: &Path, layout: Layout) -> FileTierConfig {
    FileTierConfig {
        capacity_bytes: 24 << 20,
        segment_bytes: 1 << 20,
        layout,
        ..FileTierConfig::new(directory)
    }
}

fn files_below(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] }).collect()
}

/// Other names for the same files, by which their bytes can be read when they are gone.
fn link_all(from: &Path, to: &Path) -> Vec<PathBuf> {
    let linked = files_below(from).into_iter().enumerate().map(|(at, path)| {
        let link = to.join(at.to_string());
        fs::hard_link(path, &link).unwrap();
        link
    });
    linked.collect()
}

fn holds(path: &Path, bytes: &[u8]) -> bool {
    fs::read(path).unwrap().windows(bytes.len()).any(|window| window == bytes)
}

#[test]
fn nothing_is_left_and_the_tier_is_usable() {
    for layout in [Layout::Segments, Layout::FilePerBlock] {
        let (directory, links) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let pool = conformance::pool();
        let clock = Arc::new(SystemClock);
        let config = config(directory.path(), layout);
        let (files, _) = open(config.clone(), clock.clone(), &pool, deadline()).unwrap();
        let blocks: Vec<_> = (0..60).map(|number| (number, LENGTH)).collect();
        let stored = append(&*files, &pool, &blocks);
        let namespace = Namespace::new(Manifest::new().with("a", "b"), &TenantSecret::new("s"));
        files.register_manifest(&namespace, deadline()).unwrap();
        files.checkpoint(deadline()).unwrap();
        let linked = link_all(directory.path(), links.path());
        let mark = &content(7, LENGTH)[100..132];
        assert!(linked.iter().any(|path| holds(path, mark)), "{layout:?}: the test finds blocks");

        let erased = files.erase(deadline()).unwrap();

        assert_eq!(erased.left, []);
        assert!(erased.overwritten_bytes >= 60 * LENGTH as u64, "{erased:?}");
        let left = files_below(directory.path());
        assert_eq!(left.len(), 1, "{layout:?}: only the lock's file: {left:?}");
        for path in &linked {
            let is_lock = fs::read(path).unwrap().len() < 16;
            let is_zero = fs::read(path).unwrap().iter().all(|byte| *byte == 0);
            assert!(is_lock || is_zero, "{layout:?}: {} was not overwritten", path.display());
        }
        conformance::assert_gone(&*files, &pool, &stored);
        let again = append(&*files, &pool, &blocks);
        conformance::assert_hits(&*files, &pool, &again);
        files.checkpoint(deadline()).unwrap();
        drop(files);
        let (_, recovery) = open(config, clock, &pool, deadline()).unwrap();
        assert_eq!(recovery.live.len(), 60, "{layout:?}");
    }
}

/// Whichever call fails: the erase fails, or names what resisted, or everything is gone.
#[test]
fn whatever_resists_is_told() {
    let mut told = 0;
    for step in 0..8 {
        let directory = tempfile::tempdir().unwrap();
        let pool = conformance::pool();
        let clock = Arc::new(SystemClock);
        let config = config(directory.path(), Layout::Segments);
        let io = FileIo::system(EngineKind::Psync, false, 8, Some(&pool), clock.clone()).unwrap();
        let counting = FaultPlan::new(Fault::Io, u64::MAX, false);
        let prepare = |plan: &Arc<FaultPlan>| {
            let (files, _) = open_with(config.clone(), plan.wrap(&io), &pool, deadline()).unwrap();
            append(&*files, &pool, &[(1, LENGTH)]);
            files
        };
        let files = prepare(&counting);
        let calls = counting.calls();
        files.erase(deadline()).unwrap();
        drop(files);
        let plan = FaultPlan::new(Fault::Io, calls + step, false);
        let erased = prepare(&plan).erase(deadline());
        let is_gone = !files_below(directory.path())
            .iter()
            .any(|path| path.extension().is_some_and(|extension| extension == "segment"));
        match erased {
            Ok(erased) if erased.left.is_empty() => assert!(is_gone, "step {step}"),
            Ok(erased) => {
                told += 1;
                let reason = &erased.left[0].reason;
                assert!(is_gone || !reason.starts_with("removed"), "step {step}: {erased:?}");
            }
            Err(_) => told += 1,
        }
    }
    assert!(told >= 3, "listing, overwriting and removing can fail: {told}");
}

/// A file was removed while it might still be overwritten, and one that was left behind took no
/// part of the capacity any more.
#[test]
fn what_hangs_is_left_alone_told_and_counted() {
    let mut left = 0;
    for step in 0..8 {
        let directory = tempfile::tempdir().unwrap();
        let pool = conformance::pool();
        let config = config(directory.path(), Layout::Segments);
        let clock = Arc::new(SystemClock);
        let io = FileIo::system(EngineKind::Psync, false, 8, Some(&pool), clock).unwrap();
        let prepare = |plan: &Arc<FaultPlan>| {
            let (files, _) = open_with(config.clone(), plan.wrap(&io), &pool, deadline()).unwrap();
            let stored = append(&*files, &pool, &[(1, LENGTH)]);
            let namespace = Namespace::new(Manifest::new().with("a", "b"), &TenantSecret::new("s"));
            files.register_manifest(&namespace, deadline()).unwrap();
            (files, stored)
        };
        let counting = FaultPlan::new(Fault::Io, u64::MAX, false);
        let (files, _) = prepare(&counting);
        let calls = counting.calls();
        files.erase(deadline()).unwrap();
        drop(files);
        let plan = FaultPlan::new(Fault::Hang, calls + step, false);
        let (files, stored) = prepare(&plan);
        let erased = files.erase(deadline());
        if plan.calls() <= calls + step {
            break;
        }
        let Ok(erased) = erased else { continue };
        for file in &erased.left {
            assert!(!file.reason.starts_with("removed,"), "step {step}: {erased:?}");
        }
        let segments = files_below(directory.path());
        let is_segment = |path: &&PathBuf| path.extension().is_some_and(|it| it == "segment");
        let bytes: u64 =
            segments.iter().filter(is_segment).map(|path| fs::metadata(path).unwrap().len()).sum();
        assert_eq!(files.stats().used_bytes, bytes, "step {step}: {erased:?}");
        left += u32::from(bytes > 0);
        let has_manifest =
            segments.iter().any(|path| path.extension().is_some_and(|it| it == "json"));
        assert!(has_manifest || bytes == 0, "step {step}: what marks its blocks stays with them");
        conformance::assert_gone(&*files, &pool, &stored);
        assert_eq!(files.erase(deadline()).unwrap().left, [], "step {step}: once more");
        assert_eq!(files.stats().used_bytes, 0);
    }
    assert!(left >= 1, "overwriting or removing a segment can hang");
}
