//! Memory that stands for that of a device: addresses without access, and bytes elsewhere.
#![expect(unsafe_code, reason = "maps memory")]

use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::ptr::null_mut;

/// Address space of all devices. Addresses are never used twice, so that none is valid by chance.
const SPACE_BYTES: usize = 256 << 30;
/// Alignment of allocations: that of a GPU's pages.
pub(crate) const PAGE_BYTES: usize = 2 << 20;

/// A mapping, unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: usize,
    bytes: usize,
}

impl Mapping {
    fn new(bytes: usize, access: i32) -> Option<Self> {
        Self::map(bytes, access, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
    }

    fn map(bytes: usize, access: i32, flags: i32, file: i32) -> Option<Self> {
        let flags = flags | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let start = unsafe { libc::mmap(null_mut(), bytes, access, flags, file, 0) };
        (start != libc::MAP_FAILED).then(|| Self { start: start.expose_provenance(), bytes })
    }

    /// Zeroed memory that can be read and written.
    pub(crate) fn accessible(bytes: usize) -> Option<Self> {
        Self::new(bytes.max(1), libc::PROT_READ | libc::PROT_WRITE)
    }

    /// Memory of a file, which other processes may have mapped, too.
    pub(crate) fn shared(bytes: usize, file: BorrowedFd<'_>) -> Option<Self> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        Self::map(bytes, access, libc::MAP_SHARED, file.as_raw_fd())
    }

    pub(crate) fn start(&self) -> usize {
        self.start
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let start = std::ptr::with_exposed_provenance_mut(self.start);
        // SAFETY: mapped by `new` with this length; the state forgets it with this value.
        let unmapped = unsafe { libc::munmap(start, self.bytes) };
        debug_assert_eq!(unmapped, 0, "the range is a mapping");
    }
}

/// Addresses of devices.
#[derive(Debug)]
pub(crate) struct Space {
    inaccessible: Mapping,
    next: usize,
}

impl Space {
    pub(crate) fn new() -> Option<Self> {
        let inaccessible = Mapping::new(SPACE_BYTES, libc::PROT_NONE)?;
        let next = inaccessible.start.next_multiple_of(PAGE_BYTES);
        Some(Self { inaccessible, next })
    }

    /// An address for an allocation.
    pub(crate) fn take(&mut self, bytes: usize) -> Option<usize> {
        // A page without an allocation lies between two.
        let length = bytes.checked_next_multiple_of(PAGE_BYTES)?.checked_add(PAGE_BYTES)?;
        let end = self.next.checked_add(length)?;
        let fits = end <= self.inaccessible.start + self.inaccessible.bytes;
        fits.then(|| std::mem::replace(&mut self.next, end))
    }

    pub(crate) fn contains(&self, address: usize) -> bool {
        (self.inaccessible.start..self.inaccessible.start + self.inaccessible.bytes)
            .contains(&address)
    }
}

/// Copies bytes between mapped addresses.
pub(crate) fn copy(target: usize, source: usize, bytes: usize) {
    let target = std::ptr::with_exposed_provenance_mut::<u8>(target);
    let source = std::ptr::with_exposed_provenance::<u8>(source);
    // SAFETY: both were found in mappings of the state, which refuses to unmap them under a copy;
    // host memory by the caller's promise to the driver.
    unsafe { std::ptr::copy(source, target, bytes) };
}

/// Numbers at a mapped address.
pub(crate) fn read_numbers(start: usize, count: usize) -> Vec<u64> {
    let start = std::ptr::with_exposed_provenance::<u64>(start);
    // SAFETY: as `copy`; arrays of a list may start anywhere.
    (0..count).map(|at| unsafe { start.wrapping_add(at).read_unaligned() }).collect()
}

/// Writes one byte to mapped addresses.
pub(crate) fn fill(target: usize, byte: u8, bytes: usize) {
    let target = std::ptr::with_exposed_provenance_mut::<u8>(target);
    // SAFETY: as `copy`.
    unsafe { target.write_bytes(byte, bytes) };
}
