//! Wiping a pool: free memory is zeroed at once, slabs in use when they are freed.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::os::unix::fs::FileExt;

use cascade_memory::{HugePages, Pool, PoolConfig};

const BYTES: usize = 8 << 20;

fn pool() -> Pool {
    let config =
        PoolConfig { capacity_bytes: BYTES, huge_pages: HugePages::Never, populate: false };
    Pool::new(&config).unwrap()
}

/// Bytes of the whole mapping that are not zero, read as another process would.
fn bytes_left(pool: &Pool) -> usize {
    let mut all = vec![0; pool.region().bytes()];
    pool.region().host().expect("host memory").file().read_exact_at(&mut all, 0).unwrap();
    all.iter().filter(|byte| **byte != 0).count()
}

fn fill(pool: &Pool) {
    let sizes = [100, 5000, 70_000, 300_000];
    let mut slabs = Vec::new();
    for size in sizes.into_iter().cycle() {
        let Some(mut slab) = pool.allocate(size) else { break };
        slab.padded_host_mut().unwrap().fill(0xa5);
        slabs.push(slab);
    }
    assert!(bytes_left(pool) > BYTES * 9 / 10, "the test has to fill the pool");
}

#[test]
fn all_free_memory_is_zeroed() {
    let pool = pool();
    fill(&pool);
    pool.begin_wipe();
    let wiped = pool.wipe(&mut || true);
    assert_eq!((wiped.zeroed_bytes, wiped.unwiped_bytes, wiped.held_bytes), (BYTES, 0, 0));
    assert_eq!(bytes_left(&pool), 0);
    assert_eq!(pool.stats().reserved_bytes, 0);
}

#[test]
fn a_held_slab_keeps_its_bytes_and_is_zeroed_when_it_is_freed() {
    let pool = pool();
    let mut slab = pool.allocate(70_000).unwrap();
    slab.padded_host_mut().unwrap().fill(0x5a);
    let held = slab.seal();
    pool.begin_wipe();
    let wiped = pool.wipe(&mut || true);
    assert_eq!(wiped.held_bytes, held.reserved_bytes());
    assert_eq!(wiped.zeroed_bytes + wiped.held_bytes, BYTES);
    assert!(
        held.host().expect("host memory").iter().all(|byte| *byte == 0x5a),
        "a held slab stays as it is"
    );
    drop(held);
    assert_eq!(bytes_left(&pool), 0);
}

#[test]
fn slabs_allocated_after_a_wipe_are_not_zeroed() {
    let pool = pool();
    pool.begin_wipe();
    let mut slab = pool.allocate(70_000).unwrap();
    slab.host_mut().unwrap().fill(0x5a);
    drop(slab);
    assert_eq!(bytes_left(&pool), 70_000);
}

#[test]
fn memory_not_zeroed_in_time_is_reported_and_can_be_allocated() {
    let pool = pool();
    fill(&pool);
    pool.begin_wipe();
    let wiped = pool.wipe(&mut || false);
    assert_eq!((wiped.zeroed_bytes, wiped.unwiped_bytes), (0, BYTES));
    assert!(pool.allocate(BYTES).is_some());
}
