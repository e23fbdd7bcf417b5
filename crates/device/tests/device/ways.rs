//! The ways of transfers over the fake driver: bytes, order, faults, and what is left.
//!
//! Costs are invented so that a way is chosen. Nothing here is a measurement.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::sync::Arc;
use std::time::Duration;

use cascade_device::{
    Copier, Copy, Costs, CudaError, DeviceAllocation, ForeignMemory, Fragment, Pending, Slabs,
    Transfer,
};
use cascade_memory::{HostSlab, Pool};
use cascade_runtime::{Deadline, SystemClock};

use crate::fake::{
    self, Fastest, assert_nothing_left, context, costs, count, empty, foreign, hold, is_child,
    pattern, piece, pool, registered, release, slab, soon,
};

const MIB: usize = 1 << 20;
/// No multiple of 16, so that pages are not aligned.
const PAGE: usize = 1000;
const LAYERS: usize = 40;
const PAGES: usize = 64;
/// Registrations end within slabs.
const PIECE: usize = 64 << 10;

struct Engine {
    allocation: Arc<DeviceAllocation>,
    kv: Arc<ForeignMemory>,
    pool: Pool,
    copier: Copier,
    /// Copies without kernels, for what tests check, and as the engine's own work.
    direct: Copier,
}

impl Engine {
    fn new(fastest: Fastest) -> Self {
        let context = context();
        // A byte of room before, so that no page is aligned.
        let allocation = DeviceAllocation::new(&context, LAYERS * PAGES * PAGE + 1).unwrap();
        let kv = foreign(&context, &allocation, 1);
        let pool = pool(24 * MIB);
        let registered = registered(&context, &pool, PIECE);
        let copier = Copier::with_costs(&context, Arc::clone(&registered), costs(fastest)).unwrap();
        let direct = Copier::new(&context, registered).unwrap();
        Self { allocation, kv, pool, copier, direct }
    }

    fn transfer(&self, slabs: Slabs, pages: &[usize]) -> Transfer {
        let fragment = |slab: usize, page: usize, layer: usize| Fragment {
            slab,
            slab_offset: layer * PAGE,
            memory: 0,
            memory_offset: (layer * PAGES + page) * PAGE,
            bytes: PAGE,
        };
        let blocks = pages.iter().enumerate();
        let fragments = blocks
            .flat_map(|(slab, page)| (0..LAYERS).map(move |layer| fragment(slab, *page, layer)))
            .collect();
        Transfer { slabs, memory: vec![Arc::clone(&self.kv)], fragments }
    }

    fn load(&self, blocks: &[HostSlab], pages: &[usize]) -> Transfer {
        self.transfer(Slabs::ToDevice(blocks.to_vec()), pages)
    }

    fn save(&self, pages: &[usize]) -> Transfer {
        let slabs = pages.iter().map(|_| empty(&self.pool, LAYERS * PAGE)).collect();
        self.transfer(Slabs::ToHost(slabs), pages)
    }

    fn blocks(&self, seeds: &[u8]) -> Vec<HostSlab> {
        seeds.iter().map(|seed| slab(&self.pool, &block(*seed))).collect()
    }

    /// What a copier saves of these pages.
    fn saved(&self, copier: &Copier, pages: &[usize]) -> Vec<Vec<u8>> {
        saved(run(copier, self.save(pages)))
    }

    /// A kernel of the engine, in its own stream: each layer of a page gets the bytes of another.
    fn compute(&self, source: usize, page: usize) -> Vec<Pending> {
        let place = |layer: usize, page: usize| {
            piece(&self.allocation, (layer * PAGES + page) * PAGE + 1, PAGE)
        };
        let copies = (0..LAYERS)
            .map(|layer| Copy::Within { source: place(layer, source), target: place(layer, page) });
        copies.map(|copy| self.direct.submit(vec![copy], None).unwrap()).collect()
    }
}

fn block(seed: u8) -> Vec<u8> {
    pattern(seed, LAYERS * PAGE)
}

fn run(copier: &Copier, transfer: Transfer) -> Transfer {
    copier.submit_transfer(transfer, None).unwrap().wait(soon()).unwrap().unwrap()
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

/// Pages in an order that no list has.
fn scattered() -> Vec<usize> {
    (0..PAGES - 4).map(|at| at * 37 % (PAGES - 4)).collect()
}

fn round_trip(fastest: Fastest) {
    let engine = Engine::new(fastest);
    assert!(engine.copier.kernel_refusal().is_none());
    let pages = scattered();
    let seeds: Vec<u8> = pages.iter().map(|page| u8::try_from(*page).unwrap()).collect();
    let blocks = engine.blocks(&seeds);
    let before = count("cuLaunchKernel");
    run(&engine.copier, engine.load(&blocks, &pages));
    let launches = count("cuLaunchKernel") - before;
    assert_eq!(launches > 0, fastest != Fastest::Direct, "{launches} launches");
    assert!(
        engine.saved(&engine.direct, &pages)
            == seeds.iter().map(|it| block(*it)).collect::<Vec<_>>()
    );
    drop(blocks);
    let before = count("cuLaunchKernel");
    let all = engine.saved(&engine.copier, &pages);
    assert!(all == seeds.iter().map(|it| block(*it)).collect::<Vec<_>>());
    assert_eq!(count("cuLaunchKernel") - before, launches);
    drop(engine);
    assert_nothing_left();
}

#[test]
fn direct_copies_are_right_in_both_directions() {
    if is_child("direct_copies_are_right_in_both_directions", &[]) {
        round_trip(Fastest::Direct);
    }
}

#[test]
fn copies_of_mapped_memory_are_right_in_both_directions() {
    if is_child("copies_of_mapped_memory_are_right_in_both_directions", &[]) {
        round_trip(Fastest::Mapped);
    }
}

#[test]
fn staged_copies_are_right_in_both_directions() {
    if is_child("staged_copies_are_right_in_both_directions", &[]) {
        round_trip(Fastest::Staged);
    }
}

#[test]
fn staged_copies_work_without_batches() {
    if is_child("staged_copies_work_without_batches", &[("FAKE_CUDA_VERSION", "12040")]) {
        round_trip(Fastest::Staged);
    }
}

/// More slices than buffers, of transfers that run at once: a buffer is filled again only after the
/// kernel has read it, and a list is written again only after that.
fn reuse(fastest: Fastest) {
    let engine = Engine::new(fastest);
    let pages = scattered();
    // Three kinds of loads in turn: no buffer of four gets the same bytes twice in a row.
    let parts: Vec<&[usize]> = pages.chunks(8).take(3).collect();
    for round in 0..3_u8 {
        let seed = |part: usize| round * 3 + u8::try_from(part).unwrap();
        let load = |part: usize| {
            let blocks = engine.blocks(&vec![seed(part); parts[part].len()]);
            let load = engine.load(&blocks, parts[part]);
            engine.copier.submit_transfer(load, None).unwrap()
        };
        let mut loads: Vec<_> = (0..8).map(|at| load(at % 3)).collect();
        // They wait for the loads by the order of the copier, and not by the caller.
        let save =
            |part: usize| engine.copier.submit_transfer(engine.save(parts[part]), None).unwrap();
        let saves: Vec<_> = (0..8).map(|at| save(at % 3)).collect();
        for (at, mut save) in saves.into_iter().enumerate() {
            let bytes = saved(save.wait(soon()).unwrap().unwrap());
            assert!(bytes.iter().all(|bytes| *bytes == block(seed(at % 3))), "save {at}");
        }
        for load in &mut loads {
            load.wait(soon()).unwrap();
        }
    }
    drop(engine);
    assert_nothing_left();
}

/// Slow kernels, and slow copies to and from the buffers: whoever does not wait is too early.
fn reuse_while(slow: &str, test: &str) {
    let delay = format!("{slow}=20");
    if is_child(test, &[("FAKE_CUDA_DELAY_US", &delay), ("FAKE_CUDA_SEED", "5")]) {
        reuse(Fastest::Staged);
        reuse(Fastest::Mapped);
    }
}

#[test]
fn slow_kernels_share_buffers_and_lists() {
    reuse_while("cuLaunchKernel", "slow_kernels_share_buffers_and_lists");
}

#[test]
fn slow_copies_share_buffers_and_lists() {
    reuse_while("cuMemcpyBatchAsync_v2", "slow_copies_share_buffers_and_lists");
}

/// More slices than buffers in one transfer: a buffer is filled again only after it was emptied.
fn many_slices(is_load: bool) {
    const SHORT: usize = 64;
    const COUNT: usize = 6 * 4096;
    let engine = Engine::new(Fastest::Staged);
    let fragment = |at: usize| Fragment {
        slab: at / 4096,
        slab_offset: at % 4096 * SHORT,
        memory: 0,
        memory_offset: at * 7919 % COUNT * SHORT * 3 / 2,
        bytes: SHORT,
    };
    let fragments: Vec<Fragment> = (0..COUNT).map(fragment).collect();
    let bytes: Vec<Vec<u8>> = (0..6).map(|seed| pattern(seed, 4096 * SHORT)).collect();
    let transfer = |slabs| {
        let (memory, fragments) = (vec![Arc::clone(&engine.kv)], fragments.clone());
        Transfer { slabs, memory, fragments }
    };
    let slabs = bytes.iter().map(|bytes| slab(&engine.pool, bytes)).collect();
    let slabs = transfer(Slabs::ToDevice(slabs));
    let before = count("cuLaunchKernel");
    run(&engine.copier, slabs);
    let slabs = bytes.iter().map(|bytes| empty(&engine.pool, bytes.len())).collect();
    let slabs = transfer(Slabs::ToHost(slabs));
    let saves = if is_load { &engine.direct } else { &engine.copier };
    assert!(saved(run(saves, slabs)) == bytes);
    assert!(count("cuLaunchKernel") - before > 4, "more slices than buffers");
    drop(engine);
    assert_nothing_left();
}

#[test]
fn a_load_of_many_slices_uses_buffers_again() {
    // A kernel of 4,096 fragments is slower than its few copies without any pause.
    if is_child("a_load_of_many_slices_uses_buffers_again", &[]) {
        many_slices(true);
    }
}

#[test]
fn a_save_of_many_slices_uses_buffers_again() {
    // Copies that are slower than kernels, which all buffers wait for.
    let delay = [("FAKE_CUDA_DELAY_US", "cuMemcpyBatchAsync_v2=20000")];
    if is_child("a_save_of_many_slices_uses_buffers_again", &delay) {
        many_slices(false);
    }
}

#[test]
fn several_threads_use_one_copier() {
    if !is_child("several_threads_use_one_copier", &[]) {
        return;
    }
    let engine = Engine::new(Fastest::Staged);
    let pages = scattered();
    std::thread::scope(|scope| {
        for (thread, pages) in (0..4_u8).zip(pages.chunks(PAGES / 4)) {
            let engine = &engine;
            scope.spawn(move || {
                for round in 0..4 {
                    let seed = thread * 16 + round;
                    let blocks = engine.blocks(&vec![seed; pages.len()]);
                    run(&engine.copier, engine.load(&blocks, pages));
                    let bytes = engine.saved(&engine.copier, pages);
                    assert!(bytes.iter().all(|bytes| *bytes == block(seed)), "{thread} {round}");
                }
            });
        }
    });
    drop(engine);
    assert_nothing_left();
}

/// A kernel that started before an error may still write its slabs.
#[test]
fn after_an_error_slabs_stay_until_kernels_are_over() {
    // The first wait is that of the kernels for the copier, the second the other way round.
    let fails = [("FAKE_CUDA_FAIL", "cuStreamWaitEvent=1@2")];
    if !is_child("after_an_error_slabs_stay_until_kernels_are_over", &fails) {
        return;
    }
    let engine = Engine::new(Fastest::Mapped);
    let reserved = || engine.pool.stats().reserved_bytes;
    hold("cuLaunchKernel");
    engine.copier.submit_transfer(engine.save(&[1]), None).expect_err("the call fails");
    // The second looks at flights after the copier's own stream was over.
    for _ in 0..2 {
        run(&engine.copier, engine.load(&[], &[]));
    }
    assert!(reserved() > 0, "the kernel may still write them");
    release();
    engine.saved(&engine.copier, &[2]);
    run(&engine.copier, engine.load(&[], &[]));
    assert_eq!(reserved(), 0);
    drop(engine);
    assert_nothing_left();
}

/// A save waits for the kernel that writes the page, and the engine writes it again only after the
/// save. Without either of the two, wrong bytes are stored.
fn save_in_order(fastest: Fastest) {
    let engine = Engine::new(fastest);
    run(&engine.copier, engine.load(&engine.blocks(&[1, 2, 3]), &[1, 2, 3]));
    finish(engine.compute(1, 7));
    hold("cuMemcpyDtoDAsync_v2");
    let written = engine.compute(2, 7);
    assert!(engine.saved(&engine.copier, &[7]) == [block(1)], "without the event: old bytes");
    let event = engine.direct.stream().record().unwrap();
    let save = engine.save(&[7]);
    let mut save = engine.copier.submit_transfer(save, Some(&event)).unwrap();
    save.hold_back(engine.direct.stream()).unwrap();
    let reused = engine.compute(3, 7);
    assert!(!save.is_over().unwrap());
    release();
    assert!(saved(save.wait(soon()).unwrap().unwrap()) == [block(2)]);
    finish(written);
    finish(reused);
    hold("cuLaunchKernel");
    hold("cuMemcpyBatchAsync_v2");
    let mut late = engine.copier.submit_transfer(engine.save(&[7]), None).unwrap();
    finish(engine.compute(1, 7));
    release();
    let bytes = saved(late.wait(soon()).unwrap().unwrap());
    assert!(bytes == [block(1)], "the engine did not wait: the bytes of the next request");
    drop((engine, event, save, late));
    assert_nothing_left();
}

/// A load waits for kernels that read the page, and kernels that use it wait for the load.
fn load_in_order(fastest: Fastest) {
    let engine = Engine::new(fastest);
    run(&engine.copier, engine.load(&engine.blocks(&[1, 2]), &[1, 8]));
    let stream = engine.direct.stream();
    hold("cuMemcpyDtoDAsync_v2");
    let before = engine.compute(8, 10);
    let event = stream.record().unwrap();
    let blocks = engine.blocks(&[9]);
    let load = engine.load(&blocks, &[8]);
    let mut load = engine.copier.submit_transfer(load, Some(&event)).unwrap();
    load.hold_back(stream).unwrap();
    let used = engine.compute(8, 11);
    assert!(!load.is_over().unwrap());
    release();
    load.wait(soon()).unwrap();
    finish(before);
    finish(used);
    assert!(engine.saved(&engine.direct, &[10, 11]) == [block(2), block(9)]);
    // The same without waiting for the load.
    hold("cuLaunchKernel");
    hold("cuMemcpyBatchAsync_v2");
    let late = engine.load(&engine.blocks(&[5]), &[8]);
    let mut late = engine.copier.submit_transfer(late, None).unwrap();
    finish(engine.compute(8, 11));
    release();
    late.wait(soon()).unwrap();
    assert!(engine.saved(&engine.direct, &[8, 11]) == [block(5), block(9)], "old bytes");
    drop((engine, event, load, late, blocks));
    assert_nothing_left();
}

#[test]
fn staged_saves_are_ordered() {
    if is_child("staged_saves_are_ordered", &[]) {
        save_in_order(Fastest::Staged);
    }
}

#[test]
fn mapped_saves_are_ordered() {
    if is_child("mapped_saves_are_ordered", &[]) {
        save_in_order(Fastest::Mapped);
    }
}

#[test]
fn staged_loads_are_ordered() {
    if is_child("staged_loads_are_ordered", &[]) {
        load_in_order(Fastest::Staged);
    }
}

#[test]
fn mapped_loads_are_ordered() {
    if is_child("mapped_loads_are_ordered", &[]) {
        load_in_order(Fastest::Mapped);
    }
}

/// What is not registered goes through small buffers, and the rest by its way.
#[test]
fn a_pool_that_is_registered_in_part_has_all_ways() {
    // Small slabs are taken from the end of the pool, of 384 pieces.
    let refuses = [("FAKE_CUDA_FAIL", "cuMemHostRegister_v2=2@370")];
    if is_child("a_pool_that_is_registered_in_part_has_all_ways", &refuses) {
        round_trip(Fastest::Staged);
    }
}

/// Without the address of mapped memory or without the kernel, copies go on without them.
#[test]
fn what_the_driver_lacks_is_not_used_and_said() {
    for name in ["cuLaunchKernel", "cuModuleLoadDataEx", "cuMemHostGetDevicePointer_v2"] {
        if !is_child("what_the_driver_lacks_is_not_used_and_said", &[("FAKE_CUDA_ABSENT", name)]) {
            continue;
        }
        let engine = Engine::new(Fastest::Staged);
        let refusal = engine.copier.kernel_refusal().unwrap().to_string();
        let absent = fake::variable("FAKE_CUDA_ABSENT").unwrap();
        assert!(refusal.contains(&format!("has no {absent}")), "{refusal}");
        let report = cascade_device::DriverReport::examine().unwrap();
        assert_eq!(report.missing_for_kernels, [&*absent]);
        run(&engine.copier, engine.load(&engine.blocks(&[3]), &[3]));
        assert!(engine.saved(&engine.copier, &[3]) == [block(3)]);
        drop(engine);
        return assert_nothing_left();
    }
}

/// A drain waits for kernels that no event covers, too.
#[test]
fn a_drain_waits_for_kernels_of_failed_submissions() {
    let test = "a_drain_waits_for_kernels_of_failed_submissions";
    let variables = [
        ("FAKE_CUDA_FAIL", "cuStreamWaitEvent=1@2"),
        ("FAKE_CUDA_DELAY_US", "cuLaunchKernel=1000"),
    ];
    if !is_child(test, &variables) {
        return;
    }
    let engine = Engine::new(Fastest::Mapped);
    engine.copier.submit_transfer(engine.save(&[1]), None).expect_err("the call fails");
    engine.copier.drain();
    assert!(count("copies") >= LAYERS as u64, "{} copies are over", count("copies"));
    drop(engine);
    assert_nothing_left();
}

/// A call that fails in the middle of a slice: its buffer is not used again, and nothing is lost.
#[test]
fn after_an_error_in_a_slice_copies_are_direct() {
    let fails = [("FAKE_CUDA_FAIL", "cuLaunchKernel=1@2")];
    if !is_child("after_an_error_in_a_slice_copies_are_direct", &fails) {
        return;
    }
    let engine = Engine::new(Fastest::Staged);
    let pages = scattered();
    run(&engine.copier, engine.load(&engine.blocks(&[1]), &[1]));
    let blocks = engine.blocks(&vec![4; pages.len()]);
    let load = engine.load(&blocks, &pages);
    let error = engine.copier.submit_transfer(load, None).expect_err("the kernel does not start");
    assert!(matches!(error, CudaError::Call(_)), "{error}");
    let launches = count("cuLaunchKernel");
    run(&engine.copier, engine.load(&blocks, &pages));
    assert_eq!(count("cuLaunchKernel"), launches);
    assert!(engine.saved(&engine.copier, &pages).iter().all(|bytes| *bytes == block(4)));
    drop(blocks);
    drop(engine);
    assert_nothing_left();
}

/// The context dies under each copy in turn: all calls end, and no memory is released that the
/// device could still use.
#[test]
fn a_context_may_die_in_the_middle_of_any_way() {
    for (at, fastest) in [(3, "s"), (41, "s"), (2700, "s"), (3, "m"), (41, "m"), (4000, "m")] {
        let dies = at.to_string();
        let variables = [("FAKE_CUDA_DIE_AT_COPY", &*dies), ("WAYS_TEST_WAY", fastest)];
        if !is_child("a_context_may_die_in_the_middle_of_any_way", &variables) {
            continue;
        }
        let is_staged = fake::variable("WAYS_TEST_WAY").as_deref() == Some("s");
        let engine = Engine::new(if is_staged { Fastest::Staged } else { Fastest::Mapped });
        let pages = scattered();
        let reserved = || engine.pool.stats().reserved_bytes;
        let result = (0..3).try_for_each(|_| {
            let load = engine.load(&engine.blocks(&vec![4; pages.len()]), &pages);
            engine.copier.submit_transfer(load, None)?.wait(soon())?;
            engine.copier.submit_transfer(engine.save(&pages), None)?.wait(soon()).map(drop)
        });
        let error = result.expect_err("the context died");
        assert!(error.is_fatal(), "{error}");
        assert!(reserved() > 0, "the device may still use the slabs");
        let asked = count("cuCtxPushCurrent_v2");
        let load = engine.load(&[], &[]);
        let again = engine.copier.submit_transfer(load, None).expect_err("it is dead");
        assert!(matches!(again, CudaError::Poisoned { .. }), "{again}");
        assert_eq!(count("cuCtxPushCurrent_v2"), asked);
        drop(engine);
        return assert_eq!(count("misused"), 0);
    }
}

/// Slabs, and the lists that kernels read, stay until the device is done.
#[test]
fn transfers_that_nobody_waits_for_keep_their_memory() {
    if !is_child("transfers_that_nobody_waits_for_keep_their_memory", &[]) {
        return;
    }
    let engine = Engine::new(Fastest::Staged);
    hold("cuLaunchKernel");
    let mut late = engine.copier.submit_transfer(engine.save(&[1]), None).unwrap();
    let passed = Deadline::after(&SystemClock, Duration::ZERO);
    late.wait(passed).expect_err("held");
    drop(late);
    let reserved = || engine.pool.stats().reserved_bytes;
    assert!(reserved() >= LAYERS * PAGE, "the device may still write it");
    let lists = count("cuMemAllocHost_v2");
    drop(engine.copier.submit_transfer(engine.save(&[2]), None).unwrap());
    assert_eq!(count("cuMemAllocHost_v2"), lists + 1, "the first list is still read");
    release();
    // The first waits for what nobody waits for, and the second frees it.
    for _ in 0..2 {
        run(&engine.copier, engine.load(&[], &[]));
    }
    assert_eq!(reserved(), 0);
    assert!(engine.saved(&engine.copier, &[3]).len() == 1);
    assert_eq!(count("cuMemAllocHost_v2"), lists + 1, "lists are used again");
    drop(engine);
    assert_nothing_left();
}

/// On the fake the table means nothing. This shows that measuring it works and leaves nothing.
#[test]
fn costs_can_be_measured_and_are_not_on_a_stand_in() {
    if !is_child("costs_can_be_measured_and_are_not_on_a_stand_in", &[]) {
        return;
    }
    let context = context();
    assert!(Costs::measure(&context).unwrap().is_none());
    assert_eq!(count("copies"), 0);
    let costs = Costs::measure_any(&context).unwrap();
    for ways in [&costs.to_device, &costs.to_host] {
        let curves = [Some(&ways.direct), ways.mapped.as_ref(), ways.within.as_ref()];
        for curve in curves {
            let rates = &curve.unwrap().rates;
            assert_eq!(rates.len(), 5);
            assert!(rates.iter().all(|rate| rate.bytes_per_us > 0), "{rates:?}");
        }
    }
    drop(context);
    assert_nothing_left();
}
