//! The file tier on the threads and the clock of a simulated world, with files of this machine: it
//! waits by nothing but `cascade_runtime`, and a seed gives the same run each time.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use cascade_block::checksum;
use cascade_disk::conformance::{
    StoredBlock, append, assert_gone, assert_hits, deadline, key, meta, open, pool,
};
use cascade_disk::{BlockFacts, FilesConfig, IoEngine, SegmentFiles};
use cascade_memory::Pool;
use cascade_runtime::simulated::{Ending, Report, Settings, World};
use cascade_runtime::{SystemClock, thread};
use cascade_tier::tier::Tier as _;

fn config(directory: &Path) -> FilesConfig {
    FilesConfig {
        capacity_bytes: 2 << 20,
        segment_bytes: 128 << 10,
        engine: IoEngine::Psync,
        direct: false,
        ..FilesConfig::new(directory)
    }
}

/// What one of several writers does: appends, aliases, reads, removals. Returns what it leaves.
fn write(files: &SegmentFiles, pool: &Pool, writer: u64) -> Vec<StoredBlock> {
    let first = writer * 100;
    let blocks: Vec<_> =
        (first..first + 12).map(|number| (number, 500 + 700 * (number % 12) as usize)).collect();
    let mut stored = append(files, pool, &blocks);
    for block in &stored[..6] {
        let alias = (meta(1000 + block.number, block.length), block.address);
        files.alias_blocks(&[alias], deadline()).remove(0).unwrap();
    }
    assert_hits(files, pool, &stored);
    let removed = stored.split_off(9);
    let keys: Vec<_> = removed.iter().map(|block| (key(block.number), block.address)).collect();
    files.remove(&keys, deadline()).unwrap();
    assert_gone(files, pool, &removed);
    if writer == 0 {
        files.probe_device(deadline()).unwrap();
    }
    files.sync(deadline()).unwrap();
    stored
}

fn body(directory: &Path) {
    let pool = pool();
    let open = || open(config(directory), Arc::new(SystemClock), &pool, deadline());
    let (files, _) = open().unwrap();
    let writers: Vec<_> = (0..3)
        .map(|writer| {
            let (files, pool) = (Arc::clone(&files), pool.clone());
            thread::spawn(move || write(files.as_ref(), &pool, writer))
        })
        .collect();
    let mut stored: Vec<_> =
        writers.into_iter().flat_map(|writer| writer.join().unwrap()).collect();
    let keeps = |meta: &BlockFacts, _| !meta.key.as_bytes()[8].is_multiple_of(5);
    let reclaimed = files.reclaim(&mut { keeps }, deadline()).unwrap();
    for (moved, from, to) in &reclaimed.moved {
        let is_moved = |it: &&mut StoredBlock| key(it.number) == *moved && it.address == *from;
        if let Some(block) = stored.iter_mut().find(is_moved) {
            block.address = *to;
        }
    }
    stored.retain(|it| !reclaimed.dropped.contains(&(key(it.number), it.address)));
    files.checkpoint(deadline()).unwrap();
    let written = std::fs::read(directory.join("w0.checkpoint")).unwrap();
    World::current().unwrap().note(u64::from(checksum(&written)));
    drop(files);
    let (files, recovery) = open().unwrap();
    assert!(stored.len() > 10, "the reclaim keeps most blocks");
    let aliases = recovery.live.iter().filter(|(found, _)| found.written_unix_ms >= 1000).count();
    assert!(aliases > 10, "{aliases}");
    assert_hits(files.as_ref(), &pool, &stored);
}

fn run(seed: u64) -> Report {
    let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let path: PathBuf = directory.path().to_owned();
    World::run(Settings::from_seed(seed), move || body(&path))
}

/// The checkpoint had its aliases in the order of a hash table.
#[test]
fn a_run_in_a_world_is_repeatable() {
    for seed in 0..8 {
        let report = run(seed);
        assert_eq!(report.ending, Ending::Finished, "seed {seed}");
        assert_eq!(report.waits_under_lock, [""; 0], "seed {seed}");
        assert_eq!(report, run(seed), "seed {seed}");
    }
}
