//! A node's pool, mapped in a worker process. Its slabs are lent; dropping one releases its hold.

use std::fmt;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::copy::copy_in;
use crate::{DeviceError, DeviceMemory, MemoryError, PeerRegion, Slab, SlabMut};

/// Releases holds of slabs that are no longer used here. Called from any thread that drops a slab.
pub trait Lender: Send + Sync + fmt::Debug {
    /// Releases a hold: the node may use its memory again.
    fn release_hold(&self, hold: u64);
}

/// The mapping of a node's pool in this process: in host memory or in that of a device. Slabs hold
/// it, so it stays while any is in use.
#[derive(Debug)]
pub struct Attachment {
    memory: Memory,
    is_writable: bool,
    lender: Arc<dyn Lender>,
}

#[derive(Debug)]
enum Memory {
    Host(PeerRegion),
    Device(Arc<dyn DeviceMemory>),
}

impl Attachment {
    /// Maps a pool from the descriptor that a node sent. The node has populated its pages already.
    pub fn map(
        file: OwnedFd,
        bytes: usize,
        is_writable: bool,
        lender: Arc<dyn Lender>,
    ) -> Result<Arc<Self>, MemoryError> {
        let mut region = PeerRegion::map(file, bytes, is_writable)?;
        // A forked child has no holds: the node would overwrite what it reads with other blocks.
        region.exclude_from_children()?;
        let memory = Memory::Host(region);
        Ok(Arc::new(Self { memory, is_writable, lender }))
    }

    /// A pool in the memory of a device, which is mapped already.
    pub fn of_device(
        memory: Arc<dyn DeviceMemory>,
        is_writable: bool,
        lender: Arc<dyn Lender>,
    ) -> Arc<Self> {
        Arc::new(Self { memory: Memory::Device(memory), is_writable, lender })
    }

    /// Length of the pool.
    pub fn bytes(&self) -> usize {
        match &self.memory {
            Memory::Host(region) => region.bytes(),
            Memory::Device(device) => device.bytes(),
        }
    }

    /// The device's memory, if the pool is in that of a device.
    pub fn device(&self) -> Option<&Arc<dyn DeviceMemory>> {
        match &self.memory {
            Memory::Host(_) => None,
            Memory::Device(device) => Some(device),
        }
    }

    /// A slab that the node lent for writing; `None` if it is outside the pool, or if the pool is
    /// mapped read-only.
    pub fn writable(self: &Arc<Self>, hold: u64, offset: usize, len: usize) -> Option<SlabMut> {
        if !self.is_writable {
            return None;
        }
        SlabMut::lent(Arc::clone(self), hold, offset, len)
    }

    /// Copies a block into a piece that the node lent for writing. False if the piece is outside
    /// the pool, or if the pool is mapped read-only. The caller keeps the hold of the piece: it
    /// seals or releases it, where [`Self::writable`] leaves that to a slab.
    ///
    /// # Errors
    /// If a device fails: the bytes of the piece are arbitrary then.
    pub fn fill(&self, offset: usize, bytes: &[u8]) -> Result<bool, DeviceError> {
        let end = offset.checked_add(bytes.len());
        if !self.is_writable || end.is_none_or(|end| end > self.bytes()) {
            return Ok(false);
        }
        let base = match &self.memory {
            Memory::Host(region) => region.base(),
            Memory::Device(device) => return device.copy_in(offset, bytes).map(|()| true),
        };
        // SAFETY: the piece lies inside the mapping, which `self` keeps until it is dropped.
        let start = unsafe { base.add(offset) };
        // SAFETY: the piece is mapped writable and initialised (the kernel zeroes it). The node
        // lends it to one writer until it is sealed or released, which is after this call, and no
        // slice of it exists beyond this call.
        let piece = unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), bytes.len()) };
        copy_in(piece, bytes);
        Ok(true)
    }

    /// A block that the node leased; `None` if it is outside the pool.
    pub fn sealed(self: &Arc<Self>, hold: u64, offset: usize, len: usize) -> Option<Slab> {
        SlabMut::lent(Arc::clone(self), hold, offset, len).map(SlabMut::seal)
    }

    /// The first byte, if the pool is in host memory.
    pub(crate) fn base(&self) -> Option<NonNull<u8>> {
        match &self.memory {
            Memory::Host(region) => Some(region.base()),
            Memory::Device(_) => None,
        }
    }

    pub(crate) fn release_hold(&self, hold: u64) {
        self.lender.release_hold(hold);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use cascade_runtime::LeafMutex;

    use super::*;
    use crate::{FakeDevice, HugePages, Pool, PoolConfig};

    #[derive(Debug, Default)]
    struct RecordedReleases(LeafMutex<Vec<u64>>);

    impl Lender for RecordedReleases {
        fn release_hold(&self, hold: u64) {
            self.0.lock().expect("not poisoned").push(hold);
        }
    }

    fn pool() -> Pool {
        let config =
            PoolConfig { capacity_bytes: 1 << 20, huge_pages: HugePages::Never, populate: true };
        Pool::new(&config).expect("a MiB is there")
    }

    fn file_of(pool: &Pool) -> std::fs::File {
        let host = pool.region().host().expect("host memory");
        host.file().try_clone().expect("descriptors are left")
    }

    fn attach(pool: &Pool, is_writable: bool, lender: &Arc<RecordedReleases>) -> Arc<Attachment> {
        let file = file_of(pool);
        let lender = Arc::clone(lender) as Arc<dyn Lender>;
        Attachment::map(file.into(), 1 << 20, is_writable, lender).expect("it can be mapped")
    }

    #[test]
    fn bytes_written_through_one_mapping_are_read_through_the_other() {
        let (pool, lender) = (pool(), Arc::new(RecordedReleases::default()));
        let there = pool.allocate(5000).expect("the pool is empty");
        let here = attach(&pool, true, &lender);
        let mut slab = here.writable(7, there.offset(), 5000).expect("it lies in the pool");
        slab.host_mut().expect("host memory").fill(42);
        assert!(there.host().expect("host memory").iter().all(|byte| *byte == 42));
        assert_eq!(slab.into_hold(&here).expect("it was lent by this node"), 7);
        assert!(lender.0.lock().expect("not poisoned").is_empty(), "into_hold releases nothing");
        assert!(here.fill(there.offset(), &[43; 5000]).expect("host memory"));
        assert!(there.host().expect("host memory").iter().all(|byte| *byte == 43));
        drop(here.sealed(8, there.offset(), 5000));
        assert_eq!(*lender.0.lock().expect("not poisoned"), [8]);
    }

    #[test]
    fn nothing_is_written_outside_a_pool_on_a_device() {
        let device = FakeDevice::new(1 << 20).expect("a MiB is there");
        let here = Attachment::of_device(device, true, Arc::new(RecordedReleases::default()));
        assert!(here.fill((1 << 20) - 1, &[1]).expect("the device works"));
        assert!(!here.fill((1 << 20) - 1, &[1; 2]).expect("the device is not asked"));
        assert!(!here.fill(usize::MAX, &[1]).expect("the device is not asked"));
    }

    #[test]
    fn slabs_outside_the_pool_or_writable_in_a_read_only_mapping_are_refused() {
        let (pool, lender) = (pool(), Arc::new(RecordedReleases::default()));
        let here = attach(&pool, false, &lender);
        assert!(here.sealed(1, 1 << 20, 1).is_none());
        assert!(here.sealed(1, usize::MAX, 2).is_none());
        assert!(here.writable(1, 0, 64).is_none(), "mapped for reading");
        assert!(!here.fill(0, &[1; 64]).expect("host memory"), "mapped for reading");
        let writable = attach(&pool, true, &lender);
        for (offset, bytes) in [((1 << 20) - 63, &[1; 64][..]), (usize::MAX, &[1; 2])] {
            assert!(!writable.fill(offset, bytes).expect("host memory"));
        }
        let file = file_of(&pool);
        let other = Attachment::map(file.into(), 2 << 20, false, lender).expect_err("too long");
        assert!(matches!(other, MemoryError::Map { .. }), "{other}");
    }

    #[test]
    fn into_hold_returns_a_slab_of_another_node() {
        let (pool, lender) = (pool(), Arc::new(RecordedReleases::default()));
        let (one, other) = (attach(&pool, true, &lender), attach(&pool, true, &lender));
        let slab = one.writable(1, 0, 64).expect("it lies in the pool");
        let slab = slab.into_hold(&other).expect_err("lent by another node");
        drop(slab);
        assert_eq!(*lender.0.lock().expect("not poisoned"), [1]);
    }
}
