//! Erasing a file tier leaves none of its data in the files, and the tier is usable afterwards.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cascade_block::{Manifest, Namespace, TenantSecret};
use cascade_disk::conformance::{self, append, content, deadline, open, open_with};
use cascade_disk::io::FileIo;
use cascade_disk::io::fault::{Fault, FaultPlan};
use cascade_disk::{FilesConfig, IoEngine, WriterName};
use cascade_runtime::SystemClock;
use cascade_tier::tier::Tier as _;

const LENGTH: usize = 40_000;

fn config(directory: &Path) -> FilesConfig {
    FilesConfig { capacity_bytes: 24 << 20, segment_bytes: 1 << 20, ..FilesConfig::new(directory) }
}

fn files_below(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] }).collect()
}

/// Opens all files, so that their bytes can be read after a removal.
fn open_all(directory: &Path) -> Vec<File> {
    files_below(directory).into_iter().map(|path| File::open(path).unwrap()).collect()
}

fn bytes_of(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

fn holds(file: &File, bytes: &[u8]) -> bool {
    bytes_of(file).windows(bytes.len()).any(|window| window == bytes)
}

#[test]
fn an_erase_overwrites_all_files_and_the_tier_is_usable() {
    let directory = tempfile::tempdir().unwrap();
    let pool = conformance::pool();
    let clock = Arc::new(SystemClock);
    let config = config(directory.path());
    let (files, _) = open(config.clone(), clock.clone(), &pool, deadline()).unwrap();
    let blocks: Vec<_> = (0..60).map(|number| (number, LENGTH)).collect();
    let stored = append(&files, &pool, &blocks);
    let namespace = Namespace::new(Manifest::new().with("a", "b"), &TenantSecret::new("s"));
    files.register(&namespace, deadline()).unwrap();
    files.checkpoint(deadline()).unwrap();
    let opened = open_all(directory.path());
    let mark = &content(7, LENGTH)[100..132];
    assert!(opened.iter().any(|file| holds(file, mark)), "the blocks can be found in the files");

    let erased = files.erase(deadline()).unwrap();

    assert_eq!(erased.left, []);
    assert!(erased.overwritten_bytes >= 60 * LENGTH as u64, "{erased:?}");
    let left = files_below(directory.path());
    assert_eq!(left.len(), 1, "only the lock file remains: {left:?}");
    for file in &opened {
        let bytes = bytes_of(file);
        let is_zero = bytes.iter().all(|byte| *byte == 0);
        assert!(bytes.len() < 16 || is_zero, "{file:?} was not overwritten, and is not the lock");
    }
    conformance::assert_gone(&files, &pool, &stored);
    let again = append(&files, &pool, &blocks);
    conformance::assert_hits(&files, &pool, &again);
    files.checkpoint(deadline()).unwrap();
    drop(files);
    let (_, recovery) = open(config, clock, &pool, deadline()).unwrap();
    assert_eq!(recovery.live.len(), 60);
}

/// Whichever call fails: the erase returns an error, or lists the remaining file, or everything is
/// erased.
#[test]
fn an_erase_reports_files_that_it_could_not_erase() {
    let mut reported = 0;
    for step in 0..8 {
        let directory = tempfile::tempdir().unwrap();
        let pool = conformance::pool();
        let clock = Arc::new(SystemClock);
        let config = config(directory.path());
        let io = FileIo::system(IoEngine::Psync, false, 8, Some(&pool), clock.clone()).unwrap();
        let counting = FaultPlan::new(Fault::Io, u64::MAX, false);
        let open_and_fill = |plan: &Arc<FaultPlan>| {
            let (files, _) = open_with(config.clone(), plan.wrap(&io), deadline()).unwrap();
            append(&files, &pool, &[(1, LENGTH)]);
            files
        };
        let files = open_and_fill(&counting);
        let calls = counting.calls();
        files.erase(deadline()).unwrap();
        drop(files);
        let plan = FaultPlan::new(Fault::Io, calls + step, false);
        let erased = open_and_fill(&plan).erase(deadline());
        let is_gone = !files_below(directory.path())
            .iter()
            .any(|path| path.extension().is_some_and(|extension| extension == "segment"));
        match erased {
            Ok(erased) if erased.left.is_empty() => assert!(is_gone, "step {step}"),
            Ok(erased) => {
                reported += 1;
                let reason = &erased.left[0].why;
                assert!(is_gone || !reason.starts_with("removed"), "step {step}: {erased:?}");
            }
            Err(_) => reported += 1,
        }
    }
    assert!(reported >= 3, "listing, overwriting and removing can fail: {reported}");
}

/// A file was removed while its overwrite was in progress, and a remaining file no longer counted
/// towards the capacity.
#[test]
fn a_file_whose_erase_hangs_is_kept_reported_and_counted() {
    let mut left = 0;
    for step in 0..8 {
        let [first, directory] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let pool = conformance::pool();
        let clock = Arc::new(SystemClock);
        let io = FileIo::system(IoEngine::Psync, false, 8, Some(&pool), clock).unwrap();
        let open_and_fill = |directory: &Path, plan: &Arc<FaultPlan>| {
            let io = plan.wrap(&io);
            let (files, _) = open_with(config(directory), io, deadline()).unwrap();
            let stored = append(&files, &pool, &[(1, LENGTH)]);
            let namespace = Namespace::new(Manifest::new().with("a", "b"), &TenantSecret::new("s"));
            files.register(&namespace, deadline()).unwrap();
            (files, stored)
        };
        let counting = FaultPlan::new(Fault::Io, u64::MAX, false);
        let (files, _) = open_and_fill(first.path(), &counting);
        let calls = counting.calls();
        files.erase(deadline()).unwrap();
        drop(files);
        let plan = FaultPlan::new(Fault::Hang, calls + step, false);
        let (files, stored) = open_and_fill(directory.path(), &plan);
        let erased = files.erase(deadline());
        if plan.calls() <= calls + step {
            break;
        }
        let Ok(erased) = erased else { continue };
        for file in &erased.left {
            assert!(!file.why.starts_with("removed,"), "step {step}: {erased:?}");
        }
        let segments = files_below(directory.path());
        let is_segment = |path: &&PathBuf| path.extension().is_some_and(|it| it == "segment");
        let bytes: u64 =
            segments.iter().filter(is_segment).map(|path| fs::metadata(path).unwrap().len()).sum();
        assert_eq!(files.disk_stats().used_bytes, bytes, "step {step}: {erased:?}");
        left += u32::from(bytes > 0);
        let has_manifest =
            segments.iter().any(|path| path.extension().is_some_and(|it| it == "json"));
        assert!(has_manifest || bytes == 0, "step {step}: the manifest is kept with its blocks");
        conformance::assert_gone(&files, &pool, &stored);
        assert_eq!(files.erase(deadline()).unwrap().left, [], "step {step}: a second erase");
        assert_eq!(files.disk_stats().used_bytes, 0);
    }
    assert!(left >= 1, "overwriting or removing a segment can hang");
}

/// The manifests that mark a tier as encrypted were removed while another writer had blocks, which
/// were taken for unencrypted ones at its next opening.
#[test]
fn an_erase_keeps_the_manifests_of_another_writer_with_segments() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, clock) = (conformance::pool(), Arc::new(SystemClock));
    let of = |name: &str| FilesConfig {
        writer: WriterName::new(name).unwrap(),
        ..config(directory.path())
    };
    let (other, _) = open(of("other"), clock.clone(), &pool, deadline()).unwrap();
    append(&other, &pool, &[(1, LENGTH)]);
    let (files, _) = open(of("own"), clock, &pool, deadline()).unwrap();
    let namespace = Namespace::new(Manifest::new().with("a", "b"), &TenantSecret::new("s"));
    files.register(&namespace, deadline()).unwrap();
    let erased = files.erase(deadline()).unwrap();
    assert_eq!(files.manifests(deadline()).unwrap().len(), 1, "{erased:?}");
    assert_eq!(other.erase(deadline()).unwrap().left, []);
    assert_eq!(other.manifests(deadline()).unwrap(), []);
}

/// A crash between two removals left an older segment without the newer ones, and the next opening
/// returned blocks that had been replaced long before.
#[test]
fn an_interrupted_erase_brings_no_earlier_block_back() {
    const BLOCKS: u64 = 40;
    const EARLIER: usize = LENGTH;
    const LATER: usize = LENGTH + 1;
    let (mut crashes, mut empty) = (0, 0);
    for is_permanent in [true, false] {
        for step in 0.. {
            let directory = tempfile::tempdir_in("/dev/shm").unwrap();
            let pool = conformance::pool();
            let clock = Arc::new(SystemClock);
            let config = config(directory.path());
            let io = FileIo::system(IoEngine::Psync, false, 8, Some(&pool), clock).unwrap();
            let fill = |plan: &Arc<FaultPlan>| {
                let (files, _) = open_with(config.clone(), plan.wrap(&io), deadline()).unwrap();
                for length in [EARLIER, LATER] {
                    let blocks: Vec<_> = (0..BLOCKS).map(|number| (number, length)).collect();
                    append(&files, &pool, &blocks);
                    files.checkpoint(deadline()).unwrap();
                }
                files
            };
            let counting = FaultPlan::new(Fault::Io, u64::MAX, false);
            let before = {
                let files = fill(&counting);
                let before = counting.calls();
                files.erase(deadline()).unwrap();
                before
            };
            if before + step >= counting.calls() {
                break;
            }
            let plan = FaultPlan::new(Fault::Torn, before + step, is_permanent);
            let files = fill(&plan);
            let _interrupted = files.erase(deadline());
            drop(files);
            let (_, recovery) = open_with(config.clone(), io, deadline()).unwrap();
            for (meta, _) in &recovery.live {
                let length = usize::try_from(meta.bytes).unwrap();
                assert_eq!(length, LATER, "step {step}: an earlier block is live again");
            }
            crashes += 1;
            empty += u32::from(recovery.live.is_empty());
        }
    }
    assert!(crashes > 10 && empty > 0 && empty < crashes, "{empty} of {crashes} left nothing");
}
