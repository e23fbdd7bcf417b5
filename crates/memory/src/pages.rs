//! Pages of a region: populates them, requests huge pages and reports what the kernel provided.
#![expect(unsafe_code, reason = "advises the kernel about a mapping")]

use std::fs;
use std::io;
use std::ptr::NonNull;

use rustix::mm::{Advice, madvise};

/// A huge page of this architecture, and the unit in which memory is collapsed.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// Whether the pool requests huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HugePages {
    /// Use them where the machine provides them.
    #[default]
    Auto,
    /// Ordinary pages.
    Never,
}

/// Which kind of pages backs a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageSource {
    /// Huge pages that the operator reserved (`vm.nr_hugepages`).
    Reserved,
    /// Ordinary memory that the kernel collapsed into huge pages.
    Collapsed,
    /// Ordinary pages.
    Ordinary,
}

/// The pages that back a region, as the kernel reports them.
#[derive(Debug)]
pub struct PageReport {
    /// Kind of pages.
    pub source: PageSource,
    /// Bytes that the kernel reports as mapped by huge pages.
    pub huge_bytes: usize,
    /// The kernel's error, if it provided fewer huge pages than requested.
    pub refusal: Option<io::Error>,
}

/// Writes to the first page of each whole huge page in a range.
///
/// [`collapse`] needs one page of each, and clears the rest once. A populated range would be
/// cleared page by page and then copied: 0.6 to 0.8 s per GiB instead of 0.13.
///
/// # Safety
/// The range is in a mapping of this process, holds no data, and no other thread accesses it.
pub(crate) unsafe fn touch(base: NonNull<u8>, bytes: usize) {
    for offset in (0..bytes / HUGE_PAGE * HUGE_PAGE).step_by(HUGE_PAGE) {
        // SAFETY: the offset lies inside the caller's mapping.
        let first = unsafe { base.add(offset) };
        // SAFETY: as above, and no other thread accesses it; the write populates the page.
        unsafe { first.write_volatile(0) };
    }
}

/// Collapses the whole huge pages of a range that starts at a huge-page boundary. Each has at least
/// one populated page; see [`touch`].
///
/// # Safety
/// The range is in a mapping of this process.
pub(crate) unsafe fn collapse(base: NonNull<u8>, bytes: usize) -> io::Result<()> {
    let whole = bytes / HUGE_PAGE * HUGE_PAGE;
    if whole == 0 {
        return Ok(());
    }
    // SAFETY: the range is inside the caller's mapping; collapsing changes no contents.
    let refused = unsafe { libc::madvise(base.as_ptr().cast(), whole, libc::MADV_COLLAPSE) };
    if refused == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Makes every page of the mapping present and writable.
///
/// # Safety
/// The range is a mapping of this process.
pub(crate) unsafe fn populate(base: NonNull<u8>, bytes: usize) -> io::Result<()> {
    // SAFETY: the range is the caller's mapping; populating changes no contents.
    unsafe { madvise(base.as_ptr().cast(), bytes, Advice::LinuxPopulateWrite) }?;
    Ok(())
}

/// Excludes the mapping from core dumps: they would contain prompts and be as large as the pool.
///
/// # Safety
/// The range is a mapping of this process.
pub(crate) unsafe fn exclude_from_core_dumps(base: NonNull<u8>, bytes: usize) -> io::Result<()> {
    // SAFETY: the range is the caller's mapping; the advice changes no contents.
    unsafe { madvise(base.as_ptr().cast(), bytes, Advice::LinuxDontDump) }?;
    Ok(())
}

/// Bytes of the mapping at this address that are mapped by huge pages, from `/proc/self/smaps`.
pub(crate) fn huge_bytes(base: NonNull<u8>, bytes: usize) -> io::Result<usize> {
    let start = base.as_ptr().addr();
    Ok(huge_bytes_in(&fs::read_to_string("/proc/self/smaps")?, start, start + bytes))
}

/// Free bytes of the huge pages that the operator reserved.
pub(crate) fn reserved_huge_bytes() -> usize {
    let free = fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    // A kernel without huge pages does not have this file.
    let pages = free.ok().and_then(|text| text.trim().parse::<usize>().ok()).unwrap_or(0);
    pages.saturating_mul(HUGE_PAGE)
}

fn huge_bytes_in(smaps: &str, start: usize, end: usize) -> usize {
    let mut is_ours = false;
    let mut total = 0;
    for line in smaps.lines() {
        // The line of a mapping starts with its addresses. All other lines start with a name and a
        // colon.
        let (name, rest) = line.split_once(' ').unwrap_or((line, ""));
        match name {
            "ShmemPmdMapped:" | "Shared_Hugetlb:" | "Private_Hugetlb:" if is_ours => {
                total += kib(rest).unwrap_or(0);
            }
            _ if name.ends_with(':') => {}
            _ => {
                let first = name.split('-').next().unwrap_or("");
                is_ours = usize::from_str_radix(first, 16)
                    .is_ok_and(|address| (start..end).contains(&address));
            }
        }
    }
    total
}

/// `   1024 kB` in bytes.
fn kib(text: &str) -> Option<usize> {
    text.trim().strip_suffix(" kB")?.parse::<usize>().ok()?.checked_mul(1024)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn smaps_are_summed_over_the_range_only() {
        let smaps = "\
7f0000000000-7f0000400000 rw-s 00000000 00:01 5 /memfd:cascade-pool (deleted)
Rss:                4096 kB
ShmemPmdMapped:     2048 kB
VmFlags: rd wr sh
7f0000400000-7f0000600000 rw-s 00400000 00:01 5 /memfd:cascade-pool (deleted)
ShmemPmdMapped:     2048 kB
7f0000600000-7f0000a00000 rw-s 00000000 00:01 6 /memfd:other (deleted)
ShmemPmdMapped:     4096 kB
";
        assert_eq!(huge_bytes_in(smaps, 0x7f00_0000_0000, 0x7f00_0060_0000), 4 << 20);
    }
}
