//! Registers the pool's memory as fixed buffers of the rings, so that it is pinned once and not for
//! each transfer.
#![expect(unsafe_code, reason = "hands the pool's region to the kernel by address")]

use std::fmt;
use std::io;
use std::os::fd::AsRawFd as _;
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};

use cascade_memory::Pool;
use io_uring::IoUring;

use super::io_vec::IoVec;

/// Maximum length of a fixed buffer in the kernel.
const BUFFER_BYTES_MAX: usize = 1 << 30;

const HUGE_PAGE_BYTES: usize = 2 << 20;

/// The pool's region, registered with a ring that has no other use. Other rings share the
/// registration.
pub(super) struct FixedBuffers {
    owner_ring: IoUring,
    /// Keeps the region alive for every ring that uses it.
    pool: Pool,
    /// Set before memory of the pool is given back to the system. A ring in use keeps the pages
    /// that were registered; the pool has others when it gets that memory again.
    has_ended: AtomicBool,
}

impl FixedBuffers {
    /// Registers the pool's region if all of it is in huge pages and the kernel allows it.
    ///
    /// Ordinary pages are not registered: they are pinned one by one, which takes seconds, and
    /// pages that were never touched would be allocated. Memory of a device is never registered.
    pub(super) fn register(pool: &Pool) -> Option<Self> {
        let region = pool.region().host()?;
        let huge_bytes = region.bytes() / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
        if region.pages().huge_bytes < huge_bytes {
            return None;
        }
        let io_vecs: Vec<_> = (0..region.bytes())
            .step_by(BUFFER_BYTES_MAX)
            .map(|offset| IoVec {
                base: region.base().as_ptr().wrapping_add(offset),
                bytes: BUFFER_BYTES_MAX.min(region.bytes() - offset),
            })
            .collect();
        let owner_ring = IoUring::new(1).ok()?;
        // SAFETY: `IoVec` has the layout of `iovec`; the list lives until the call has returned.
        let vectors = unsafe { slice::from_raw_parts(io_vecs.as_ptr().cast(), io_vecs.len()) };
        // SAFETY: the vectors point into the pool's mapping. `pool`, which is stored with every
        // ring that shares them, keeps it mapped. The kernel accesses only memory that a transfer
        // names, and an `InFlightTransfer` owns that memory until the transfer has ended.
        let registered = unsafe { owner_ring.submitter().register_buffers(vectors) };
        // `RLIMIT_MEMLOCK` or the maximum number of buffers is exceeded: transfers work without
        // registration.
        registered.ok()?;
        Some(Self { owner_ring, pool: pool.clone(), has_ended: AtomicBool::new(false) })
    }

    /// Shares the registered buffers with another ring.
    pub(super) fn share_with(&self, ring: &IoUring) -> io::Result<()> {
        ring.submitter().register_buffers_clone(self.owner_ring.as_raw_fd())
    }

    /// No transfer that starts from now on uses the registration.
    pub(super) fn end(&self) {
        // Relaxed, also below: the lock of the pool orders this before the allocation of every slab
        // that is made in memory which the pool has got again.
        self.has_ended.store(true, Ordering::Relaxed);
    }

    /// The index of the buffer that contains a piece of memory, if one does.
    pub(super) fn index_of(&self, io_vec: &IoVec) -> Option<u16> {
        if self.has_ended.load(Ordering::Relaxed) {
            return None;
        }
        let region = self.pool.region().host()?;
        let start = io_vec.base.addr().checked_sub(region.base().as_ptr().addr())?;
        let last = start.checked_add(io_vec.bytes.checked_sub(1)?)?;
        // A piece that extends over two fixed buffers belongs to neither.
        let index = start / BUFFER_BYTES_MAX;
        let is_inside = last < region.bytes() && last / BUFFER_BYTES_MAX == index;
        is_inside.then(|| u16::try_from(index).ok()).flatten()
    }
}

impl fmt::Debug for FixedBuffers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FixedBuffers").field("pool", &self.pool).finish_non_exhaustive()
    }
}
