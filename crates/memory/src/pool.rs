//! The pool: allocates slabs of one region and frees them when they are dropped.

mod resize;
mod slab;

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};

use cascade_runtime::LeafMutex;

use self::resize::Resize;
use crate::heap::{Extent, Heap};
use crate::magazine::Magazines;
use crate::{DeviceMemory, HostRegion, MemoryError, PoolConfig, PoolFiles, Region, RegionKind};

pub use resize::WithheldMemory;
pub use slab::{Attachment, BackingMemory, HostSlab, HostSlabMut, Lender, Slab, SlabMut};

/// Alignment of offset and length of slabs for direct I/O.
pub const DIRECT_ALIGN: usize = 4096;

/// Bytes zeroed between two checks of whether to continue.
const WIPE_STEP_BYTES: usize = 16 << 20;
/// Alignment of every slab's offset and length.
const GRANULE_MIN: usize = 64;

/// Magazine misses after which all magazines are drained and their sizes are chosen again.
const UNSERVED_MAX: usize = 4096;

/// Memory use of the pool. `reserved + magazine + free = capacity` while no call is in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PoolStats {
    /// Size of the region, less what was given back to the system.
    pub capacity_bytes: usize,
    /// Bytes requested by slabs.
    pub requested_bytes: usize,
    /// Bytes that slabs hold, rounding included.
    pub reserved_bytes: usize,
    /// Free bytes cached for the sizes in use; the heap takes them when it runs out.
    pub magazine_bytes: usize,
    /// Free bytes in the heap.
    pub free_bytes: usize,
    /// The largest contiguous free piece of the heap.
    pub largest_free_bytes: usize,
    /// Bytes backed by huge pages, as the kernel reports it.
    pub huge_bytes: usize,
}

/// Allocates slabs. Clones share the same memory.
///
/// Sizes are rounded up to a granule: 64 bytes below 4 KiB, 512 bytes below 64 KiB, 4 KiB above. A
/// slab is aligned to its granule.
#[derive(Debug, Clone)]
pub struct Pool(pub(crate) Arc<PoolInner>);

pub(crate) struct PoolInner {
    pub(crate) region: Region,
    magazines: Magazines,
    heap: LeafMutex<Heap>,
    counters: PoolCounters,
    /// Incremented by every wipe: slabs of an earlier epoch are zeroed when they are freed.
    epoch: AtomicUsize,
    /// Pieces that a device did not zero when they were freed after a wipe. They still count as
    /// reserved, and the next wipe takes them.
    unzeroed: LeafMutex<Vec<Extent>>,
    /// Tokens of watched slabs that lost their other holders.
    released: LeafMutex<VecDeque<usize>>,
    /// Length of `released`, to be read without the lock.
    released_count: AtomicUsize,
    resize: Resize,
}

/// The result of wiping a pool's free memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WipeReport {
    /// Free bytes that were zeroed.
    pub zeroed_bytes: usize,
    /// Free bytes that were not zeroed because time ran out.
    pub unwiped_bytes: usize,
    /// Bytes of slabs in use. Slabs allocated before the last [`Pool::begin_wipe`] are zeroed when
    /// they are freed.
    pub held_bytes: usize,
}

/// Written by every call, so kept on other cache lines than fields that calls only read.
#[derive(Debug, Default)]
#[repr(align(128))]
struct PoolCounters {
    requested: AtomicUsize,
    reserved: AtomicUsize,
    /// Calls without a magazine for their size since the magazines were last drained.
    unserved: AtomicUsize,
}

impl Pool {
    /// Maps host memory and populates it as configured.
    pub fn new(config: &PoolConfig) -> Result<Self, MemoryError> {
        HostRegion::map(config).map(|host| Self::of_region(Region::of_host(host)))
    }

    /// A pool of all of a device's memory.
    ///
    /// # Errors
    /// If it has no memory.
    pub fn of_device(device: Arc<dyn DeviceMemory>) -> Result<Self, MemoryError> {
        Region::of_device(device).map(Self::of_region)
    }

    /// Maps a named pool. Its size is that of the file.
    ///
    /// # Errors
    /// If memory is short or the kernel refuses.
    pub fn of_files(config: &PoolConfig, files: &PoolFiles) -> Result<Self, MemoryError> {
        let bytes = files.pool_bytes();
        let refused = |source| MemoryError::Map { bytes, source };
        let host = HostRegion::of_files(config, files).map_err(refused)?;
        Ok(Self::of_region(Region::of_host(host)))
    }

    fn of_region(region: Region) -> Self {
        let capacity = region.bytes();
        let resize = Resize::of(&region);
        Self(Arc::new(PoolInner {
            region,
            magazines: Magazines::new(capacity),
            heap: LeafMutex::new(Heap::new(capacity)),
            counters: PoolCounters::default(),
            epoch: AtomicUsize::new(0),
            unzeroed: LeafMutex::default(),
            released: LeafMutex::default(),
            released_count: AtomicUsize::new(0),
            resize,
        }))
    }

    /// Recovers a slab of `len` bytes that an earlier run of this pool allocated here; its bytes
    /// are unchanged. `None` if the range is misaligned or partly allocated. Call it before
    /// anything is allocated.
    pub fn adopt(&self, offset: usize, reserved_bytes: usize, len: usize) -> Option<SlabMut> {
        let is_slab = [offset, reserved_bytes].iter().all(|it| it.is_multiple_of(GRANULE_MIN));
        if len > reserved_bytes || !is_slab {
            return None;
        }
        let extent = self.0.lock_heap().take_at(offset, reserved_bytes)?;
        // Relaxed: plain counters, read for statistics.
        self.0.counters.requested.fetch_add(len, Ordering::Relaxed);
        self.0.counters.reserved.fetch_add(reserved_bytes, Ordering::Relaxed);
        let epoch = self.0.epoch.load(Ordering::SeqCst);
        Some(SlabMut::new(Arc::clone(&self.0), extent, len, epoch))
    }

    /// Allocates a slab, or returns `None` if no free piece is large enough.
    ///
    /// Its bytes are arbitrary: the caller writes all of them. Takes no lock while the magazine of
    /// this size has a piece.
    pub fn allocate(&self, bytes: usize) -> Option<SlabMut> {
        self.allocate_rounded(bytes, granule(bytes))
    }

    /// Allocates a slab for `O_DIRECT`: its offset and its reserved length are multiples of
    /// [`DIRECT_ALIGN`]. See [`SlabMut::padded_host_mut`].
    ///
    /// The same as [`Pool::allocate`] for 64 KiB and more.
    pub fn allocate_direct(&self, bytes: usize) -> Option<SlabMut> {
        self.allocate_rounded(bytes, DIRECT_ALIGN)
    }

    /// Whether its slabs are in host memory.
    pub fn kind(&self) -> RegionKind {
        self.0.region.kind()
    }

    /// The region of all slabs, for registration with the kernel.
    pub fn region(&self) -> &Region {
        &self.0.region
    }

    /// Current memory use. Not a consistent snapshot while other threads use the pool.
    pub fn stats(&self) -> PoolStats {
        let heap = self.0.lock_heap();
        let capacity_bytes = self.capacity_bytes();
        let reserved_bytes = self.0.counters.reserved.load(Ordering::Relaxed);
        PoolStats {
            capacity_bytes,
            requested_bytes: self.0.counters.requested.load(Ordering::Relaxed),
            reserved_bytes,
            // Saturating, because other threads change the counter meanwhile.
            magazine_bytes: capacity_bytes.saturating_sub(heap.free_bytes() + reserved_bytes),
            free_bytes: heap.free_bytes(),
            largest_free_bytes: heap.largest_free_bytes(),
            huge_bytes: self.0.resize.huge_bytes(),
        }
    }

    /// Appends up to `most` tokens of watched slabs that lost their other holders, oldest first.
    /// Returns whether there are more. See [`crate::Slab::watch`].
    pub fn take_released(&self, most: usize, tokens: &mut Vec<usize>) -> bool {
        // Relaxed: a token that is missed here is found by the next call.
        if self.0.released_count.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let mut released = self.0.released.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = released.len().min(most);
        tokens.extend(released.drain(..taken));
        self.0.released_count.store(released.len(), Ordering::Relaxed);
        !released.is_empty()
    }

    /// Moves all cached free pieces back to the heap, so that they merge into large ones.
    ///
    /// [`Pool::allocate`] does this before it returns `None`.
    pub fn compact(&self) {
        self.0.drain_magazines(&mut self.0.lock_heap());
    }

    /// Every slab that is allocated now is zeroed when it is freed.
    pub fn begin_wipe(&self) {
        // SeqCst, as where it is read: a slab that is freed after this call returns sees it.
        self.0.epoch.fetch_add(1, Ordering::SeqCst);
    }

    /// Zeroes all free memory until `may_continue`, called every 16 MiB, returns false.
    ///
    /// Memory that is being zeroed is not free meanwhile, so [`Pool::allocate`] finds less. After a
    /// [`Pool::begin_wipe`], the pool has no bytes of earlier blocks if the result has neither
    /// remaining nor held bytes. Ends early if a device cannot zero its memory.
    pub fn wipe(&self, may_continue: &mut dyn FnMut() -> bool) -> WipeReport {
        // Read before the free pieces are taken: a slab freed in between is counted twice rather
        // than not at all.
        let held_bytes = self.0.counters.reserved.load(Ordering::Acquire);
        let mut wiped = WipeReport { held_bytes, ..WipeReport::default() };
        for mut piece in self.take_all_free() {
            let reserved_bytes = piece.reserved_bytes();
            for start in (0..reserved_bytes).step_by(WIPE_STEP_BYTES) {
                let bytes = WIPE_STEP_BYTES.min(reserved_bytes - start);
                let is_zeroed = wiped.unwiped_bytes == 0
                    && may_continue()
                    && piece.zero(start..start + bytes).is_ok();
                let count =
                    if is_zeroed { &mut wiped.zeroed_bytes } else { &mut wiped.unwiped_bytes };
                *count += bytes;
            }
        }
        wiped
    }

    fn take_all_free(&self) -> Vec<SlabMut> {
        let mut heap = self.0.lock_heap();
        self.0.drain_magazines(&mut heap);
        let mut pieces = Vec::new();
        for extent in self.0.take_unzeroed() {
            // Counted as reserved until now, and again as a slab.
            self.0.counters.reserved.fetch_sub(extent.bytes, Ordering::Relaxed);
            let (bytes, epoch) = (extent.bytes, self.0.epoch.load(Ordering::SeqCst));
            pieces.push(self.slab(extent, bytes, epoch));
        }
        while heap.largest_free_bytes() > 0 {
            let bytes = heap.largest_free_bytes();
            let Some(extent) = heap.take(bytes, granule(0)) else { break };
            // The current epoch: `wipe` zeroes these pieces itself, so their drop need not.
            pieces.push(self.slab(extent, bytes, self.0.epoch.load(Ordering::SeqCst)));
        }
        pieces
    }

    fn allocate_rounded(&self, bytes: usize, granule: usize) -> Option<SlabMut> {
        // Read before the piece is taken: a piece that a concurrent wipe skipped must not get the
        // wipe's epoch.
        let epoch = self.0.epoch.load(Ordering::SeqCst);
        let reserved = bytes.max(1).checked_next_multiple_of(granule)?;
        let extent = self.0.take(reserved, granule)?;
        debug_assert!(extent.bytes == reserved && extent.offset.is_multiple_of(granule));
        Some(self.slab(extent, bytes, epoch))
    }

    fn slab(&self, extent: Extent, bytes: usize, epoch: usize) -> SlabMut {
        // Relaxed: plain counters, read for statistics.
        self.0.counters.requested.fetch_add(bytes, Ordering::Relaxed);
        self.0.counters.reserved.fetch_add(extent.bytes, Ordering::Relaxed);
        SlabMut::new(Arc::clone(&self.0), extent, bytes, epoch)
    }
}

impl PoolInner {
    /// Reports that a watched slab has one holder left. Each slab is reported once for each watch,
    /// so that there are fewer reports than slabs.
    pub(crate) fn report_release(&self, token: usize) {
        let mut released = self.released.lock().unwrap_or_else(PoisonError::into_inner);
        released.push_back(token);
        self.released_count.store(released.len(), Ordering::Relaxed);
    }

    /// Frees a slab's piece; `requested` is the requested length that it was counted with.
    pub(crate) fn release(&self, extent: Extent, requested: usize) {
        let bytes = extent.bytes;
        if let Err(extent) = self.magazines.push(extent) {
            let mut heap = self.lock_heap();
            // Several at once, so that the next releases need no lock.
            self.magazines.drain_some(extent.bytes, |extent| heap.free(extent));
            heap.free(extent);
        }
        self.counters.requested.fetch_sub(requested, Ordering::Relaxed);
        // Last, and Release (paired with the Acquire in `wipe`): a wipe that sees zero held bytes
        // finds every piece free.
        self.counters.reserved.fetch_sub(bytes, Ordering::Release);
    }

    /// Keeps a piece that a device did not zero, so that no other block gets it; `requested` is as
    /// for `release`.
    pub(crate) fn keep_unzeroed(&self, extent: Extent, requested: usize) {
        self.unzeroed.lock().unwrap_or_else(PoisonError::into_inner).push(extent);
        self.counters.requested.fetch_sub(requested, Ordering::Relaxed);
    }

    fn take_unzeroed(&self) -> Vec<Extent> {
        std::mem::take(&mut *self.unzeroed.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether a wipe began after a slab of this epoch was allocated.
    pub(crate) fn is_wiped_since(&self, epoch: usize) -> bool {
        self.epoch.load(Ordering::SeqCst) != epoch
    }

    /// A slab was shortened.
    pub(crate) fn uncount_requested(&self, bytes: usize) {
        self.counters.requested.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn take(&self, bytes: usize, align: usize) -> Option<Extent> {
        while let Some(extent) = self.magazines.pop(bytes) {
            // A magazine's pieces have one length but, because `allocate` and `allocate_direct`
            // share it, possibly two alignments.
            if extent.bytes == bytes && extent.offset.is_multiple_of(align) {
                return Some(extent);
            }
            self.lock_heap().free(extent);
        }
        self.take_from_heap(bytes, align)
    }

    fn take_from_heap(&self, bytes: usize, align: usize) -> Option<Extent> {
        let mut heap = self.lock_heap();
        if bytes > self.region.bytes() {
            return None;
        }
        if let Some(extent) = heap.take(bytes, align) {
            self.refill(&mut heap, bytes, align);
            return Some(extent);
        }
        // Under the lock, so that two callers that drain at once both see every drained piece.
        self.drain_magazines(&mut heap);
        heap.take(bytes, align)
    }

    /// Moves more pieces of this size into its magazine while the heap is locked anyway.
    fn refill(&self, heap: &mut Heap, bytes: usize, align: usize) {
        if !self.magazines.claim(bytes) {
            // Relaxed: the count only decides when to choose new sizes.
            let unserved = self.counters.unserved.fetch_add(1, Ordering::Relaxed);
            if unserved >= UNSERVED_MAX {
                self.drain_magazines(heap);
            }
            return;
        }
        for _ in 0..self.magazines.moved(bytes) {
            let Some(extent) = heap.take(bytes, align) else { return };
            if let Err(extent) = self.magazines.push(extent) {
                heap.free(extent);
                return;
            }
        }
    }

    fn drain_magazines(&self, heap: &mut Heap) {
        self.magazines.drain(|extent| heap.free(extent));
        self.counters.unserved.store(0, Ordering::Relaxed);
    }

    /// Changes of the heap do not panic halfway, so it is consistent even behind a poisoned lock.
    fn lock_heap(&self) -> MutexGuard<'_, Heap> {
        self.heap.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for PoolInner {
    fn drop(&mut self) {
        let mut unzeroed = self.take_unzeroed();
        unzeroed.append(&mut self.resize.take_all());
        let heap = self.heap.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.magazines.drain(|extent| heap.free(extent));
        for extent in unzeroed {
            heap.free(extent);
        }
        let whole = heap.largest_free_bytes() == self.region.bytes();
        debug_assert!(whole || std::thread::panicking(), "slabs hold the pool, so all are freed");
    }
}

impl fmt::Debug for PoolInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolInner").field("region", &self.region).finish_non_exhaustive()
    }
}

/// Granule to which a size is rounded up and aligned.
fn granule(bytes: usize) -> usize {
    match bytes {
        0..4096 => GRANULE_MIN,
        4096..65_536 => 512,
        _ => DIRECT_ALIGN,
    }
}
