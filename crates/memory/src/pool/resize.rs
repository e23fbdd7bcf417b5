//! A pool gives free memory back to the system, and gets it again. Its region stays as it is.
#![expect(unsafe_code, reason = "allocates memory of the region again")]

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};

use cascade_runtime::LeafMutex;

use super::{Pool, PoolInner};
use crate::available::available_here;
use crate::heap::Extent;
use crate::{HostRegion, MemoryError, PageSource, Region};

/// Extents that are taken at once, so that who waits for the heap does not wait for long.
const EXTENTS_MAX: usize = 256;

/// The part of a region that the pool does not use.
#[derive(Debug)]
pub(super) struct Resize {
    /// Bytes of all extents that are taken out of the pool, also of those not given back yet.
    withheld_bytes: AtomicUsize,
    /// Extents without memory.
    released: LeafMutex<Vec<Extent>>,
    /// Bytes in huge pages.
    huge_bytes: AtomicUsize,
    /// Whether pages may be in use by their physical addresses.
    is_pinned: AtomicBool,
}

/// Free memory that was taken out of a pool. [`WithheldMemory::release`] gives it back to the
/// system; if it is dropped instead, the pool has it again.
#[derive(Debug)]
pub struct WithheldMemory {
    pool: Arc<PoolInner>,
    extents: Vec<Extent>,
    bytes: usize,
}

impl Resize {
    pub(super) fn of(region: &Region) -> Self {
        let huge_bytes = region.host().map_or(0, |host| host.pages().huge_bytes);
        Self {
            withheld_bytes: AtomicUsize::new(0),
            released: LeafMutex::default(),
            huge_bytes: AtomicUsize::new(huge_bytes),
            is_pinned: AtomicBool::new(false),
        }
    }

    pub(super) fn huge_bytes(&self) -> usize {
        self.huge_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn take_all(&self) -> Vec<Extent> {
        std::mem::take(&mut *self.released.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Pool {
    /// The bytes that slabs may use: the region, less what was taken out of the pool.
    pub fn capacity_bytes(&self) -> usize {
        // Relaxed, here and below: plain counters. The lock of the heap orders who has an extent.
        self.0.region.bytes() - self.0.resize.withheld_bytes.load(Ordering::Relaxed)
    }

    /// From now on the pool keeps its size, because a device has its pages registered: it would
    /// access those, and not the pages that the pool has after it was made smaller and larger
    /// again.
    pub fn pin(&self) {
        self.0.resize.is_pinned.store(true, Ordering::Relaxed);
    }

    /// Whether the pool can change its size.
    ///
    /// # Errors
    /// If its memory is that of a device, or is registered with one.
    pub fn check_resizable(&self) -> Result<(), MemoryError> {
        let is_pinned = self.0.resize.is_pinned.load(Ordering::Relaxed);
        if is_pinned || self.0.region.host().is_none() {
            return Err(MemoryError::Pinned);
        }
        Ok(())
    }

    /// Takes free memory out of the pool, in whole pages: `bytes`, rounded up to a page, or less if
    /// less is free or it is in many pieces.
    pub fn withhold(&self, bytes: usize) -> WithheldMemory {
        let mut taken = WithheldMemory { pool: Arc::clone(&self.0), extents: Vec::new(), bytes: 0 };
        let Some(host) = self.0.region.host() else { return taken };
        let page_bytes = host.page_bytes();
        let wanted = bytes.div_ceil(page_bytes).saturating_mul(page_bytes);
        let mut heap = self.0.lock_heap();
        self.0.drain_magazines(&mut heap);
        while taken.bytes < wanted
            && taken.extents.len() < EXTENTS_MAX
            && let Some(extent) = heap.take_pages(page_bytes, wanted - taken.bytes)
        {
            taken.bytes += extent.bytes;
            taken.extents.push(extent);
        }
        self.0.resize.withheld_bytes.fetch_add(taken.bytes, Ordering::Relaxed);
        taken
    }

    /// Gives the memory back again of all that was given back. A process that maps the region may
    /// have allocated pages there.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn release_again(&self) -> Result<(), MemoryError> {
        let Some(host) = self.0.region.host() else { return Ok(()) };
        let extents = self.0.resize.take_all();
        let bytes = extents.iter().map(|extent| extent.bytes).sum();
        let mut released = extents.iter();
        let outcome = released.try_for_each(|it| host.release_pages(it.offset, it.bytes));
        self.0.resize.keep(extents);
        outcome.map_err(|source| MemoryError::Shrink { bytes, source })
    }

    /// Allocates memory again that was given back, up to `bytes`, rounded up to a page. Returns the
    /// capacity.
    ///
    /// # Errors
    /// If the region is not larger by `bytes` than the pool, or the machine lacks the memory. A
    /// part may have been allocated.
    pub fn restore(&self, bytes: usize) -> Result<usize, MemoryError> {
        self.check_resizable()?;
        let host = self.0.region.host().ok_or(MemoryError::Pinned)?;
        let withheld = self.0.resize.withheld_bytes.load(Ordering::Relaxed);
        if bytes > withheld {
            return Err(MemoryError::BeyondRegion { region_bytes: self.0.region.bytes() });
        }
        // Huge pages that the operator has reserved are not part of the available memory.
        let is_ordinary = host.pages().source != PageSource::Reserved;
        let available = available_here().filter(|available| is_ordinary && *available < bytes);
        if let Some(available_bytes) = available {
            return Err(MemoryError::NotEnoughToGrow { bytes, available_bytes });
        }
        let mut left = bytes.div_ceil(host.page_bytes()).saturating_mul(host.page_bytes());
        while left > 0 {
            let Some(extent) = self.0.resize.take(left) else { break };
            left -= extent.bytes;
            if let Err(source) = allocate(host, &extent) {
                // What the failed call has allocated. If that fails, too, the memory stays
                // allocated, and is not used.
                drop(host.release_pages(extent.offset, extent.bytes));
                self.0.resize.keep(vec![extent]);
                return Err(MemoryError::Grow { bytes, source });
            }
            self.0.resize.withheld_bytes.fetch_sub(extent.bytes, Ordering::Relaxed);
            self.0.lock_heap().free(extent);
        }
        Ok(self.capacity_bytes())
    }

    /// Asks the kernel again how much of the region is in huge pages. For a large region that takes
    /// as long as a call of the store.
    pub fn count_huge_pages(&self) {
        if let Some(host) = self.0.region.host() {
            self.0.resize.huge_bytes.store(host.huge_bytes_now(), Ordering::Relaxed);
        }
    }
}

/// Allocates the memory of an extent that was given back.
fn allocate(host: &HostRegion, extent: &Extent) -> io::Result<()> {
    // SAFETY: who has an extent that is taken out of the heap has it alone, until it is freed. It
    // was free when it was taken, so that no slab is in it, and has lost its contents since.
    unsafe { host.restore_pages(extent.offset, extent.bytes) }
}

impl Resize {
    /// Takes an extent without memory, of at most `bytes_max` bytes.
    fn take(&self, bytes_max: usize) -> Option<Extent> {
        let mut released = self.released.lock().unwrap_or_else(PoisonError::into_inner);
        let Extent { offset, bytes } = released.pop()?;
        let taken = bytes.min(bytes_max);
        if taken < bytes {
            released.push(Extent { offset: offset + taken, bytes: bytes - taken });
        }
        Some(Extent { offset, bytes: taken })
    }

    fn keep(&self, mut extents: Vec<Extent>) {
        self.released.lock().unwrap_or_else(PoisonError::into_inner).append(&mut extents);
    }
}

impl WithheldMemory {
    /// Its length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Gives the memory back to the system.
    ///
    /// # Errors
    /// If the kernel refuses. The pool then has the rest again.
    pub fn release(mut self) -> Result<(), MemoryError> {
        let pool = Arc::clone(&self.pool);
        let Some(host) = pool.region.host() else { return Ok(()) };
        let mut outcome = Ok(());
        while outcome.is_ok()
            && let Some(extent) = self.extents.pop()
        {
            match host.release_pages(extent.offset, extent.bytes) {
                Ok(()) => {
                    self.bytes -= extent.bytes;
                    pool.resize.keep(vec![extent]);
                }
                Err(source) => {
                    outcome = Err(MemoryError::Shrink { bytes: self.bytes, source });
                    self.extents.push(extent);
                }
            }
        }
        outcome
    }
}

impl Drop for WithheldMemory {
    fn drop(&mut self) {
        if self.extents.is_empty() {
            return;
        }
        self.pool.resize.withheld_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        let mut heap = self.pool.lock_heap();
        for extent in self.extents.drain(..) {
            heap.free(extent);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;
    use crate::{HugePages, PoolConfig, PoolStats};

    const MIB: usize = 1 << 20;

    fn pool(mib: usize, huge_pages: HugePages) -> Pool {
        let config = PoolConfig { capacity_bytes: mib * MIB, huge_pages, populate: true };
        Pool::new(&config).expect("a few MiB are there")
    }

    /// Memory of the pool's file, which is shared memory.
    fn allocated(pool: &Pool) -> usize {
        let host = pool.region().host().expect("host memory");
        let blocks = host.file().metadata().expect("it is open").blocks();
        usize::try_from(blocks).expect("a small pool") * 512
    }

    fn check_sums(pool: &Pool) -> PoolStats {
        let stats = pool.stats();
        let sum = stats.reserved_bytes + stats.magazine_bytes + stats.free_bytes;
        assert_eq!(sum, stats.capacity_bytes, "{stats:?}");
        assert_eq!(stats.capacity_bytes, pool.capacity_bytes());
        stats
    }

    #[test]
    fn free_memory_goes_back_to_the_system_and_slabs_keep_their_bytes() {
        for huge_pages in [HugePages::Never, HugePages::Auto] {
            let pool = pool(16, huge_pages);
            let before = allocated(&pool);
            assert!(before >= 16 * MIB);
            let mut slabs: Vec<_> = (0..200)
                .map(|at| {
                    let mut slab = pool.allocate(40_000).expect("8 MB fit");
                    slab.fill_from(&vec![at; 40_000]).expect("host memory");
                    slab.seal()
                })
                .collect();
            // Every other one is free: only whole pages between the others go back.
            let mut at = 0;
            slabs.retain(|_| {
                at += 1;
                at % 2 == 0
            });
            let withheld = pool.withhold(usize::MAX / 2);
            let bytes = withheld.bytes();
            assert!(bytes > 10 * MIB && bytes < 16 * MIB, "{bytes}");
            check_sums(&pool);
            withheld.release().expect("the kernel punches holes");
            assert_eq!(check_sums(&pool).capacity_bytes, 16 * MIB - bytes);
            assert!(allocated(&pool) <= before - bytes, "{} of {before}", allocated(&pool));
            assert!(pool.allocate(MIB).is_none(), "it is not used");
            for (at, slab) in slabs.iter().enumerate() {
                let byte = u8::try_from(2 * at + 1).expect("below 200");
                assert!(slab.host().expect("host memory").iter().all(|it| *it == byte), "{at}");
            }
            assert_eq!(pool.restore(4 * MIB).expect("it was there"), 20 * MIB - bytes);
            check_sums(&pool);
            let refused = pool.restore(bytes).expect_err("4 MiB of these are back");
            assert!(matches!(refused, MemoryError::BeyondRegion { .. }), "{refused}");
            pool.restore(bytes - 4 * MIB).expect("it was there");
            assert_eq!(check_sums(&pool).capacity_bytes, 16 * MIB);
            assert!(allocated(&pool) >= 16 * MIB, "all is reserved again");
            drop(slabs);
            let all = pool.allocate(16 * MIB).expect("the free pieces are one again");
            assert!(all.seal().host().expect("host memory")[15 * MIB] < 200);
        }
    }

    #[test]
    fn withheld_memory_that_is_not_released_is_free_again() {
        let pool = pool(4, HugePages::Never);
        drop(pool.withhold(3 * MIB));
        assert_eq!(check_sums(&pool).free_bytes, 4 * MIB);
        let withheld = pool.withhold(MIB + 1);
        assert_eq!(withheld.bytes(), MIB + 4096, "whole pages");
        let file = pool.region().host().expect("host memory").file().try_clone();
        drop(pool);
        drop(withheld);
        drop(file);
    }

    /// Such as a client that registers all of the region with a GPU.
    #[test]
    fn memory_that_another_process_has_allocated_again_goes_back_again() {
        let pool = pool(8, HugePages::Never);
        pool.withhold(6 * MIB).release().expect("the kernel punches holes");
        assert!(allocated(&pool) < 3 * MIB);
        let host = pool.region().host().expect("host memory");
        let flags = rustix::fs::FallocateFlags::empty();
        rustix::fs::fallocate(host.file(), flags, 0, 8 << 20).expect("8 MiB are there");
        assert!(allocated(&pool) >= 8 * MIB);
        pool.release_again().expect("the kernel punches holes");
        assert!(allocated(&pool) < 3 * MIB);
        assert_eq!(check_sums(&pool).capacity_bytes, 2 * MIB);
    }

    #[test]
    fn a_pinned_pool_keeps_its_size() {
        let pool = pool(4, HugePages::Never);
        pool.withhold(MIB).release().expect("it is not pinned yet");
        pool.pin();
        assert!(matches!(pool.check_resizable(), Err(MemoryError::Pinned)));
        assert_eq!(pool.capacity_bytes(), 3 * MIB);
        assert!(matches!(pool.restore(MIB), Err(MemoryError::Pinned)));
    }
}
