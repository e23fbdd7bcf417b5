//! Copies between pages and a pool in the memory of the fake device, which is mapped again from its
//! descriptor as a client of a node maps it: by the driver and by the kernel.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::sync::Arc;
use std::time::Duration;

use cascade_device::{
    Context, Copier, Copy, CudaError, CudaImporter, CudaMemory, CudaMemoryConfig, DeviceAllocation,
    ForeignMemory, Fragment, Slabs, Transfer,
};
use cascade_memory::{DeviceError, DeviceMemory, Pool, SlabMut};
use cascade_runtime::SystemClock;

use crate::fake::{
    self, assert_nothing_left, context, context_on, count, hold, is_child, pattern, release, soon,
};

const MIB: usize = 1 << 20;
/// Lengths of blocks: short, odd, and long enough for many pieces.
const LENGTHS: [usize; 6] = [1, 100, 4095, 4096, 70_001, MIB + 3];
/// The first page begins here, so that pages and blocks differ in their alignment.
const FIRST: usize = 7;

/// Makes a copier for a pool.
type Make = fn(&Arc<Context>, &Arc<CudaMemory>) -> Result<Copier, CudaError>;

/// Memory that was exported and mapped again, and pages.
struct Sides {
    context: Arc<Context>,
    owner: Arc<CudaMemory>,
    client: Arc<CudaMemory>,
    pages: Arc<DeviceAllocation>,
}

impl Sides {
    fn new() -> Self {
        let context = context();
        let config = CudaMemoryConfig { shareable: true, ..CudaMemoryConfig::new(16 * MIB) };
        let owner = CudaMemory::new(context.driver(), &config, Arc::new(SystemClock)).unwrap();
        let shared = owner.shareable().unwrap();
        let descriptor = shared.export().unwrap();
        let importer = CudaImporter::new(&context);
        let client = importer.open(descriptor, owner.bytes(), shared.device()).unwrap();
        let pages = DeviceAllocation::new(&context, 4 * MIB).unwrap();
        Self { context, owner, client, pages }
    }

    fn pool(&self) -> Pool {
        Pool::of_device(Arc::clone(&self.client) as Arc<dyn cascade_memory::DeviceMemory>).unwrap()
    }

    /// Copies of slabs to or from pages without a gap.
    fn transfer(&self, slabs: Slabs) -> Transfer {
        let mut memory_offset = FIRST;
        let fragment = |(slab, &bytes): (usize, &usize)| {
            let fragment = Fragment { slab, slab_offset: 0, memory: 0, memory_offset, bytes };
            memory_offset += bytes;
            fragment
        };
        let fragments = LENGTHS.iter().enumerate().map(fragment).collect();
        let memory = vec![ForeignMemory::of_allocation(&self.context, &self.pages)];
        Transfer { slabs, memory, fragments }
    }
}

fn slabs(pool: &Pool) -> Vec<SlabMut> {
    LENGTHS.iter().map(|bytes| pool.allocate(*bytes).unwrap()).collect()
}

#[test]
fn the_kernel_copies_between_pages_and_a_pool_on_a_device() {
    if !is_child("the_kernel_copies_between_pages_and_a_pool_on_a_device", &[]) {
        return;
    }
    let sides = Sides::new();
    let pool = sides.pool();
    let copier = Copier::for_device_pool_by_kernel(&sides.context, &sides.client).unwrap();
    let total: usize = LENGTHS.iter().sum();
    // Loads: what the owner wrote arrives on the pages.
    let mut sources = slabs(&pool);
    for (seed, slab) in (1..).zip(&mut sources) {
        sides.owner.copy_in(slab.offset(), &pattern(seed, slab.len())).unwrap();
    }
    let sources = sources.into_iter().map(SlabMut::seal).collect();
    let loads = sides.transfer(Slabs::FromDevicePool(sources));
    copier.submit_transfer(loads, None).unwrap().wait(soon()).unwrap();
    // Saves: the same pages arrive in other slabs.
    let saves = sides.transfer(Slabs::ToDevicePool(slabs(&pool)));
    let saved = copier.submit_transfer(saves, None).unwrap().wait(soon()).unwrap().unwrap();
    let Slabs::ToDevicePool(targets) = saved.slabs else { panic!("{:?}", saved.slabs) };
    for (seed, slab) in (1..).zip(&targets) {
        let mut found = vec![0; slab.len()];
        sides.owner.copy_out(slab.offset(), &mut found).unwrap();
        assert!(found == pattern(seed, slab.len()), "{}", slab.len());
    }
    assert_eq!(count("cuLaunchKernel"), 2);
    assert_eq!(["cuMemcpyDtoDAsync_v2", "cuMemcpyBatchAsync_v2"].map(count), [0; 2]);
    let report = sides.context.copy_report();
    // All pages are neighbours; slabs may be.
    let copies = 1..=2 * LENGTHS.len() as u64;
    assert!(copies.contains(&report.within.copies), "{report:?}");
    assert_eq!(report.within.bytes, 2 * total as u64);
    drop((targets, pool, copier, saved.memory, sides));
    assert_nothing_left();
}

#[test]
fn blocks_in_flight_keep_the_mapping_and_the_copier_does_not() {
    if !is_child("blocks_in_flight_keep_the_mapping_and_the_copier_does_not", &[]) {
        return;
    }
    let sides = Sides::new();
    let by_kernel = Copier::for_device_pool_by_kernel(&sides.context, &sides.client).unwrap();
    let by_driver = Copier::for_device_pool(&sides.context, &sides.client).unwrap();
    let works = [(&by_kernel, "cuLaunchKernel"), (&by_driver, "cuMemcpyBatchAsync_v2")];
    let pool = sides.pool();
    let mut in_flight = Vec::new();
    for (copier, name) in works {
        hold(name);
        let saves = sides.transfer(Slabs::ToDevicePool(slabs(&pool)));
        in_flight.push(copier.submit_transfer(saves, None).unwrap());
    }
    let unmapped = count("cuMemUnmap");
    let Sides { context, owner, client, pages } = sides;
    drop((pool, client, pages));
    assert_eq!(count("cuMemUnmap"), unmapped, "copies are in flight");
    release();
    for mut pending in in_flight {
        drop(pending.wait(soon()).unwrap());
    }
    assert_eq!(count("cuMemUnmap"), unmapped + 1, "the copiers do not keep it");
    drop((by_kernel, by_driver, owner, context));
    assert_nothing_left();
}

#[test]
fn other_pools_and_other_devices_are_refused() {
    let variables = [("FAKE_CUDA_DEVICES", "2"), ("FAKE_CUDA_PEERS", "1")];
    if !is_child("other_pools_and_other_devices_are_refused", &variables) {
        return;
    }
    let (sides, second) = (Sides::new(), context_on(1));
    let make: [Make; 2] = [Copier::for_device_pool, Copier::for_device_pool_by_kernel];
    for make in make {
        let refused = make(&second, &sides.client);
        assert!(matches!(refused, Err(CudaError::OtherPool)), "{refused:?}");
        let copier = make(&sides.context, &sides.client).unwrap();
        let others = [
            // Slabs at the owner's addresses, and slabs in host memory.
            Slabs::ToDevicePool(slabs(&Pool::of_device(sides.owner.clone()).unwrap())),
            Slabs::ToHost(LENGTHS.map(|bytes| fake::empty(&fake::pool(4 * MIB), bytes)).into()),
        ];
        for others in others {
            let refused = copier.submit_transfer(sides.transfer(others), None);
            assert!(matches!(refused, Err(CudaError::OtherPool)), "{refused:?}");
        }
        let longer = SlabMut::seal(sides.pool().allocate(100).unwrap());
        let mut transfer = sides.transfer(Slabs::FromDevicePool(vec![longer]));
        transfer.fragments.truncate(1);
        transfer.fragments[0].bytes = 101;
        let refused = copier.submit_transfer(transfer, None);
        assert!(matches!(refused, Err(CudaError::Outside { .. })), "{refused:?}");
    }
}

/// Memory that begins in a pool and ends outside of it.
#[derive(Debug)]
struct Beyond(Arc<CudaMemory>);

impl DeviceMemory for Beyond {
    fn base(&self) -> u64 {
        self.0.base() + (self.0.bytes() - 4096) as u64
    }

    fn bytes(&self) -> usize {
        MIB
    }

    fn copy_in(&self, _: usize, _: &[u8]) -> Result<(), DeviceError> {
        Err(DeviceError::Lost)
    }

    fn copy_out(&self, _: usize, _: &mut [u8]) -> Result<(), DeviceError> {
        Err(DeviceError::Lost)
    }

    fn zero(&self, _: usize, _: usize) -> Result<(), DeviceError> {
        Err(DeviceError::Lost)
    }
}

#[test]
fn no_copy_leaves_the_memory() {
    if !is_child("no_copy_leaves_the_memory", &[]) {
        return;
    }
    let sides = Sides::new();
    let copier = Copier::for_device_pool(&sides.context, &sides.client).unwrap();
    let pool = Pool::of_device(Arc::new(Beyond(Arc::clone(&sides.client)))).unwrap();
    let slab = pool.allocate(MIB / 2).unwrap();
    assert!(slab.offset() < 4096, "it begins in the other pool");
    let mut transfer = sides.transfer(Slabs::ToDevicePool(vec![slab]));
    transfer.fragments.truncate(1);
    let refused = copier.submit_transfer(transfer, None);
    assert!(matches!(refused, Err(CudaError::OtherPool)), "{refused:?}");
    let last = sides.owner.bytes() - 1;
    let copies = || ["cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"].map(count);
    let before = copies();
    sides.owner.copy_in(last, &[1; 2]).unwrap_err();
    sides.owner.copy_out(last, &mut [1; 2]).unwrap_err();
    assert_eq!(copies(), before, "the driver is not asked");
    sides.owner.copy_in(last, &[1]).unwrap();
}

/// Without the wait, the kernel saves what was on the pages before.
#[test]
fn the_kernel_waits_for_what_writes_the_pages() {
    if !is_child("the_kernel_waits_for_what_writes_the_pages", &[]) {
        return;
    }
    let sides = Sides::new();
    let pool = sides.pool();
    let copier = Copier::for_device_pool_by_kernel(&sides.context, &sides.client).unwrap();
    let host = fake::pool(4 * MIB);
    let writer = fake::registered(&sides.context, &host, MIB);
    let writer = Copier::new(&sides.context, writer).unwrap();
    hold("cuMemcpyHtoDAsync_v2");
    let bytes = pattern(9, LENGTHS[0] + LENGTHS[1]);
    let target = fake::piece(&sides.pages, FIRST, bytes.len());
    let copy = Copy::ToDevice { source: fake::slab(&host, &bytes), target };
    let mut written = writer.submit(vec![copy], None).unwrap();
    let after = writer.stream().record().unwrap();
    let saves = sides.transfer(Slabs::ToDevicePool(slabs(&pool)));
    let mut saved = copier.submit_transfer(saves, Some(&after)).unwrap();
    // What does not wait is over by now.
    std::thread::park_timeout(Duration::from_millis(100));
    assert!(!saved.is_over().unwrap());
    release();
    written.wait(soon()).unwrap();
    let saved = saved.wait(soon()).unwrap().unwrap();
    let Slabs::ToDevicePool(targets) = saved.slabs else { panic!("{:?}", saved.slabs) };
    let mut found = vec![0; LENGTHS[1]];
    sides.owner.copy_out(targets[1].offset(), &mut found).unwrap();
    assert!(found == bytes[LENGTHS[0]..]);
}

#[test]
fn a_driver_without_kernels_refuses_the_copier_and_not_the_other_one() {
    let variables = [("FAKE_CUDA_ABSENT", "cuLaunchKernel")];
    if !is_child("a_driver_without_kernels_refuses_the_copier_and_not_the_other_one", &variables) {
        return;
    }
    let sides = Sides::new();
    Copier::for_device_pool_by_kernel(&sides.context, &sides.client).unwrap_err();
    Copier::for_device_pool(&sides.context, &sides.client).unwrap();
}
