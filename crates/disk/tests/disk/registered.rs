//! A pool registered with the kernel: reads and writes give the same bytes as without.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use cascade_disk::conformance::{append, assert_hits, deadline, key, open_with, read_as};
use cascade_disk::io::{FileIo, UringEngine};
use cascade_disk::{FilesConfig, IoEngine, LoadOutcome};
use cascade_memory::{HugePages, Pool, PoolConfig};
use cascade_runtime::SystemClock;
use cascade_tier::tier::Tier as _;

/// Blocks of whole pages are contiguous in the pool; the others use an extra buffer.
const BLOCKS: [(u64, usize); 4] = [(0, 64 << 10), (1, 4096), (2, 5000), (3, 128 << 10)];

/// A pool. A region shorter than one huge page is registered with ordinary pages too.
fn small_pool(huge_pages: HugePages, capacity_bytes: usize) -> Pool {
    Pool::new(&PoolConfig { capacity_bytes, huge_pages, populate: true }).unwrap()
}

#[test]
fn blocks_are_read_back_through_registered_memory() {
    if UringEngine::new(1, None, Arc::new(SystemClock)).is_err() {
        return; // A kernel without io_uring registers no memory.
    }
    for (huge_pages, bytes) in [(HugePages::Never, 1 << 20), (HugePages::Auto, 8 << 20)] {
        let directory = tempfile::tempdir().unwrap();
        let config = FilesConfig { capacity_bytes: 4 << 20, ..FilesConfig::new(directory.path()) };
        let pool = small_pool(huge_pages, bytes);
        let open = |registered: Option<&Pool>| {
            let clock = Arc::new(SystemClock);
            let io = FileIo::system(IoEngine::Uring, true, 4, registered, clock).unwrap();
            open_with(config.clone(), io, deadline()).unwrap().0
        };
        let plain = open(None);
        assert!(!plain.disk_stats().is_registered);
        let stored = append(plain.as_ref(), &pool, &BLOCKS);
        drop(plain);
        let files = open(Some(&pool));
        assert_hits(files.as_ref(), &pool, &stored);
        // Slabs of another pool are transferred without registration.
        assert_hits(files.as_ref(), &small_pool(HugePages::Never, 1 << 20), &stored);
        let file = directory.path().join("w0-00000000.segment");
        std::fs::OpenOptions::new().write(true).open(file).unwrap().set_len(8192).unwrap();
        let outcome = read_as(files.as_ref(), &pool, &[(key(3), stored[3])]).remove(0);
        assert!(matches!(outcome, LoadOutcome::Damaged), "{outcome:?}");
    }
}

/// A registration keeps the pages that the pool had. After the pool gave them back and got others,
/// a read through it would leave the slab as it was.
#[test]
fn a_pool_that_has_got_memory_back_is_not_read_through_an_old_registration() {
    if UringEngine::new(1, None, Arc::new(SystemClock)).is_err() {
        return; // A kernel without io_uring registers no memory.
    }
    let directory = tempfile::tempdir().unwrap();
    let config = FilesConfig { capacity_bytes: 4 << 20, ..FilesConfig::new(directory.path()) };
    let pool = small_pool(HugePages::Never, 1 << 20);
    let io = FileIo::system(IoEngine::Uring, true, 4, Some(&pool), Arc::new(SystemClock)).unwrap();
    let files = open_with(config, io, deadline()).unwrap().0;
    let stored = append(files.as_ref(), &pool, &BLOCKS);
    assert_hits(files.as_ref(), &pool, &stored);
    files.release_pool();
    assert!(!files.disk_stats().is_registered);
    pool.withhold(1 << 20).release().unwrap();
    assert_eq!(pool.capacity_bytes(), 0);
    pool.restore(1 << 20).unwrap();
    assert_hits(files.as_ref(), &pool, &stored);
    let more = append(files.as_ref(), &pool, &[(7, 64 << 10), (8, 5000)]);
    assert_hits(files.as_ref(), &pool, &more);
}
