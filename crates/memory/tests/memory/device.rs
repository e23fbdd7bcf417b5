//! A pool over device memory: everything works through copies, and nothing follows its addresses.
//! The device is a fake: an access to its addresses ends the test with SIGSEGV.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::borrow::Cow;
use std::sync::Arc;

use cascade_block::checksum;
use cascade_memory::{
    DIRECT_ALIGN, DeviceError, DeviceMemory as _, FakeDevice, HugePages, MemoryError, Pool,
    PoolConfig, RegionKind, Slab,
};

const BYTES: usize = 4 << 20;

fn pool() -> (Arc<FakeDevice>, Pool) {
    let device = FakeDevice::new(BYTES).unwrap();
    let pool = Pool::of_device(device.clone()).unwrap();
    (device, pool)
}

fn content(number: u8, bytes: usize) -> Vec<u8> {
    (0..=250).cycle().map(|at: u8| at ^ number).take(bytes).collect()
}

fn block(pool: &Pool, number: u8, bytes: usize) -> Slab {
    let mut slab = pool.allocate(bytes).unwrap();
    slab.fill_from(&content(number, bytes)).unwrap();
    slab.seal()
}

fn copied(slab: &Slab) -> Vec<u8> {
    let mut copy = vec![0; slab.len()];
    slab.copy_to(&mut copy).unwrap();
    copy
}

#[test]
fn blocks_are_copied_in_and_out() {
    let (_device, pool) = pool();
    let sizes = [0, 1, 63, 64, 4095, 4097, 100_000, 1 << 20];
    let slabs: Vec<Slab> = (0..).zip(sizes).map(|(n, bytes)| block(&pool, n, bytes)).collect();
    for ((number, bytes), slab) in (0..).zip(sizes).zip(&slabs) {
        assert_eq!((slab.len(), slab.is_empty()), (bytes, bytes == 0));
        assert!(copied(slab) == content(number, bytes), "block {number}");
        let bytes_of = slab.bytes_or_copy().unwrap();
        assert!(matches!(bytes_of, Cow::Owned(_)), "a copy");
        assert!(slab.verify_checksum(checksum(&bytes_of)));
        assert_eq!(slab.checksum(), Some(checksum(&content(number, bytes))));
    }
}

#[test]
fn no_slab_gives_bytes_or_addresses_of_the_host() {
    let (device, pool) = pool();
    assert_eq!((pool.kind(), pool.region().kind()), (RegionKind::Device, RegionKind::Device));
    assert!(pool.region().host().is_none() && pool.region().device().is_some());
    let mut slab = pool.allocate_direct(5000).unwrap();
    assert_eq!((slab.kind(), slab.len(), slab.is_empty()), (RegionKind::Device, 5000, false));
    assert!(slab.host().is_none() && slab.host_mut().is_none());
    assert!(slab.padded_host_mut().is_none());
    let slab = slab.into_host().expect_err("device memory").seal();
    assert!(slab.host().is_none());
    let address = slab.device_address().unwrap();
    assert_eq!(address, device.base() + slab.offset() as u64);
    assert!(address.is_multiple_of(DIRECT_ALIGN as u64));
    slab.into_host().expect_err("device memory");
}

#[test]
fn slabs_of_host_memory_are_borrowed_and_have_no_device_address() {
    let config =
        PoolConfig { capacity_bytes: BYTES, huge_pages: HugePages::Never, populate: false };
    let pool = Pool::new(&config).unwrap();
    assert_eq!((pool.kind(), pool.region().kind()), (RegionKind::Host, RegionKind::Host));
    let slab = block(&pool, 3, 5000);
    assert!(matches!(slab.bytes_or_copy().unwrap(), Cow::Borrowed(_)));
    assert_eq!((slab.kind(), slab.device_address()), (RegionKind::Host, None));
    let start = slab.host().expect("host memory").as_ptr();
    let host = slab.into_host().unwrap();
    assert_eq!((host.as_ptr(), &host[..]), (start, &content(3, 5000)[..]));
    assert_eq!(host.into_slab().len(), 5000);
}

#[test]
fn a_failed_copy_is_an_error_of_its_block_alone() {
    let (device, pool) = pool();
    let (first, second) = (block(&pool, 1, 5000), block(&pool, 2, 5000));
    device.fail_next(1);
    let mut copy = vec![0; 5000];
    let error = first.copy_to(&mut copy).expect_err("the next operation fails");
    assert!(matches!(error, DeviceError::Failed { bytes: 5000, .. }), "{error}");
    assert!(copied(&second) == content(2, 5000));
    assert!(copied(&first) == content(1, 5000));
    device.fail_next(2);
    pool.allocate(100).unwrap().fill_from(&[0; 100]).expect_err("the next operation fails");
    first.bytes_or_copy().expect_err("the next operation fails");
    device.lose();
    let error = second.copy_to(&mut copy).expect_err("the device is lost");
    assert!(matches!(error, DeviceError::Lost), "{error}");
}

#[test]
fn dropped_slabs_free_their_memory() {
    let (_device, pool) = pool();
    let slabs: Vec<_> = std::iter::from_fn(|| pool.allocate(300_000)).collect();
    assert!(!slabs.is_empty() && pool.allocate(BYTES).is_none());
    drop(slabs);
    assert_eq!(pool.stats().reserved_bytes, 0);
    assert_eq!((pool.stats().capacity_bytes, pool.stats().huge_bytes), (BYTES, 0));
    pool.allocate(BYTES).expect("all memory is free");
}

#[test]
fn a_wipe_zeroes_free_memory_at_once_and_held_memory_when_it_is_freed() {
    let (device, pool) = pool();
    let held = block(&pool, 0x5a, 70_000);
    drop(block(&pool, 0xa5, 1 << 20));
    pool.begin_wipe();
    let wiped = pool.wipe(&mut || true);
    assert_eq!((wiped.held_bytes, wiped.unwiped_bytes), (held.reserved_bytes(), 0));
    assert_eq!(wiped.zeroed_bytes + wiped.held_bytes, BYTES);
    assert!(copied(&held) == content(0x5a, 70_000), "a held slab stays as it is");
    drop(held);
    assert!(device.contents().unwrap().iter().all(|byte| *byte == 0));
}

#[test]
fn memory_that_the_device_does_not_zero_is_reported() {
    let (device, pool) = pool();
    drop(block(&pool, 1, 1 << 20));
    pool.begin_wipe();
    device.fail_next(1);
    let wiped = pool.wipe(&mut || true);
    assert_eq!((wiped.zeroed_bytes, wiped.unwiped_bytes), (0, BYTES));
    assert_eq!(pool.wipe(&mut || true).zeroed_bytes, BYTES);
}

/// The bytes of a wiped block would stay in memory that other blocks get, and no report would name
/// them.
#[test]
fn a_piece_that_is_not_zeroed_when_it_is_freed_stays_reserved_until_the_next_wipe() {
    let (device, pool) = pool();
    let held = block(&pool, 0x5a, 70_000);
    let reserved_bytes = held.reserved_bytes();
    pool.begin_wipe();
    assert_eq!(pool.wipe(&mut || true).held_bytes, reserved_bytes);
    device.fail_next(1);
    drop(held);
    let stats = pool.stats();
    assert_eq!((stats.reserved_bytes, stats.requested_bytes), (reserved_bytes, 0));
    assert!(pool.allocate(BYTES).is_none(), "not allocated again");
    let wiped = pool.wipe(&mut || true);
    assert_eq!((wiped.zeroed_bytes, wiped.unwiped_bytes), (BYTES, 0));
    assert!(device.contents().unwrap().iter().all(|byte| *byte == 0));
    assert_eq!(pool.stats().reserved_bytes, 0);
    pool.allocate(BYTES).expect("all memory is free");
}

#[test]
fn an_empty_device_is_refused() {
    #[derive(Debug)]
    struct Empty(Arc<FakeDevice>);
    impl cascade_memory::DeviceMemory for Empty {
        fn base(&self) -> u64 {
            self.0.base()
        }
        fn bytes(&self) -> usize {
            0
        }
        fn copy_in(&self, offset: usize, source: &[u8]) -> Result<(), DeviceError> {
            self.0.copy_in(offset, source)
        }
        fn copy_out(&self, offset: usize, target: &mut [u8]) -> Result<(), DeviceError> {
            self.0.copy_out(offset, target)
        }
        fn zero(&self, offset: usize, bytes: usize) -> Result<(), DeviceError> {
            self.0.zero(offset, bytes)
        }
    }
    let device = Arc::new(Empty(FakeDevice::new(4096).unwrap()));
    let refused = Pool::of_device(device).expect_err("no memory");
    assert!(matches!(refused, MemoryError::Empty), "{refused}");
}

#[test]
fn copies_outside_the_memory_fail() {
    let device = FakeDevice::new(4096).unwrap();
    for offset in [1, 4096, usize::MAX] {
        device.copy_in(offset, &[0; 4096]).expect_err("outside");
        device.copy_out(offset, &mut [0; 4096]).expect_err("outside");
        device.zero(offset, 4096).expect_err("outside");
    }
}
