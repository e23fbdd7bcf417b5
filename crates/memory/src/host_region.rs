//! Host memory: one shared mapping of anonymous memory or of an in-memory file.
#![expect(unsafe_code, reason = "maps memory and hands out pointers into it")]

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, SealFlags, fallocate, fchmod, fcntl_add_seals, fstatvfs,
    ftruncate, memfd_create,
};

use crate::available::available_here;
use crate::fault::Watch;
use crate::locked_file::LockedFile;
use crate::mapping::{Mapping, READ_WRITE};
use crate::pages::{self, HUGE_PAGE};
use crate::{HugePages, MemoryError, PageReport, PageSource, PoolConfig, PoolFiles};

const PAGE: usize = 4096;

/// A shared mapping that lives as long as this value.
#[derive(Debug)]
pub struct HostRegion {
    mapping: Mapping,
    file: File,
    pages: PageReport,
    /// Only for a named pool: other processes may truncate its file.
    _watch: Option<Watch>,
    /// Keeps a named pool locked for as long as a slab of it is held.
    _lock: Option<Arc<LockedFile>>,
}

impl HostRegion {
    /// Maps anonymous memory that other processes can map too.
    pub fn map(config: &PoolConfig) -> Result<Self, MemoryError> {
        let bytes = config.capacity_bytes;
        if bytes == 0 {
            return Err(MemoryError::Empty);
        }
        let refused = |source| MemoryError::Map { bytes, source };
        let huge = config.huge_pages == HugePages::Auto;
        if huge && pages::reserved_huge_bytes() >= bytes {
            // Another process may take the reserved pages first; fall back to ordinary memory.
            if let Ok(region) = Self::map_reserved(bytes) {
                return Ok(region);
            }
        }
        let available = available_here().filter(|available| *available < bytes);
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
        unsafe { pages::populate(mapping.base(), bytes) }?;
        // SAFETY: as above.
        unsafe { pages::exclude_from_core_dumps(mapping.base(), bytes) }?;
        let huge_bytes = pages::huge_bytes(mapping.base(), bytes)?;
        let pages = PageReport { source: PageSource::Reserved, huge_bytes, refusal: None };
        Ok(Self { mapping, file: file.into(), pages, _watch: None, _lock: None })
    }

    /// Maps a named pool. The contents of an existing file are kept.
    pub(crate) fn of_files(config: &PoolConfig, files: &PoolFiles) -> io::Result<Self> {
        let file = files.pool().try_clone()?;
        let lock = files.lock();
        let bytes = files.pool_bytes();
        let mut mapping = Mapping::of_file(&file, bytes, READ_WRITE)?;
        let watch = Some(Watch::over(mapping.base().as_ptr().addr(), bytes)?);
        // SAFETY: the mapping was just made.
        unsafe { pages::exclude_from_core_dumps(mapping.base(), bytes) }?;
        let mut pages = PageReport { source: PageSource::Ordinary, huge_bytes: 0, refusal: None };
        // An existing pool has data, so it is populated and then collapsed. A new one is collapsed
        // first and reserved afterwards: collapsing populated pages is several times slower.
        if files.is_reused() {
            // SAFETY: the mapping was just made.
            unsafe { pages::populate(mapping.base(), bytes) }?;
        }
        if config.huge_pages == HugePages::Auto {
            pages.refusal = mapping.collapse(!files.is_reused()).err();
            pages.huge_bytes = pages::huge_bytes(mapping.base(), bytes)?;
            if pages.huge_bytes > 0 {
                pages.source = PageSource::Collapsed;
            }
        }
        if !files.is_reused() {
            // Reserves the memory, so that a file system that fills up later causes no SIGBUS.
            fallocate(&file, FallocateFlags::empty(), 0, bytes as u64)?;
        }
        if !files.is_reused() && pages.huge_bytes < bytes {
            // SAFETY: the mapping was just made.
            unsafe { pages::populate(mapping.base(), bytes) }?;
        }
        Ok(Self { mapping, file, pages, _watch: watch, _lock: Some(lock) })
    }

    fn map_ordinary(bytes: usize, collapse: bool, populate: bool) -> io::Result<Self> {
        let file = create_file(bytes, MemfdFlags::empty())?;
        let mut mapping = Mapping::of_file(&file, bytes, READ_WRITE)?;
        // SAFETY: the mapping was just made.
        unsafe { pages::exclude_from_core_dumps(mapping.base(), bytes) }?;
        let mut pages = PageReport { source: PageSource::Ordinary, huge_bytes: 0, refusal: None };
        if collapse {
            pages.refusal = mapping.collapse(true).err();
            pages.huge_bytes = pages::huge_bytes(mapping.base(), bytes)?;
            if pages.huge_bytes > 0 {
                pages.source = PageSource::Collapsed;
            }
        }
        if populate && pages.huge_bytes < bytes {
            // SAFETY: the mapping was just made.
            unsafe { pages::populate(mapping.base(), bytes) }?;
        }
        Ok(Self { mapping, file: file.into(), pages, _watch: None, _lock: None })
    }

    /// Start of the mapping in this process: a multiple of 2 MiB.
    pub fn base(&self) -> NonNull<u8> {
        self.mapping.base()
    }

    /// Length of the mapping.
    pub fn bytes(&self) -> usize {
        self.mapping.bytes()
    }

    /// The memory as a file, to map it in another process. The length of anonymous memory is
    /// sealed. A named file cannot be sealed: a process that may write it can truncate it, which
    /// ends all processes that use it.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The unit in which memory can be given back.
    pub(crate) fn page_bytes(&self) -> usize {
        if self.pages.source == PageSource::Reserved { HUGE_PAGE } else { PAGE }
    }

    /// Gives the memory of a range of whole pages back to the system. Its bytes are then zero. No
    /// other process may use them, and no device may have them registered.
    pub(crate) fn release_pages(&self, offset: usize, bytes: usize) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.file, flags, offset as u64, bytes as u64)?)
    }

    /// Allocates the memory of a range again that [`Self::release_pages`] has given back, in huge
    /// pages if the region has those.
    ///
    /// # Safety
    /// No other thread accesses the range, and it holds no data.
    pub(crate) unsafe fn restore_pages(&self, offset: usize, bytes: usize) -> io::Result<()> {
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes()), "in the region");
        // Others may have filled the file system meanwhile: touching its pages would be a SIGBUS.
        let room = fstatvfs(&self.file)?;
        let is_limited = room.f_blocks > 0;
        if is_limited && room.f_bfree.saturating_mul(room.f_frsize) < bytes as u64 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        if self.pages.source == PageSource::Collapsed {
            let start = offset.next_multiple_of(HUGE_PAGE);
            let whole = (offset + bytes).saturating_sub(start) / HUGE_PAGE * HUGE_PAGE;
            if whole > 0 {
                // SAFETY: the range is inside the mapping, as the assertion says.
                let base = unsafe { self.base().add(start) };
                // SAFETY: the caller has the range to itself, and it holds no data.
                unsafe { pages::touch(base, whole) };
                // SAFETY: as above. A refusal leaves ordinary pages, as at the start.
                drop(unsafe { pages::collapse(base, whole) });
            }
        }
        // As at the start: a file system that fills up later causes no SIGBUS.
        fallocate(&self.file, FallocateFlags::empty(), offset as u64, bytes as u64)?;
        // SAFETY: the range is inside the mapping.
        let base = unsafe { self.base().add(offset) };
        // SAFETY: as above; populating changes no contents.
        unsafe { pages::populate(base, bytes) }
    }

    /// Bytes that are mapped by huge pages now.
    pub(crate) fn huge_bytes_now(&self) -> usize {
        // Without `/proc` the last known number is as good as any.
        pages::huge_bytes(self.base(), self.bytes()).unwrap_or(self.pages.huge_bytes)
    }

    /// The pages that the kernel provided at the start.
    pub fn pages(&self) -> &PageReport {
        &self.pages
    }
}

fn create_file(bytes: usize, extra: MemfdFlags) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | extra;
    let file = memfd_create("cascade-pool", flags)?;
    // Created with mode 0777: a process with a read-only descriptor could reopen it for writing
    // through /proc.
    fchmod(&file, Mode::RUSR | Mode::WUSR)?;
    ftruncate(&file, bytes as u64)?;
    // A process that gets the descriptor cannot shrink the file, which would cause SIGBUS here.
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    fn region(bytes: usize, huge_pages: HugePages) -> HostRegion {
        let config = PoolConfig { capacity_bytes: bytes, huge_pages, populate: true };
        HostRegion::map(&config).expect("a few MiB are there")
    }

    #[test]
    fn the_file_has_the_bytes_of_the_mapping_and_cannot_shrink() {
        let region = region(3 << 20, HugePages::Auto);
        // SAFETY: inside the mapping.
        let at = unsafe { region.base().add(4097) };
        // SAFETY: inside the mapping, which no other code accesses.
        unsafe { at.write(42) };
        let mut byte = [0];
        region.file().read_exact_at(&mut byte, 4097).expect("inside the file");
        assert_eq!(byte, [42]);
        region.file().set_len(0).expect_err("sealed against shrinking");
    }

    #[test]
    fn the_page_report_matches_the_mapping() {
        let ordinary = region(8 << 20, HugePages::Never);
        assert_eq!(ordinary.pages().source, PageSource::Ordinary);
        assert_eq!(ordinary.pages().huge_bytes, 0);
        let requested = region(8 << 20, HugePages::Auto);
        let huge = requested.pages().huge_bytes;
        assert!(huge <= requested.bytes() && huge.is_multiple_of(HUGE_PAGE), "{huge}");
        assert_eq!(huge == 0, requested.pages().source == PageSource::Ordinary);
        assert!(requested.base().as_ptr().addr().is_multiple_of(HUGE_PAGE));
    }

    #[test]
    fn a_region_larger_than_available_memory_is_refused_before_it_is_populated() {
        let config =
            PoolConfig { capacity_bytes: 1 << 60, huge_pages: HugePages::Auto, populate: true };
        let error = HostRegion::map(&config).expect_err("no machine has an exbibyte");
        assert!(matches!(error, MemoryError::NotEnough { .. }), "{error}");
    }
}
