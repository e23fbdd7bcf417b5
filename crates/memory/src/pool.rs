//! The pool: hands out slabs of one region and takes them back.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use thiserror::Error;

use crate::heap::{Extent, Heap};
use crate::magazine::Magazines;
use crate::{HugePages, PoolFiles, Region, SlabMut};

/// Offsets and lengths of slabs that the kernel may read into directly are multiples of this.
pub const DIRECT_ALIGN: usize = 4096;

/// What is zeroed between two looks at the time.
const WIPE_STEP_BYTES: usize = 16 << 20;
/// What every slab's offset and length are multiples of.
const GRANULE_MIN: usize = 64;

/// Misses of the magazines after which their sizes are chosen anew.
const UNSERVED_MAX: usize = 4096;

/// How to make a pool.
#[derive(Debug, Clone)]
pub struct PoolConfig {
    /// Size of the region. Rounded up to a page. Minimum: one page.
    pub capacity_bytes: usize,
    /// Whether to ask for huge pages.
    pub huge_pages: HugePages,
    /// Whether to touch every page now rather than at first use.
    pub populate: bool,
}

/// What the pool holds. `reserved + magazine + free = capacity` whenever nobody is using it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PoolStats {
    /// Size of the region.
    pub capacity_bytes: usize,
    /// Bytes that slabs asked for.
    pub requested_bytes: usize,
    /// Bytes that slabs hold, rounding included.
    pub reserved_bytes: usize,
    /// Free bytes kept ready for the sizes in use; they go back to the heap when it needs them.
    pub magazine_bytes: usize,
    /// Free bytes in the heap.
    pub free_bytes: usize,
    /// The largest piece of the heap that is free in a row.
    pub largest_free_bytes: usize,
    /// Bytes backed by huge pages, as the kernel reports it.
    pub huge_bytes: usize,
}

/// Why a pool could not be made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The kernel refused the mapping.
    #[error("cannot map a pool of {bytes} bytes of shared memory")]
    Map {
        /// Size that was asked for.
        bytes: usize,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// Populating the pool would get a process killed.
    #[error(
        "a pool of {bytes} bytes does not fit: the machine has {available_bytes} bytes of memory \
         available; make the pool smaller or free memory"
    )]
    NotEnough {
        /// Size that was asked for.
        bytes: usize,
        /// What the kernel says is available.
        available_bytes: usize,
    },
    /// A pool's file could not be worked with.
    #[error("cannot {operation} {path}")]
    Named {
        /// What was tried.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// A pool's file could not be reserved in full.
    #[error(
        "cannot reserve {bytes} bytes for {path}: make the pool smaller or its file system larger"
    )]
    NotReserved {
        /// The file.
        path: PathBuf,
        /// Size that was asked for.
        bytes: usize,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// Another store has the pool's files.
    #[error("{path} is in use by another store: stop that one or give this one another name")]
    InUse {
        /// The file that is locked.
        path: PathBuf,
    },
    /// The pool's file cannot be trusted.
    #[error("{path} is not taken for a pool: {reason}; remove it or give another name")]
    NotOurs {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A pool of nothing.
    #[error("a pool has at least one page of 4096 bytes")]
    Empty,
}

/// Hands out slabs. Clones share the same memory.
///
/// Sizes are rounded up: below 4 KiB to 64 bytes, below 64 KiB to 512, above to 4 KiB, and a slab
/// starts at a multiple of what its size is rounded to.
#[derive(Debug, Clone)]
pub struct Pool(pub(crate) Arc<PoolInner>);

pub(crate) struct PoolInner {
    pub(crate) region: Region,
    magazines: Magazines,
    heap: Mutex<Heap>,
    counters: Counters,
    /// Raised by every wipe: slabs of an earlier epoch are zeroed when they come back.
    epoch: AtomicUsize,
}

/// What wiping the free memory of a pool came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Wiped {
    /// Free bytes that hold zeroes now.
    pub zeroed_bytes: usize,
    /// Free bytes that were left as they were because time ran out.
    pub left_bytes: usize,
    /// Bytes in slabs that are held. Those taken before the last [`Pool::begin_wipe`] are zeroed
    /// when they come back.
    pub held_bytes: usize,
}

/// Written by every call, so kept off the cache lines that every call only reads.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Counters {
    requested: AtomicUsize,
    reserved: AtomicUsize,
    /// Calls that found no magazine for their size since the magazines were last emptied.
    unserved: AtomicUsize,
}

impl Pool {
    /// Maps a region and prepares it.
    pub fn new(config: &PoolConfig) -> Result<Self, MemoryError> {
        Region::map(config).map(Self::of_region)
    }

    /// Maps a pool that has a name; its size is the files'.
    ///
    /// # Errors
    /// The machine has not the memory, or the kernel refuses.
    pub fn of_files(config: &PoolConfig, files: &PoolFiles) -> Result<Self, MemoryError> {
        let bytes = files.pool_bytes();
        let refused = |source| MemoryError::Map { bytes, source };
        Region::of_files(config, files).map(Self::of_region).map_err(refused)
    }

    fn of_region(region: Region) -> Self {
        let capacity = region.bytes();
        Self(Arc::new(PoolInner {
            region,
            magazines: Magazines::new(capacity),
            heap: Mutex::new(Heap::new(capacity)),
            counters: Counters::default(),
            epoch: AtomicUsize::new(0),
        }))
    }

    /// The slab of `len` bytes that an earlier run of this pool had there, its bytes as they are;
    /// nothing if that cannot have been one or if part of it is taken. To be called before anything
    /// is allocated.
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

    /// A slab of that many bytes, or nothing when no free piece is large enough.
    ///
    /// Its bytes are whatever was there before; whoever takes it writes all of them. Takes no lock
    /// while the magazine of this size has a piece.
    pub fn allocate(&self, bytes: usize) -> Option<SlabMut> {
        self.allocate_rounded(bytes, granule(bytes))
    }

    /// A slab that starts at a multiple of [`DIRECT_ALIGN`] and whose rounded length
    /// ([`SlabMut::padded_mut`]) is one too, so that `O_DIRECT` may read into it.
    ///
    /// The same as [`Pool::allocate`] for 64 KiB and more.
    pub fn allocate_direct(&self, bytes: usize) -> Option<SlabMut> {
        self.allocate_rounded(bytes, DIRECT_ALIGN)
    }

    /// The region that all slabs lie in, to register it with the kernel.
    pub fn region(&self) -> &Region {
        &self.0.region
    }

    /// What the pool holds now; while others use it, each figure may be of another moment.
    pub fn stats(&self) -> PoolStats {
        let heap = self.0.lock_heap();
        let capacity_bytes = self.0.region.bytes();
        let reserved_bytes = self.0.counters.reserved.load(Ordering::Relaxed);
        PoolStats {
            capacity_bytes,
            requested_bytes: self.0.counters.requested.load(Ordering::Relaxed),
            reserved_bytes,
            magazine_bytes: (capacity_bytes - heap.free_bytes()).saturating_sub(reserved_bytes),
            free_bytes: heap.free_bytes(),
            largest_free_bytes: heap.largest_free_bytes(),
            huge_bytes: self.0.region.pages().huge_bytes,
        }
    }

    /// Moves all free pieces back to the heap, so that large ones can be cut again.
    ///
    /// [`Pool::allocate`] does this itself before it gives up.
    pub fn compact(&self) {
        self.0.drain_magazines(&mut self.0.lock_heap());
    }

    /// From now on every slab that was taken before is zeroed when it comes back.
    pub fn begin_wipe(&self) {
        // SeqCst, as where it is read: a slab that comes back after this has returned sees it.
        self.0.epoch.fetch_add(1, Ordering::SeqCst);
    }

    /// Zeroes all that is free, until `may_go_on` says no; it is asked every 16 MiB.
    ///
    /// What is being zeroed is not free meanwhile, so [`Pool::allocate`] finds less. Nothing of
    /// earlier blocks is left in the pool if no bytes are left, and none held, after a
    /// [`Pool::begin_wipe`].
    pub fn wipe(&self, may_go_on: &mut dyn FnMut() -> bool) -> Wiped {
        // Read before the free pieces are taken: a slab is counted as held until it is free.
        let held_bytes = self.0.counters.reserved.load(Ordering::Acquire);
        let mut wiped = Wiped { held_bytes, ..Wiped::default() };
        for mut piece in self.take_all_free() {
            for step in piece.padded_mut().chunks_mut(WIPE_STEP_BYTES) {
                if wiped.left_bytes > 0 || !may_go_on() {
                    wiped.left_bytes += step.len();
                } else {
                    step.fill(0);
                    wiped.zeroed_bytes += step.len();
                }
            }
        }
        wiped
    }

    fn take_all_free(&self) -> Vec<SlabMut> {
        let mut heap = self.0.lock_heap();
        self.0.drain_magazines(&mut heap);
        let mut pieces = Vec::new();
        while heap.largest_free_bytes() > 0 {
            let bytes = heap.largest_free_bytes();
            let Some(extent) = heap.take(bytes, granule(0)) else { break };
            pieces.push(self.slab(extent, bytes, self.0.epoch.load(Ordering::SeqCst)));
        }
        pieces
    }

    fn allocate_rounded(&self, bytes: usize, granule: usize) -> Option<SlabMut> {
        // Read before the piece is taken: one that a wipe passed by must not count as newer.
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
    /// Takes a slab's piece back; `requested` is what it was counted with.
    pub(crate) fn release(&self, extent: Extent, requested: usize) {
        let bytes = extent.bytes;
        if let Err(extent) = self.magazines.push(extent) {
            let mut heap = self.lock_heap();
            self.magazines.drain_half(extent.bytes, |extent| heap.give_back(extent));
            heap.give_back(extent);
        }
        self.counters.requested.fetch_sub(requested, Ordering::Relaxed);
        // Last, and Release: who sees that nothing is held finds all of it free, and wipes it.
        self.counters.reserved.fetch_sub(bytes, Ordering::Release);
    }

    /// Whether a wipe began after a slab of that epoch was taken.
    pub(crate) fn is_wiped_since(&self, epoch: usize) -> bool {
        self.epoch.load(Ordering::SeqCst) != epoch
    }

    /// A slab gave up part of what it had asked for.
    pub(crate) fn uncount_requested(&self, bytes: usize) {
        self.counters.requested.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn take(&self, bytes: usize, align: usize) -> Option<Extent> {
        while let Some(extent) = self.magazines.pop(bytes) {
            // A magazine is shared by pieces of one length but, between `allocate` and
            // `allocate_direct`, perhaps of two alignments.
            if extent.bytes == bytes && extent.offset.is_multiple_of(align) {
                return Some(extent);
            }
            self.lock_heap().give_back(extent);
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
        // Under the lock, so that two callers who drain at once both see all that was drained.
        self.drain_magazines(&mut heap);
        heap.take(bytes, align)
    }

    /// Moves more pieces of that size into its magazine while the heap is locked anyway.
    fn refill(&self, heap: &mut Heap, bytes: usize, align: usize) {
        if !self.magazines.claim(bytes) {
            // Relaxed: the count only decides when to look for better sizes.
            let unserved = self.counters.unserved.fetch_add(1, Ordering::Relaxed);
            if unserved >= UNSERVED_MAX {
                self.drain_magazines(heap);
            }
            return;
        }
        for _ in 0..self.magazines.limit(bytes) / 2 {
            let Some(extent) = heap.take(bytes, align) else { return };
            if let Err(extent) = self.magazines.push(extent) {
                heap.give_back(extent);
                return;
            }
        }
    }

    fn drain_magazines(&self, heap: &mut Heap) {
        self.magazines.drain(|extent| heap.give_back(extent));
        self.counters.unserved.store(0, Ordering::Relaxed);
    }

    /// The heap is changed in steps that do not panic, so a poisoned lock still guards a sound one.
    fn lock_heap(&self) -> MutexGuard<'_, Heap> {
        self.heap.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for PoolInner {
    fn drop(&mut self) {
        let heap = self.heap.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.magazines.drain(|extent| heap.give_back(extent));
        let whole = heap.largest_free_bytes() == self.region.bytes();
        debug_assert!(whole || std::thread::panicking(), "slabs hold the pool, so all came back");
    }
}

impl fmt::Debug for PoolInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolInner").field("region", &self.region).finish_non_exhaustive()
    }
}

/// What a size is rounded up and aligned to.
fn granule(bytes: usize) -> usize {
    match bytes {
        0..4096 => GRANULE_MIN,
        4096..65_536 => 512,
        _ => DIRECT_ALIGN,
    }
}
