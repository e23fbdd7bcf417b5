//! Prefetch and huge-page hints. They change speed, never results.
#![expect(unsafe_code, reason = "advice is given on addresses")]

use rustix::mm::{Advice, madvise};

const PAGE_BYTES: usize = 4096;
const LINE_BYTES: usize = 64;
/// Bytes of a block that are prefetched.
const PREFETCH_BYTES: usize = 512;

/// Starts to load a value into the cache, without waiting for it.
#[inline]
pub fn prefetch<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing that a program can see and cannot fault; besides, the
        // reference keeps the address valid for the call.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _unused = value;
}

/// Starts to load the first bytes of a block that is read or written next, and the address of its
/// page. The processor goes on by itself from there.
#[inline]
pub fn prefetch_block(block: &[u8]) {
    let first = &block[..block.len().min(PREFETCH_BYTES)];
    first.iter().step_by(LINE_BYTES).for_each(prefetch);
}

/// Requests huge pages for a vector's allocation, best before it is filled: random reads of a large
/// table wait for page tables as much as for memory. False if the kernel refuses.
pub fn prefer_huge_pages<T>(reserved: &Vec<T>) -> bool {
    let start = reserved.as_ptr().addr().next_multiple_of(PAGE_BYTES);
    let end = (reserved.as_ptr().addr() + reserved.capacity() * size_of::<T>()) / PAGE_BYTES;
    let bytes = (end * PAGE_BYTES).saturating_sub(start);
    if bytes == 0 {
        return false;
    }
    let pages = reserved.as_ptr().with_addr(start).cast_mut().cast();
    // SAFETY: the whole pages inside the vector's own allocation, which lives during the call; this
    // advice changes how they are backed, not what they hold.
    unsafe { madvise(pages, bytes, Advice::LinuxHugepage) }.is_ok()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn hints_do_not_change_contents() {
        for capacity in [0, 1, 100, 1 << 20] {
            let mut numbers: Vec<u64> = Vec::with_capacity(capacity);
            prefer_huge_pages(&numbers);
            numbers.extend(0..capacity as u64);
            numbers.iter().for_each(prefetch);
            assert!(numbers.iter().copied().eq(0..capacity as u64));
        }
    }
}
