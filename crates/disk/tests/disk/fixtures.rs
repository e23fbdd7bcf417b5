//! Directories of every released format version are readable.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cascade_block::{Manifest, Namespace, TenantSecret};
use cascade_disk::conformance::{
    StoredBlock, append, content, deadline, key, meta, open, pool, read_as,
};
use cascade_disk::{FilesConfig, LoadOutcome, inspect};
use cascade_runtime::SystemClock;
use cascade_tier::tier::Tier as _;

/// Blocks in the fixture: key number, content number, length. Block 1 was removed, 7 is an alias of
/// 2.
const STORED_BLOCKS: [(u64, u64, usize); 3] = [(0, 0, 100), (2, 2, 5000), (7, 2, 5000)];

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/v1/segments")
}

fn config(directory: &Path) -> FilesConfig {
    FilesConfig { capacity_bytes: 1 << 20, segment_bytes: 64 << 10, ..FilesConfig::new(directory) }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &target);
        } else {
            fs::copy(&path, &target).unwrap();
        }
    }
}

/// Writes the fixtures. Run by hand once for each new format version.
#[test]
#[ignore = "writes the files that the other tests read"]
fn write() {
    let directory = fixture();
    fs::create_dir_all(&directory).unwrap();
    let pool = pool();
    for round in 0..2 {
        let (files, _) =
            open(config(&directory), Arc::new(SystemClock), &pool, deadline()).unwrap();
        if round == 0 {
            let stored = append(files.as_ref(), &pool, &[(0, 100), (1, 4096), (2, 5000)]);
            files.remove(&[(key(1), stored[1].address)], deadline()).unwrap();
            let alias = (meta(7, 5000), stored[2].address);
            files.alias_blocks(&[alias], deadline()).remove(0).unwrap();
            let manifest = Manifest::new().with("dtype", "bf16");
            let namespace = Namespace::new(manifest, &TenantSecret::new([]));
            files.register(&namespace, deadline()).unwrap();
        }
        files.checkpoint(deadline()).unwrap();
    }
    fs::remove_file(directory.join("w0.lock")).unwrap();
}

fn reads_back(with_checkpoint: bool) {
    let directory = tempfile::tempdir().unwrap();
    copy(&fixture(), directory.path());
    if !with_checkpoint {
        fs::remove_file(directory.path().join("w0.checkpoint")).unwrap();
    }
    let report = inspect(directory.path(), true, &mut |_| {}).unwrap();
    assert!(report.is_clean(), "{report:?}");
    let pool = pool();
    let (files, recovery) =
        open(config(directory.path()), Arc::new(SystemClock), &pool, deadline()).unwrap();
    assert_eq!(recovery.live.len(), STORED_BLOCKS.len(), "{recovery:?}");
    for (name, body, length) in STORED_BLOCKS {
        let found = recovery.live.iter().find(|(meta, _)| meta.key == key(name)).unwrap();
        assert_eq!(found.0, meta(name, length));
        let stored = StoredBlock { number: body, length, address: found.1 };
        let outcome = read_as(files.as_ref(), &pool, &[(key(name), stored)]).remove(0);
        let LoadOutcome::Hit(slab) = outcome else { panic!("block {name}: {outcome:?}") };
        assert!(slab.host() == Some(&content(body, length)));
    }
    assert_eq!(files.manifests(deadline()).unwrap().len(), 1);
}

#[test]
fn version_1_segments_are_read() {
    reads_back(true);
    reads_back(false);
}
