//! Transfers by one given way over the fake driver, whatever a table of costs says.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::sync::Arc;
use std::time::Duration;

use cascade_device::{
    Call, Copier, CudaError, DeviceAllocation, ForeignMemory, Fragment, RegisteredPool, Slabs,
    Transfer, Way,
};
use cascade_memory::Pool;

use crate::fake::{
    self, Fastest, assert_nothing_left, context, costs, count, is_child, pattern, pool, registered,
    slab, soon,
};

const MIB: usize = 1 << 20;
const COUNT: usize = 40;
const BYTES: usize = 1000;

struct Setup {
    foreign: Arc<ForeignMemory>,
    pool: Pool,
    registered: Arc<RegisteredPool>,
}

impl Setup {
    fn new() -> Self {
        let context = context();
        let memory = DeviceAllocation::new(&context, 16 * MIB).unwrap();
        let foreign = ForeignMemory::of_allocation(&context, &memory);
        let pool = pool(24 * MIB);
        let registered = registered(&context, &pool, usize::MAX);
        Self { foreign, pool, registered }
    }

    fn copier(&self, way: Way) -> Copier {
        let costs = Some(costs(Fastest::Direct));
        Copier::with_way(self.foreign.context(), Arc::clone(&self.registered), way, costs).unwrap()
    }

    /// Fragments with a gap after each on the host: none has a neighbour to be staged with.
    fn load(&self) -> Transfer {
        let slabs = Slabs::ToDevice(vec![slab(&self.pool, &pattern(7, 2 * COUNT * BYTES))]);
        let fragment = |at: usize| Fragment {
            slab: 0,
            slab_offset: 2 * at * BYTES,
            memory: 0,
            memory_offset: (COUNT - 1 - at) * (BYTES + 3),
            bytes: BYTES,
        };
        let fragments = (0..COUNT).map(fragment).collect();
        Transfer { slabs, memory: vec![Arc::clone(&self.foreign)], fragments }
    }
}

fn way_of(call: &Call) -> Way {
    match call {
        Call::Direct(_) => Way::Direct,
        Call::Staged(_) => Way::Staged,
        Call::Mapped(_) => Way::Mapped,
        Call::Unregistered(_) => panic!("all is registered"),
    }
}

fn copied_by(way: Way) {
    let setup = Setup::new();
    let copier = setup.copier(way);
    let mut transfer = setup.load();
    let plan = copier.planned(&mut transfer).unwrap();
    assert!(plan.calls.iter().all(|call| way_of(call) == way), "{:?}", plan.calls);
    // The invented table says that any other way than a direct one takes a second or more.
    assert_eq!(plan.estimate.unwrap() > Duration::from_millis(1), way != Way::Direct);
    let expected: Vec<Vec<u8>> = {
        let Slabs::ToDevice(slabs) = &transfer.slabs else { panic!("a load") };
        transfer.fragments.iter().map(|it| slabs[0][it.slab_offset..][..BYTES].to_vec()).collect()
    };
    let before = count("cuLaunchKernel");
    let loaded = copier.submit_transfer(transfer, None).unwrap().wait(soon()).unwrap().unwrap();
    assert_eq!(count("cuLaunchKernel") > before, way != Way::Direct);
    // Saved by another copier, which copies directly.
    let targets = loaded.fragments.iter().map(|_| fake::empty(&setup.pool, BYTES)).collect();
    let fragments = loaded.fragments.iter().enumerate();
    let fragments = fragments.map(|(slab, it)| Fragment { slab, slab_offset: 0, ..*it }).collect();
    let memory = vec![Arc::clone(&setup.foreign)];
    let save = Transfer { slabs: Slabs::ToHost(targets), memory, fragments };
    let direct = Copier::new(setup.foreign.context(), Arc::clone(&setup.registered)).unwrap();
    let saved = direct.submit_transfer(save, None).unwrap().wait(soon()).unwrap().unwrap();
    let Slabs::ToHost(slabs) = &saved.slabs else { panic!("a save") };
    assert!(slabs.iter().zip(&expected).all(|(saved, expected)| **saved == **expected));
    drop((copier, direct, loaded, saved, setup));
    assert_nothing_left();
}

#[test]
fn a_transfer_takes_the_given_way_at_any_cost() {
    for (way, name) in [(Way::Direct, "d"), (Way::Staged, "s"), (Way::Mapped, "m")] {
        let is_child =
            is_child("a_transfer_takes_the_given_way_at_any_cost", &[("FORCED_WAY", name)]);
        if is_child && fake::variable("FORCED_WAY").as_deref() == Some(name) {
            return copied_by(way);
        }
    }
}

#[test]
fn what_does_not_fit_into_a_buffer_is_direct() {
    if !is_child("what_does_not_fit_into_a_buffer_is_direct", &[]) {
        return;
    }
    let setup = Setup::new();
    let copier = setup.copier(Way::Staged);
    let slabs = Slabs::ToDevice(vec![slab(&setup.pool, &pattern(7, 5 * MIB))]);
    let fragment =
        Fragment { slab: 0, slab_offset: 0, memory: 0, memory_offset: 0, bytes: 5 * MIB };
    let memory = vec![Arc::clone(&setup.foreign)];
    let mut transfer = Transfer { slabs, memory, fragments: vec![fragment] };
    let plan = copier.planned(&mut transfer).unwrap();
    assert!(plan.calls.iter().all(|call| way_of(call) == Way::Direct), "{:?}", plan.calls);
    drop((copier, transfer, setup));
    assert_nothing_left();
}

#[test]
fn a_pool_without_an_address_for_kernels_has_no_mapped_way() {
    // The first question is that of the pool.
    let fails = [("FAKE_CUDA_FAIL", "cuMemHostGetDevicePointer_v2=1@1")];
    if !is_child("a_pool_without_an_address_for_kernels_has_no_mapped_way", &fails) {
        return;
    }
    let setup = Setup::new();
    let by =
        |way| Copier::with_way(setup.foreign.context(), Arc::clone(&setup.registered), way, None);
    assert!(matches!(by(Way::Mapped), Err(CudaError::NotMapped)));
    assert!(by(Way::Staged).is_ok());
    drop(setup);
    assert_nothing_left();
}

#[test]
fn without_a_kernel_only_direct_copies_can_be_asked_for() {
    let test = "without_a_kernel_only_direct_copies_can_be_asked_for";
    if !is_child(test, &[("FAKE_CUDA_ABSENT", "cuLaunchKernel")]) {
        return;
    }
    let setup = Setup::new();
    for way in [Way::Staged, Way::Mapped] {
        let pool = Arc::clone(&setup.registered);
        let error = Copier::with_way(setup.foreign.context(), pool, way, None).unwrap_err();
        assert!(error.to_string().contains("has no cuLaunchKernel"), "{error}");
    }
    assert!(setup.copier(Way::Direct).kernel_refusal().is_some());
    drop(setup);
    assert_nothing_left();
}
