//! A full file system gives typed errors, and every acknowledged block is kept.

use std::sync::Arc;

use cascade_disk::conformance::{
    StoredBlock, assert_hits, assert_recovered, block, deadline, open, pool,
};
use cascade_disk::{DiskError, FilesConfig};
use cascade_runtime::SystemClock;

use crate::small_disk::SmallDisk;

#[test]
fn segments_keep_their_blocks_on_a_full_disk() {
    let Some(disk) = SmallDisk::mount(6) else { return };
    let pool = pool();
    let config = FilesConfig {
        capacity_bytes: 64 << 20,
        segment_bytes: 1 << 20,
        ..FilesConfig::new(disk.path())
    };
    let clock = || Arc::new(SystemClock);
    let (files, _) = open(config.clone(), clock(), &pool, deadline()).unwrap();
    let mut stored = Vec::new();
    let mut is_full = false;
    for number in 0..100 {
        let batch = vec![block(&pool, number, 100_000)];
        match files.append(batch, deadline()).remove(0) {
            Ok(address) => stored.push(StoredBlock { number, length: 100_000, address }),
            Err(DiskError::NoSpace { .. }) => is_full = true,
            Err(error) => panic!("{error:?}"),
        }
    }
    assert!(is_full && stored.len() > 30, "{} blocks were stored", stored.len());
    assert_hits(files.as_ref(), &pool, &stored);
    drop(files);
    let (files, recovery) = open(config, clock(), &pool, deadline()).unwrap();
    assert_recovered(&recovery, &stored);
    assert_hits(files.as_ref(), &pool, &stored);
}
