//! One shared mapping, of anonymous memory or of a file in memory, addressed by offset.
#![expect(unsafe_code, reason = "maps memory and hands out pointers into it")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::thread;

use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, SealFlags, fallocate, fchmod, fcntl_add_seals, ftruncate,
    memfd_create,
};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use crate::fault::Watch;
use crate::named::LockedFile;
use crate::pages::{self, HUGE_PAGE};
use crate::{HugePages, MemoryError, PageReport, PageSource, PoolConfig, PoolFiles};

const PAGE: usize = 4096;

/// Threads that ask for huge pages; more are slower than the memory.
const COLLAPSE_THREADS_MAX: usize = 16;

/// What a thread is worth starting for.
const COLLAPSE_BYTES_MIN: usize = 256 << 20;

/// A shared mapping that lives as long as this value.
#[derive(Debug)]
pub struct Region {
    mapping: Mapping,
    file: File,
    pages: PageReport,
    /// Of a named pool, whose file others may cut short.
    _watch: Option<Watch>,
    /// Keeps a named pool locked for as long as a slab of it is held.
    _lock: Option<Arc<LockedFile>>,
}

/// Address space from `start` on, with the mapping at `base` inside it. Unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    reserved_bytes: usize,
    base: NonNull<u8>,
    bytes: usize,
    /// The one process that has it, if children have not.
    process: Option<u32>,
}

// SAFETY: the mapping is plain memory without thread affinity; it is unmapped once, on drop.
unsafe impl Send for Mapping {}
// SAFETY: a shared Mapping gives out only addresses; access through them is argued by the slabs.
unsafe impl Sync for Mapping {}

impl Region {
    pub(crate) fn map(config: &PoolConfig) -> Result<Self, MemoryError> {
        let bytes = config.capacity_bytes;
        if bytes == 0 {
            return Err(MemoryError::Empty);
        }
        let refused = |source| MemoryError::Map { bytes, source };
        let huge = config.huge_pages == HugePages::Auto;
        if huge && pages::reserved_huge_bytes() >= bytes {
            // Another process may take the reserved pages first; then ordinary memory will do.
            if let Ok(region) = Self::map_reserved(bytes) {
                return Ok(region);
            }
        }
        let available = pages::available_bytes().filter(|available| *available < bytes);
        if let Some(available_bytes) = available.filter(|_| config.populate) {
            return Err(MemoryError::NotEnough { bytes, available_bytes });
        }
        let rounded = bytes.checked_next_multiple_of(PAGE);
        let rounded = rounded.ok_or_else(|| refused(io::ErrorKind::OutOfMemory.into()))?;
        Self::map_ordinary(rounded, huge && config.populate, config.populate).map_err(refused)
    }

    fn map_reserved(bytes: usize) -> io::Result<Self> {
        let huge = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let rounded = bytes.checked_next_multiple_of(HUGE_PAGE);
        let bytes = rounded.ok_or(io::ErrorKind::OutOfMemory)?;
        let file = create_file(bytes, huge)?;
        let mapping = Mapping::of_file(&file, bytes, READ_WRITE)?;
        // SAFETY: the mapping was just made.
        unsafe { pages::populate(mapping.base, bytes) }?;
        // SAFETY: as above.
        unsafe { pages::leave_out_of_dumps(mapping.base, bytes) }?;
        let huge_bytes = pages::huge_bytes(mapping.base, bytes)?;
        let pages = PageReport { source: PageSource::Reserved, huge_bytes, refusal: None };
        Ok(Self { mapping, file: file.into(), pages, _watch: None, _lock: None })
    }

    /// Maps a pool that has a name. What an earlier run left in it stays as it is.
    pub(crate) fn of_files(config: &PoolConfig, files: &PoolFiles) -> io::Result<Self> {
        let file = files.pool().try_clone()?;
        let lock = files.lock();
        let bytes = files.pool_bytes();
        let mut mapping = Mapping::of_file(&file, bytes, READ_WRITE)?;
        let watch = Some(Watch::over(mapping.base.as_ptr().addr(), bytes)?);
        // SAFETY: the mapping was just made.
        unsafe { pages::leave_out_of_dumps(mapping.base, bytes) }?;
        let mut pages = PageReport { source: PageSource::Ordinary, huge_bytes: 0, refusal: None };
        if files.is_kept() {
            // SAFETY: the mapping was just made.
            unsafe { pages::populate(mapping.base, bytes) }?;
        }
        if config.huge_pages == HugePages::Auto {
            pages.refusal = mapping.collapse(!files.is_kept()).err();
            pages.huge_bytes = pages::huge_bytes(mapping.base, bytes)?;
            if pages.huge_bytes > 0 {
                pages.source = PageSource::Collapsed;
            }
        }
        if !files.is_kept() {
            // From here on nobody can take the memory away, so that no access ends in SIGBUS.
            fallocate(&file, FallocateFlags::empty(), 0, bytes as u64)?;
        }
        if !files.is_kept() && pages.huge_bytes < bytes {
            // SAFETY: the mapping was just made.
            unsafe { pages::populate(mapping.base, bytes) }?;
        }
        Ok(Self { mapping, file, pages, _watch: watch, _lock: Some(lock) })
    }

    fn map_ordinary(bytes: usize, collapse: bool, populate: bool) -> io::Result<Self> {
        let file = create_file(bytes, MemfdFlags::empty())?;
        let mut mapping = Mapping::of_file(&file, bytes, READ_WRITE)?;
        // SAFETY: the mapping was just made.
        unsafe { pages::leave_out_of_dumps(mapping.base, bytes) }?;
        let mut pages = PageReport { source: PageSource::Ordinary, huge_bytes: 0, refusal: None };
        if collapse {
            pages.refusal = mapping.collapse(true).err();
            pages.huge_bytes = pages::huge_bytes(mapping.base, bytes)?;
            if pages.huge_bytes > 0 {
                pages.source = PageSource::Collapsed;
            }
        }
        if populate && pages.huge_bytes < bytes {
            // SAFETY: the mapping was just made.
            unsafe { pages::populate(mapping.base, bytes) }?;
        }
        Ok(Self { mapping, file: file.into(), pages, _watch: None, _lock: None })
    }

    /// Where the mapping starts in this process: a multiple of 2 MiB.
    pub fn base(&self) -> NonNull<u8> {
        self.mapping.base
    }

    /// Length of the mapping.
    pub fn bytes(&self) -> usize {
        self.mapping.bytes
    }

    /// The memory as a file, to map it in another process. Its length cannot be changed, but for
    /// that of a pool with a name: only anonymous memory can be sealed, so whoever gets a named
    /// file with the right to write can shrink it and so kill its other users.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Which pages the kernel gave.
    pub fn pages(&self) -> &PageReport {
        &self.pages
    }
}

fn create_file(bytes: usize, extra: MemfdFlags) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | extra;
    let file = memfd_create("cascade-pool", flags)?;
    // Made for everybody; whoever gets it for reading could open it for writing by its /proc name.
    fchmod(&file, Mode::RUSR | Mode::WUSR)?;
    ftruncate(&file, bytes as u64)?;
    // Whoever gets the file cannot shrink it and so kill us with SIGBUS.
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// How a node maps its own pool.
pub(crate) const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

impl Mapping {
    pub(crate) fn of_file(file: impl AsFd, bytes: usize, prot: ProtFlags) -> io::Result<Self> {
        // Huge pages need an aligned address, which the kernel gives only to some mappings.
        let reserved_bytes = bytes.checked_add(HUGE_PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let start =
            unsafe { mmap_anonymous(ptr::null_mut(), reserved_bytes, ProtFlags::empty(), flags) }?;
        let start = NonNull::new(start.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let skip = start.as_ptr().addr().next_multiple_of(HUGE_PAGE) - start.as_ptr().addr();
        // SAFETY: `skip` is below HUGE_PAGE, which the reservation has on top of `bytes`.
        let base = unsafe { start.add(skip) };
        // From here on the reservation is unmapped on every way out.
        let mapping = Self { start, reserved_bytes, base, bytes, process: None };
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: replaces part of the reservation above, which nobody else knows of.
        unsafe { mmap(base.as_ptr().cast(), bytes, prot, flags, file, 0) }?;
        Ok(mapping)
    }

    /// Children that are forked from here on do not have this mapping.
    pub(crate) fn leave_out_of_children(&mut self) -> io::Result<()> {
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
    /// Asks for huge pages, by several threads at once: one clears no more than 8 GiB a second.
    ///
    /// A fresh mapping holds nothing yet; one that is not is populated and keeps its bytes.
    fn collapse(&mut self, is_fresh: bool) -> io::Result<()> {
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
            // All are joined; the first error stands for the others.
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
            // A child never had it; something else may lie at these addresses by now.
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
    use std::os::unix::fs::FileExt;

    fn region(bytes: usize, huge_pages: HugePages) -> Region {
        let config = PoolConfig { capacity_bytes: bytes, huge_pages, populate: true };
        Region::map(&config).expect("a few MiB are there")
    }

    #[test]
    fn the_file_shows_what_the_mapping_holds_and_keeps_its_length() {
        let region = region(3 << 20, HugePages::Auto);
        // SAFETY: inside the mapping.
        let at = unsafe { region.base().add(4097) };
        // SAFETY: inside the mapping, which nobody else accesses.
        unsafe { at.write(42) };
        let mut byte = [0];
        region.file().read_exact_at(&mut byte, 4097).expect("inside the file");
        assert_eq!(byte, [42]);
        region.file().set_len(0).expect_err("sealed against shrinking");
    }

    #[test]
    fn a_mapping_is_left_out_of_children() {
        let region = region(1 << 20, HugePages::Never);
        let mapping = Mapping::of_file(region.file(), 1 << 20, ProtFlags::READ);
        let mut mapping = mapping.expect("it can be mapped");
        mapping.leave_out_of_children().expect("the kernel knows the advice");
        let smaps = std::fs::read_to_string("/proc/self/smaps").expect("there is /proc");
        let start = format!("{:x}-", mapping.base().as_ptr().addr());
        let ours = smaps.split_once(&start).expect("it is mapped").1;
        let flags = ours.lines().find(|line| line.starts_with("VmFlags:"));
        assert!(flags.is_some_and(|flags| flags.contains(" dc")), "{flags:?}");
    }

    #[test]
    fn what_the_kernel_gave_is_reported() {
        let ordinary = region(8 << 20, HugePages::Never);
        assert_eq!(ordinary.pages().source, PageSource::Ordinary);
        assert_eq!(ordinary.pages().huge_bytes, 0);
        let asked = region(8 << 20, HugePages::Auto);
        let huge = asked.pages().huge_bytes;
        assert!(huge <= asked.bytes() && huge.is_multiple_of(HUGE_PAGE), "{huge}");
        assert_eq!(huge == 0, asked.pages().source == PageSource::Ordinary);
        assert!(asked.base().as_ptr().addr().is_multiple_of(HUGE_PAGE));
    }

    #[test]
    fn more_than_the_machine_has_is_refused_before_it_is_touched() {
        let config =
            PoolConfig { capacity_bytes: 1 << 60, huge_pages: HugePages::Auto, populate: true };
        let error = Region::map(&config).expect_err("no machine has an exbibyte");
        assert!(matches!(error, MemoryError::NotEnough { .. }), "{error}");
    }
}
