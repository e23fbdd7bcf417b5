//! Transfers over the fake driver: between slabs and memory that another library allocated, in the
//! order of a stream of that library.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]
#![expect(unsafe_code, reason = "names memory and streams of another library")]

use std::sync::Arc;
use std::time::Duration;

use cascade_device::{
    Context, Copier, Copy, CudaError, DeviceAllocation, Driver, ForeignMemory, Fragment, Pending,
    RegisteredPool, Slabs, Stream, Transfer,
};
use cascade_memory::{HostSlab, Pool};
use cascade_runtime::{Clock as _, SystemClock, sleep};

use crate::fake::{
    assert_nothing_left, context, count, empty, hold, is_child, pattern, pool, registered, release,
    slab, soon,
};

const MIB: usize = 1 << 20;
const PAGE: usize = 16 << 10;
const PAGES: usize = 64;
/// Layers of the engine: a block is one page of each.
const LAYERS: usize = 4;
/// The first pages have known bytes: page i those of `block(i)`.
const SOURCES: u8 = 6;

/// An engine whose KV is in device memory, and a pool.
struct Engine {
    context: Arc<Context>,
    /// The KV, as this library sees it and as the engine does.
    kv: Arc<ForeignMemory>,
    allocation: Arc<DeviceAllocation>,
    /// Its copier stands for the engine's own stream.
    compute: Copier,
    pool: Pool,
    copier: Copier,
}

impl Engine {
    fn new() -> Self {
        let context = context();
        let allocation = DeviceAllocation::new(&context, LAYERS * PAGES * PAGE).unwrap();
        let owner = Box::new(Arc::clone(&allocation));
        // SAFETY: the owner keeps the memory; the tests order their work.
        let kv =
            unsafe { ForeignMemory::new(&context, allocation.base(), allocation.bytes(), owner) };
        let pool = pool(8 * MIB);
        let registered = registered(&context, &pool, MIB);
        let copier = Copier::new(&context, Arc::clone(&registered)).unwrap();
        let compute = Copier::new(&context, registered).unwrap();
        let engine = Self { context, kv, allocation, compute, pool, copier };
        let blocks: Vec<_> = (0..SOURCES).map(|at| slab(&engine.pool, &block(at))).collect();
        let pages: Vec<usize> = (0..blocks.len()).collect();
        let load = engine.load(&blocks, &pages);
        engine.copier.submit_transfer(load, None).unwrap().wait(soon()).unwrap();
        engine
    }

    /// The engine's stream, as this library gets it: by a number.
    fn stream(&self) -> Stream {
        let handle = self.compute.stream().number();
        // SAFETY: the copier of the engine keeps the stream.
        unsafe { Stream::foreign(&self.context, handle) }
    }

    /// The fragments of a block whose page has this number in each layer.
    fn block(slab: usize, page: usize) -> impl Iterator<Item = Fragment> {
        (0..LAYERS).map(move |layer| Fragment {
            slab,
            slab_offset: layer * PAGE,
            memory: 0,
            memory_offset: (layer * PAGES + page) * PAGE,
            bytes: PAGE,
        })
    }

    fn save(&self, pages: &[usize]) -> Transfer {
        let slabs = pages.iter().map(|_| empty(&self.pool, LAYERS * PAGE)).collect();
        self.transfer(Slabs::ToHost(slabs), pages)
    }

    fn load(&self, blocks: &[HostSlab], pages: &[usize]) -> Transfer {
        self.transfer(Slabs::ToDevice(blocks.to_vec()), pages)
    }

    fn transfer(&self, slabs: Slabs, pages: &[usize]) -> Transfer {
        let blocks = pages.iter().enumerate();
        let fragments = blocks.flat_map(|(slab, page)| Self::block(slab, *page)).collect();
        Transfer { slabs, memory: vec![Arc::clone(&self.kv)], fragments }
    }

    /// A kernel of the engine that writes a page of each layer, on its own stream: it copies the
    /// page `source`.
    fn compute(&self, source: usize, page: usize) -> Vec<Pending> {
        let piece = |layer: usize, page: usize| {
            self.allocation.piece((layer * PAGES + page) * PAGE, PAGE).unwrap()
        };
        // One call of the driver each: `cuMemcpyDtoDAsync_v2`.
        let copies = (0..LAYERS)
            .map(|layer| Copy::Within { source: piece(layer, source), target: piece(layer, page) });
        copies.map(|copy| self.compute.submit(vec![copy], None).unwrap()).collect()
    }

    fn saved(&self, page: usize) -> Vec<u8> {
        let mut pending = self.copier.submit_transfer(self.save(&[page]), None).unwrap();
        saved(pending.wait(soon()).unwrap().unwrap()).remove(0)
    }
}

fn saved(transfer: Transfer) -> Vec<Vec<u8>> {
    let Slabs::ToHost(slabs) = transfer.slabs else { panic!("a save") };
    slabs.into_iter().map(|slab| slab.to_vec()).collect()
}

fn finish(kernels: Vec<Pending>) {
    for mut kernel in kernels {
        kernel.wait(soon()).unwrap();
    }
}

fn block(seed: u8) -> Vec<u8> {
    pattern(seed, LAYERS * PAGE)
}

/// A save of a page waits for the kernels that write it, and the engine writes the page again only
/// once the copy has read it.
#[test]
fn saves_are_ordered_with_the_engines_stream_in_both_directions() {
    if !is_child("saves_are_ordered_with_the_engines_stream_in_both_directions", &[]) {
        return;
    }
    let engine = Engine::new();
    finish(engine.compute(1, 7));
    hold("cuMemcpyDtoDAsync_v2");
    hold("cuMemcpyBatchAsync_v2");
    let stream = engine.stream();
    let written = engine.compute(2, 7);
    let event = stream.record().unwrap();
    let mut save = engine.copier.submit_transfer(engine.save(&[7]), Some(&event)).unwrap();
    save.hold_back(&stream).unwrap();
    // The engine gives the page to another request at once.
    let reused = engine.compute(3, 7);
    assert!(!save.is_over().unwrap());
    release();
    let blocks = saved(save.wait(soon()).unwrap().unwrap());
    assert!(blocks[0] == block(2), "neither the page's bytes before nor those after");
    finish(written);
    finish(reused);
    assert!(engine.saved(7) == block(3));
    drop((engine, stream, event, save));
    assert_nothing_left();
}

/// The same saves without either of the two waits store wrong bytes.
#[test]
fn saves_without_order_store_wrong_bytes() {
    if !is_child("saves_without_order_store_wrong_bytes", &[]) {
        return;
    }
    let engine = Engine::new();
    finish(engine.compute(1, 7));
    hold("cuMemcpyDtoDAsync_v2");
    let written = engine.compute(2, 7);
    assert!(engine.saved(7) == block(1), "the page's bytes before the kernel");
    release();
    finish(written);
    hold("cuMemcpyBatchAsync_v2");
    let event = engine.stream().record().unwrap();
    let mut save = engine.copier.submit_transfer(engine.save(&[7]), Some(&event)).unwrap();
    finish(engine.compute(3, 7));
    release();
    let blocks = saved(save.wait(soon()).unwrap().unwrap());
    assert!(blocks[0] == block(3), "the bytes of the request that got the page next");
}

/// A kernel that uses a loaded page waits for the load, and the load writes the page only once
/// earlier kernels have read it.
#[test]
fn loads_are_ordered_with_the_engines_stream_in_both_directions() {
    if !is_child("loads_are_ordered_with_the_engines_stream_in_both_directions", &[]) {
        return;
    }
    let engine = Engine::new();
    let blocks = [slab(&engine.pool, &block(9))];
    let stream = engine.stream();
    finish(engine.compute(4, 8));
    hold("cuMemcpyDtoDAsync_v2");
    hold("cuMemcpyBatchAsync_v2");
    // The last kernel of the request that had the page reads it.
    let before = engine.compute(8, 10);
    let event = stream.record().unwrap();
    let load = engine.load(&blocks, &[8]);
    let mut load = engine.copier.submit_transfer(load, Some(&event)).unwrap();
    load.hold_back(&stream).unwrap();
    let used = engine.compute(8, 11);
    release();
    finish(used);
    finish(before);
    assert!(load.is_over().unwrap());
    assert!(engine.saved(10) == block(4) && engine.saved(11) == block(9));
    load.wait(soon()).unwrap();
}

/// The same loads without either of the two waits compute with wrong bytes.
#[test]
fn loads_without_order_compute_with_wrong_bytes() {
    if !is_child("loads_without_order_compute_with_wrong_bytes", &[]) {
        return;
    }
    let engine = Engine::new();
    let blocks = [slab(&engine.pool, &block(9))];
    finish(engine.compute(4, 8));
    hold("cuMemcpyBatchAsync_v2");
    let mut load = engine.copier.submit_transfer(engine.load(&blocks, &[8]), None).unwrap();
    finish(engine.compute(8, 11));
    release();
    load.wait(soon()).unwrap();
    assert!(engine.saved(11) == block(4), "the kernel did not wait for the load");
    finish(engine.compute(4, 8));
    hold("cuMemcpyDtoDAsync_v2");
    let before = engine.compute(8, 10);
    let mut load = engine.copier.submit_transfer(engine.load(&blocks, &[8]), None).unwrap();
    load.wait(soon()).unwrap();
    release();
    finish(before);
    assert!(engine.saved(10) == block(9), "the load did not wait for the kernel");
}

#[test]
fn many_blocks_are_one_call_of_the_driver() {
    if !is_child("many_blocks_are_one_call_of_the_driver", &[("FAKE_CUDA_SEED", "11")]) {
        return;
    }
    let engine = Engine::new();
    let blocks: Vec<_> = (0..32).map(block).collect();
    let slabs: Vec<_> = blocks.iter().map(|it| slab(&engine.pool, it)).collect();
    // Pages in an order of their own.
    let pages: Vec<usize> = (0..32).map(|at| at * 13 % PAGES).collect();
    let before = count("cuMemcpyBatchAsync_v2");
    let mut load = engine.copier.submit_transfer(engine.load(&slabs, &pages), None).unwrap();
    load.wait(soon()).unwrap();
    let mut save = engine.copier.submit_transfer(engine.save(&pages), None).unwrap();
    assert!(saved(save.wait(soon()).unwrap().unwrap()) == blocks);
    assert_eq!(count("cuMemcpyBatchAsync_v2") - before, 2);
}

#[test]
fn fragments_outside_of_their_memory_are_refused() {
    if !is_child("fragments_outside_of_their_memory_are_refused", &[]) {
        return;
    }
    let engine = Engine::new();
    let before = count("cuMemcpyDtoHAsync_v2") + count("cuMemcpyBatchAsync_v2");
    let wrong: [fn(&mut Fragment); 6] = [
        |it| it.slab = 1,
        |it| it.memory = 1,
        |it| it.slab_offset = LAYERS * PAGE - PAGE + 1,
        |it| it.slab_offset = usize::MAX,
        |it| it.memory_offset = LAYERS * PAGES * PAGE - PAGE + 1,
        |it| it.memory_offset = usize::MAX,
    ];
    for change in wrong {
        let mut transfer = engine.save(&[3]);
        change(&mut transfer.fragments[2]);
        let fragment = transfer.fragments[2];
        let refused = engine.copier.submit_transfer(transfer, None).map(drop).unwrap_err();
        assert!(
            matches!(refused, CudaError::Outside { .. } | CudaError::Unnamed { .. }),
            "{fragment:?}: {refused}"
        );
    }
    let other = pool(MIB);
    let slabs = Slabs::ToHost(vec![empty(&other, LAYERS * PAGE)]);
    let refused = engine.copier.submit_transfer(engine.transfer(slabs, &[0]), None);
    assert!(matches!(refused, Err(CudaError::OtherPool)));
    let after = count("cuMemcpyDtoHAsync_v2") + count("cuMemcpyBatchAsync_v2");
    assert_eq!(before, after, "nothing was copied");
}

/// The memory of a dropped transfer is kept until its copies are over.
#[test]
fn a_dropped_transfer_keeps_what_it_uses() {
    if !is_child("a_dropped_transfer_keeps_what_it_uses", &[]) {
        return;
    }
    let engine = Engine::new();
    hold("cuMemcpyBatchAsync_v2");
    let free = engine.pool.stats().requested_bytes;
    let save = engine.copier.submit_transfer(engine.save(&[1, 2, 3]), None).unwrap();
    drop(save);
    assert!(engine.pool.stats().requested_bytes > free, "the device may still write the slabs");
    assert!(Arc::strong_count(&engine.kv) > 1);
    release();
    let mut empty_transfer = engine.copier.submit_transfer(engine.save(&[]), None).unwrap();
    empty_transfer.wait(soon()).unwrap();
    // The next submission finds the copies over and frees the slabs.
    drop(engine.copier.submit_transfer(engine.save(&[]), None).unwrap());
    assert_eq!(engine.pool.stats().requested_bytes, free);
}

/// While a pool is being registered, its copies go through the small buffers and are right.
#[test]
fn copies_work_while_the_pool_is_being_registered() {
    let slow = [("FAKE_CUDA_DELAY_US", "cuMemHostRegister_v2=20000")];
    if !is_child("copies_work_while_the_pool_is_being_registered", &slow) {
        return;
    }
    let mut engine = Engine::new();
    let other = pool(4 * MIB);
    let registered =
        RegisteredPool::begin(&engine.context, Arc::new(other.clone()), 64 << 10).unwrap();
    engine.copier = Copier::new(&engine.context, Arc::clone(&registered)).unwrap();
    engine.pool = other;
    let mut rounds = 0;
    let deadline = soon();
    loop {
        let is_complete = registered.report().is_complete;
        let seed = u8::try_from(rounds % 200).unwrap();
        let blocks = [slab(&engine.pool, &block(seed))];
        let mut load = engine.copier.submit_transfer(engine.load(&blocks, &[5]), None).unwrap();
        load.wait(soon()).unwrap();
        assert!(engine.saved(5) == block(seed), "round {rounds}");
        rounds += 1;
        if is_complete {
            break;
        }
        assert!(!deadline.has_passed(&SystemClock));
    }
    let report = registered.report();
    assert_eq!((report.registered_bytes, report.staged_bytes), (4 * MIB, 0), "{report:?}");
    assert!(report.refusal.is_none());
}

/// The thread that registers ends soon after the pool is dropped, and unregisters everything.
#[test]
fn a_pool_can_be_dropped_while_it_is_being_registered() {
    let slow = [("FAKE_CUDA_DELAY_US", "cuMemHostRegister_v2=2000")];
    if !is_child("a_pool_can_be_dropped_while_it_is_being_registered", &slow) {
        return;
    }
    let context = context();
    let pool = pool(4 * MIB);
    let registered = RegisteredPool::begin(&context, Arc::new(pool.clone()), 4096).unwrap();
    let deadline = soon();
    while registered.report().pieces < 3 {
        assert!(!deadline.has_passed(&SystemClock), "waited in vain for three registered pieces");
        sleep(Duration::from_millis(1));
    }
    drop(registered);
    let deadline = soon();
    while count("live") > 0 {
        assert!(
            !deadline.has_passed(&SystemClock),
            "waited in vain for the end of the registration"
        );
        sleep(Duration::from_millis(1));
    }
    assert!(count("cuMemHostRegister_v2") < 1000, "it stopped early");
    drop((context, pool));
    assert_nothing_left();
    assert!(Driver::load().unwrap().failed_releases() == 0);
    assert!(SystemClock.monotonic() > Duration::ZERO);
}
