//! What the copiers of a context count, over the fake driver: each copy once, whatever its way.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::sync::Arc;
use std::time::Duration;

use cascade_device::{
    Context, Copier, Copy, CopyCount, CopyReport, DeviceAllocation, ForeignMemory, Fragment,
    RegisteredPool, Slabs, Transfer,
};
use cascade_memory::Pool;

use crate::fake::{
    self, Fastest, context, costs, empty, foreign, hold, is_child, pattern, piece, pool,
    registered, release, slab, soon,
};

const MIB: usize = 1 << 20;
const PAGE: usize = 1000;
const LAYERS: usize = 4;
const PAGES: usize = 16;
const BLOCK: usize = LAYERS * PAGE;

struct Engine {
    context: Arc<Context>,
    kv: Arc<ForeignMemory>,
    allocation: Arc<DeviceAllocation>,
    pool: Pool,
    registered: Arc<RegisteredPool>,
}

impl Engine {
    fn new() -> Self {
        let context = context();
        let allocation = DeviceAllocation::new(&context, LAYERS * PAGES * PAGE).unwrap();
        let kv = foreign(&context, &allocation, 0);
        let pool = pool(8 * MIB);
        let registered = registered(&context, &pool, 8 * MIB);
        Self { context, kv, allocation, pool, registered }
    }

    fn copier(&self) -> Copier {
        Copier::new(&self.context, Arc::clone(&self.registered)).unwrap()
    }

    /// Block i is page i of each layer.
    fn transfer(&self, slabs: Slabs, blocks: usize) -> Transfer {
        let fragment = |slab: usize, layer: usize| Fragment {
            slab,
            slab_offset: layer * PAGE,
            memory: 0,
            memory_offset: (layer * PAGES + slab) * PAGE,
            bytes: PAGE,
        };
        let fragments = (0..blocks)
            .flat_map(|slab| (0..LAYERS).map(move |layer| fragment(slab, layer)))
            .collect();
        Transfer { slabs, memory: vec![Arc::clone(&self.kv)], fragments }
    }

    fn load(&self, blocks: usize) -> Transfer {
        let slabs = (0..blocks).map(|_| slab(&self.pool, &pattern(7, BLOCK))).collect();
        self.transfer(Slabs::ToDevice(slabs), blocks)
    }

    fn save(&self, blocks: usize) -> Transfer {
        let slabs = (0..blocks).map(|_| empty(&self.pool, BLOCK)).collect();
        self.transfer(Slabs::ToHost(slabs), blocks)
    }

    /// Loads 3 blocks and saves 2.
    fn copy(&self, copier: &Copier) {
        copier.submit_transfer(self.load(3), None).unwrap().wait(soon()).unwrap();
        copier.submit_transfer(self.save(2), None).unwrap().wait(soon()).unwrap();
    }

    fn report(&self) -> CopyReport {
        self.context.copy_report()
    }
}

fn copies(copies: usize, bytes: usize) -> CopyCount {
    CopyCount { copies: copies as u64, bytes: bytes as u64 }
}

/// Without times, which are not the same twice.
fn timeless(report: CopyReport) -> CopyReport {
    CopyReport { host_time: Duration::ZERO, registration_time: Duration::ZERO, ..report }
}

/// Three blocks loaded, two saved.
fn expected() -> CopyReport {
    CopyReport {
        to_device: copies(3 * LAYERS, 3 * BLOCK),
        to_host: copies(2 * LAYERS, 2 * BLOCK),
        submissions: 2,
        ended_submissions: 2,
        ..registered_only()
    }
}

/// The pool of an engine.
fn registered_only() -> CopyReport {
    CopyReport { registered_bytes: 8 * MIB as u64, ..CopyReport::default() }
}

#[test]
fn each_copy_counts_once_in_its_direction() {
    if !is_child("each_copy_counts_once_in_its_direction", &[]) {
        return;
    }
    let engine = Engine::new();
    assert_eq!(timeless(engine.report()), registered_only());
    assert!(engine.report().registration_time > Duration::ZERO);
    engine.copy(&engine.copier());
    assert_eq!(timeless(engine.report()), expected());
    // All copiers of the context count together, also one that is gone.
    let source = slab(&engine.pool, &pattern(1, BLOCK));
    let at = |offset| piece(&engine.allocation, offset, BLOCK);
    let copies_of_three_kinds = vec![
        Copy::ToDevice { source, target: at(0) },
        Copy::Within { source: at(BLOCK), target: at(2 * BLOCK) },
        Copy::ToHost { source: at(3 * BLOCK), target: empty(&engine.pool, BLOCK) },
    ];
    engine.copier().submit(copies_of_three_kinds, None).unwrap().wait(soon()).unwrap();
    let all = expected();
    let all = CopyReport {
        to_device: copies(3 * LAYERS + 1, 4 * BLOCK),
        to_host: copies(2 * LAYERS + 1, 3 * BLOCK),
        within: copies(1, BLOCK),
        submissions: 3,
        ended_submissions: 3,
        ..all
    };
    assert_eq!(timeless(engine.report()), all);
}

#[test]
fn copies_by_kernels_count_once_although_a_buffer_is_between() {
    if !is_child("copies_by_kernels_count_once_although_a_buffer_is_between", &[]) {
        return;
    }
    for fastest in [Fastest::Mapped, Fastest::Staged] {
        let engine = Engine::new();
        let pool = Arc::clone(&engine.registered);
        let copier = Copier::with_costs(&engine.context, pool, costs(fastest)).unwrap();
        let launches = fake::count("cuLaunchKernel");
        engine.copy(&copier);
        assert!(fake::count("cuLaunchKernel") > launches, "{fastest:?}");
        assert_eq!(timeless(engine.report()), expected(), "{fastest:?}");
    }
}

#[test]
fn bytes_of_memory_that_is_not_registered_are_named() {
    let refused = [("FAKE_CUDA_FAIL", "cuMemHostRegister_v2=801")];
    if !is_child("bytes_of_memory_that_is_not_registered_are_named", &refused) {
        return;
    }
    let engine = Engine::new();
    engine.copy(&engine.copier());
    let refused = CopyReport {
        unregistered_bytes: 5 * BLOCK as u64,
        registered_bytes: 0,
        refused_bytes: 8 * MIB as u64,
        ..expected()
    };
    assert_eq!(timeless(engine.report()), refused);
}

#[test]
fn copies_in_flight_are_submissions_that_have_not_ended() {
    if !is_child("copies_in_flight_are_submissions_that_have_not_ended", &[]) {
        return;
    }
    let engine = Engine::new();
    let copier = engine.copier();
    hold("cuMemcpyBatchAsync_v2");
    let mut waited = copier.submit_transfer(engine.load(3), None).unwrap();
    let dropped = copier.submit_transfer(engine.save(2), None).unwrap();
    assert!(!waited.is_over().unwrap());
    drop(dropped);
    let held = engine.report();
    assert_eq!((held.submissions, held.ended_submissions), (2, 0));
    assert_eq!(held.host_time, Duration::ZERO);
    release();
    waited.wait(soon()).unwrap();
    assert!(engine.report().host_time > Duration::ZERO);
    copier.drain();
    // The next submission frees what was dropped.
    copier.submit(Vec::new(), None).unwrap().wait(soon()).unwrap();
    let ended = CopyReport { submissions: 3, ended_submissions: 3, ..expected() };
    assert_eq!(timeless(engine.report()), ended);
    drop(waited);
    // A copier that ends waits for the rest.
    hold("cuMemcpyBatchAsync_v2");
    drop(copier.submit_transfer(engine.load(1), None).unwrap());
    release();
    drop(copier);
    assert_eq!(engine.report().ended_submissions, 4);
}

#[test]
fn failed_submissions_count_no_copies_and_have_no_end() {
    // The first failure is of one call, the second one ends the context.
    let fails = [("FAKE_CUDA_FAIL", "cuMemcpyBatchAsync_v2=1@3,cuMemcpyBatchAsync_v2=700@4")];
    if !is_child("failed_submissions_count_no_copies_and_have_no_end", &fails) {
        return;
    }
    let engine = Engine::new();
    let copier = engine.copier();
    engine.copy(&copier);
    for failed_submissions in 1..4 {
        copier.submit_transfer(engine.load(3), None).unwrap_err();
        assert_eq!(engine.context.poison().is_some(), failed_submissions > 1);
        let failed = CopyReport { failed_submissions, ..expected() };
        assert_eq!(timeless(engine.report()), failed);
    }
    drop(copier);
    assert_eq!(engine.report().ended_submissions, 2);
}

#[test]
fn threads_lose_no_counts() {
    const THREADS: usize = 4;
    const ROUNDS: usize = 50;
    if !is_child("threads_lose_no_counts", &[]) {
        return;
    }
    let engine = Engine::new();
    let copier = engine.copier();
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for _ in 0..ROUNDS {
                    copier.submit_transfer(engine.save(1), None).unwrap().wait(soon()).unwrap();
                }
            });
        }
    });
    let rounds = THREADS * ROUNDS;
    let all = CopyReport {
        to_host: copies(rounds * LAYERS, rounds * BLOCK),
        submissions: rounds as u64,
        ended_submissions: rounds as u64,
        ..registered_only()
    };
    assert_eq!(timeless(engine.report()), all);
}
