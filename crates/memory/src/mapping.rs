//! Reserved address space with a mapping of a file inside it.
#![expect(unsafe_code, reason = "maps memory, and unmaps it on drop")]

use std::io;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::thread;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use crate::pages::{self, HUGE_PAGE};

/// Maximum number of threads that collapse huge pages; with more, memory bandwidth is the limit.
const COLLAPSE_THREADS_MAX: usize = 16;

/// Minimum bytes per thread.
const COLLAPSE_BYTES_MIN: usize = 256 << 20;

/// Reserved address space from `start`, with the mapping at `base` inside it. Unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    reserved_bytes: usize,
    base: NonNull<u8>,
    bytes: usize,
    /// The process that has the mapping, if forked children do not have it.
    process: Option<u32>,
}

// SAFETY: the mapping is plain memory without thread affinity; it is unmapped once, on drop.
unsafe impl Send for Mapping {}
// SAFETY: a shared Mapping gives out only addresses; access through them is argued by the slabs.
unsafe impl Sync for Mapping {}

/// Protection of a node's mapping of its own pool.
pub(crate) const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

impl Mapping {
    pub(crate) fn of_file(file: impl AsFd, bytes: usize, prot: ProtFlags) -> io::Result<Self> {
        // Huge pages need an aligned address, which the kernel chooses only for some mappings.
        let reserved_bytes = bytes.checked_add(HUGE_PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let start =
            unsafe { mmap_anonymous(ptr::null_mut(), reserved_bytes, ProtFlags::empty(), flags) }?;
        let start = NonNull::new(start.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let skip = start.as_ptr().addr().next_multiple_of(HUGE_PAGE) - start.as_ptr().addr();
        // SAFETY: `skip` is below HUGE_PAGE, which the reservation has on top of `bytes`.
        let base = unsafe { start.add(skip) };
        // From here on the reservation is unmapped on every return.
        let mapping = Self { start, reserved_bytes, base, bytes, process: None };
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: replaces part of the reservation above, whose address no other code has.
        unsafe { mmap(base.as_ptr().cast(), bytes, prot, flags, file, 0) }?;
        Ok(mapping)
    }

    /// Excludes this mapping from children that are forked from now on.
    pub(crate) fn exclude_from_children(&mut self) -> io::Result<()> {
        let start = self.start.as_ptr().cast();
        // SAFETY: the range is the reservation of this mapping; the advice changes no contents.
        unsafe { madvise(start, self.reserved_bytes, Advice::LinuxDontFork) }?;
        self.process = Some(std::process::id());
        Ok(())
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Mapping {
    /// Collapses huge pages with several threads: one clears at most 8 GiB/s.
    ///
    /// A fresh mapping holds no data; any other is populated and keeps its contents.
    pub(crate) fn collapse(&mut self, is_fresh: bool) -> io::Result<()> {
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let piece = self.bytes.div_ceil(threads.min(COLLAPSE_THREADS_MAX));
        let piece = piece.max(COLLAPSE_BYTES_MIN).next_multiple_of(HUGE_PAGE);
        let whole = &*self;
        thread::scope(|scope| {
            let pieces = (0..whole.bytes).step_by(piece);
            let workers: Vec<_> = pieces
                .map(|offset| scope.spawn(move || whole.collapse_piece(offset, piece, is_fresh)))
                .collect();
            let results = workers.into_iter().map(|worker| {
                worker.join().unwrap_or_else(|_| Err(io::Error::other("a worker panicked")))
            });
            // Joins all threads and returns the first error.
            results.fold(Ok(()), io::Result::and)
        })
    }

    fn collapse_piece(&self, offset: usize, piece: usize, is_fresh: bool) -> io::Result<()> {
        // SAFETY: `collapse` steps inside the mapping.
        let base = unsafe { self.base.add(offset) };
        let bytes = piece.min(self.bytes - offset);
        if is_fresh {
            // SAFETY: the piece is cut at the mapping's end; `collapse` has `&mut self` and gives
            // each worker a piece of its own, and no slab was made yet.
            unsafe { pages::touch(base, bytes) };
        }
        // SAFETY: the piece lies inside the mapping.
        unsafe { pages::collapse(base, bytes) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.process.is_some_and(|process| process != std::process::id()) {
            // The child does not have this mapping; another one may be at these addresses.
            return;
        }
        // SAFETY: the reservation was made in `of_file` and covers the mapping; slabs hold the
        // pool, which holds the region and this, so nothing points into it any more.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.reserved_bytes) };
        debug_assert!(unmapped.is_ok(), "unmapping our own mapping");
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_is_excluded_from_children() {
        let file = rustix::fs::memfd_create("cascade-test", rustix::fs::MemfdFlags::CLOEXEC);
        let file = file.expect("the kernel has memory files");
        rustix::fs::ftruncate(&file, 1 << 20).expect("it can be sparse");
        let mapping = Mapping::of_file(&file, 1 << 20, ProtFlags::READ);
        let mut mapping = mapping.expect("it can be mapped");
        mapping.exclude_from_children().expect("the kernel knows the advice");
        let smaps = std::fs::read_to_string("/proc/self/smaps").expect("there is /proc");
        let start = format!("{:x}-", mapping.base().as_ptr().addr());
        let ours = smaps.split_once(&start).expect("it is mapped").1;
        let flags = ours.lines().find(|line| line.starts_with("VmFlags:"));
        assert!(flags.is_some_and(|flags| flags.contains(" dc")), "{flags:?}");
    }
}
