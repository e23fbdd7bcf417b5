//! The hot paths of a node and its client allocate no memory for each block.
//!
//! Node and client are in this process, so every allocation of both is counted.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]
#![expect(unsafe_code, reason = "counts allocations, for which it has to be the allocator")]

#[expect(dead_code, unused_imports, reason = "these tests use a part of it")]
#[path = "client/test_node.rs"]
mod test_node;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use cascade_block::BlockKey;
use cascade_tier::{BlockStore, PrepareOutcome, Put, PutOutcome, PutSlab, Request, ViewOutcome};

use test_node::{NOW, TestNode, keys, wait_until};

/// The system's allocator with a count of its calls.
struct CountingAllocator;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

// SAFETY: passes each call to the system's allocator with the same arguments.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps to the contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(memory, layout, bytes) }
    }
}

const BYTES: usize = 64;
/// Blocks of a batch.
const FEW: u64 = 64;
const MANY: u64 = 256;
/// Further allocations of the larger batch: a vector that grows takes a few more. One for every
/// eighth block would be more.
const MORE_MAX: u64 = (MANY - FEW) / 16;
/// Runs of each batch. The least count has no allocations of other threads, such as the node's
/// timers, and none of buffers that are used for the first time.
const RUNS: usize = 12;

/// The least number of allocations of a call, each time after `prepare`.
fn least(mut prepare: impl FnMut(), mut call: impl FnMut()) -> u64 {
    let count = |_| {
        prepare();
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        call();
        ALLOCATIONS.load(Ordering::Relaxed) - before
    };
    (0..RUNS).map(count).min().unwrap()
}

fn assert_stored(outcomes: &[PutOutcome], count: usize) {
    let are_stored = outcomes.iter().all(|one| matches!(one, PutOutcome::Stored));
    assert!(are_stored && outcomes.len() == count, "{outcomes:?}");
}

/// Puts a chain, as an engine does.
fn put_all(store: &dyn BlockStore, keys: &[BlockKey]) {
    let bytes = [7; BYTES];
    let parents = std::iter::once(None).chain(keys.iter().copied().map(Some));
    let put = |(key, parent): (&BlockKey, _)| Put { parent, ..Put::new(*key, &bytes) };
    let puts: Vec<Put<'_>> = keys.iter().zip(parents).map(put).collect();
    assert_stored(&store.put(&puts, NOW), keys.len());
}

/// Both phases of a put by a caller that fills the slabs itself.
fn prepare_and_seal(store: &dyn BlockStore, keys: &[BlockKey]) {
    let puts: Vec<Put<'_>> = keys.iter().map(|key| Put::new(*key, &[])).collect();
    let prepared = store.prepare(&puts, &vec![BYTES; keys.len()], NOW);
    let put_slab = |(key, prepared): (&BlockKey, PrepareOutcome)| match prepared {
        PrepareOutcome::Slab(mut slab) => {
            slab.host_mut().unwrap().fill(7);
            PutSlab::new(*key, slab)
        }
        other => panic!("the key is new: {other:?}"),
    };
    let slabs: Vec<PutSlab> = keys.iter().zip(prepared).map(put_slab).collect();
    assert_stored(&store.put_slabs(slabs, NOW), keys.len());
}

fn assert_hits(views: &[ViewOutcome], count: usize) {
    let are_hits = views.iter().all(|view| matches!(view, ViewOutcome::Hit { .. }));
    assert!(are_hits && views.len() == count, "{views:?}");
}

/// The calls with the number of allocations that each takes for a batch.
fn counts(node: &TestNode, store: &dyn BlockStore, count: u64) -> Vec<(&'static str, u64)> {
    let (keys, all) = (keys(0..count), keys(0..MANY));
    // Not cleared: the models of other capacities would start again, with empty tables.
    let empty = || {
        store.delete(&all);
        wait_until("the slabs are freed", || node.stats().pool.reserved_bytes == 0);
    };
    let sealed = least(empty, || prepare_and_seal(store, &keys));
    let put = least(empty, || put_all(store, &keys));
    let view = least(|| (), || assert_hits(&store.view(&keys, NOW), keys.len()));
    let request = Request::new(&keys);
    let acquire = least(|| (), || assert_hits(&store.acquire(&request, NOW), keys.len()));
    let lookup = least(|| (), || assert_eq!(store.lookup_prefix(&request).tiers.len(), keys.len()));
    let contains = least(|| (), || assert!(store.contains(&keys).iter().all(|has| *has)));
    let mut memory = vec![0; BYTES * keys.len()];
    let get = least(
        || (),
        || {
            let mut buffers: Vec<&mut [u8]> = memory.chunks_mut(BYTES).collect();
            store.get(&keys, &mut buffers, NOW);
        },
    );
    vec![
        ("prepare and seal", sealed),
        ("put", put),
        ("view", view),
        ("acquire", acquire),
        ("lookup", lookup),
        ("contains", contains),
        ("get", get),
    ]
}

#[track_caller]
fn check(node: &TestNode, store: &dyn BlockStore) {
    // The first batch fills what is used again.
    counts(node, store, MANY);
    let counted = counts(node, store, FEW).into_iter().zip(counts(node, store, MANY));
    let texts = counted.map(|((name, few), (_, many))| {
        let is_more = if many > few + MORE_MAX { " (too many)" } else { "" };
        format!("{name}: {few} for {FEW} blocks, {many} for {MANY}{is_more}")
    });
    let texts = texts.collect::<Vec<_>>().join("\n");
    assert!(!texts.contains("too many"), "\n{texts}");
}

/// A node allocated memory for each block that it stored, and a client for each view.
#[test]
fn calls_allocate_no_memory_for_each_block() {
    let node = TestNode::start(|config| config.store.pipeline = "Dram".to_owned());
    let client = node.connect();
    check(&node, &node.store());
    check(&node, &client);
    client.close().unwrap();
}
