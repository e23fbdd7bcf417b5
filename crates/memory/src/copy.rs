//! Copies between a caller's memory and slabs, bypassing the caches where they would not help.
//!
//! An ordinary store first reads the cache line that it overwrites. For uncached memory this costs
//! a third of the bandwidth or more. Streaming stores avoid it, but they leave the target uncached
//! and are slower than ordinary stores into a cache. `docs/decisions/0002-copies.md` has the
//! figures.

/// Copies into a slab are streamed from this length on: a pool is larger than the caches, and
/// evicted memory has not been accessed for long.
const STREAM_IN_BYTES_MIN: usize = 16 << 10;

/// From this total on, the copies of one call do not fit the core's L2 cache: the first are evicted
/// from it before the caller reads them.
const STREAM_OUT_BATCH_BYTES_MIN: usize = 1 << 20;

/// Copies all of a caller's bytes over all of a slab.
///
/// # Panics
/// If the lengths differ.
pub fn copy_in(slab: &mut [u8], bytes: &[u8]) {
    copy(slab, bytes, slab.len() >= STREAM_IN_BYTES_MIN);
}

/// Copies all of a slab over all of a caller's bytes.
///
/// `batch_bytes` is the total of the caller's call: small batches are left in the cache for the
/// reader, large ones are streamed.
///
/// # Panics
/// If the lengths differ.
pub fn copy_out(bytes: &mut [u8], slab: &[u8], batch_bytes: usize) {
    let is_streamed =
        bytes.len() >= STREAM_IN_BYTES_MIN && batch_bytes >= STREAM_OUT_BATCH_BYTES_MIN;
    copy(bytes, slab, is_streamed);
}

fn copy(target: &mut [u8], source: &[u8], is_streamed: bool) {
    assert_eq!(target.len(), source.len(), "a block is copied whole");
    if !(is_streamed && stream::copy(target, source, stream::prefers_interleaved_pages())) {
        target.copy_from_slice(source);
    }
}

#[cfg(target_arch = "x86_64")]
mod stream {
    #![expect(unsafe_code, reason = "streaming stores are intrinsics that take pointers")]

    use std::arch::x86_64::{_mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};

    /// A cache line. Streaming stores write whole ones, from their start.
    const LINE: usize = 64;

    /// Lines in a page.
    const PAGE_LINES: usize = 64;

    /// Pages that are copied interleaved where that is faster.
    const PAGES: usize = 4;

    type Line = [u8; LINE];

    /// Whether copying several pages interleaved is faster than one after the other. The hardware
    /// prefetcher of Intel processors stops at the end of a page, so interleaving keeps more reads
    /// in flight. That of AMD processors, recognized by `sse4a`, continues across pages and loses
    /// track when pages alternate.
    pub(super) fn prefers_interleaved_pages() -> bool {
        !is_x86_feature_detected!("sse4a")
    }

    /// Copies with streaming stores. False, and no copy, if this processor has none. Lengths are
    /// equal.
    pub(super) fn copy(target: &mut [u8], source: &[u8], interleaved: bool) -> bool {
        let is_supported = is_x86_feature_detected!("avx2");
        if is_supported {
            // SAFETY: this processor has AVX2.
            unsafe { copy_avx2(target, source, interleaved) };
        }
        is_supported
    }

    /// AVX-512 was no faster: memory bandwidth is the limit.
    #[target_feature(enable = "avx2")]
    fn copy_avx2(target: &mut [u8], source: &[u8], interleaved: bool) {
        // Ordinary copies up to the first aligned line of the target and after the last one.
        let head = target.as_ptr().align_offset(LINE).min(target.len());
        let (target_head, target) = target.split_at_mut(head);
        let (source_head, source) = source.split_at(head);
        target_head.copy_from_slice(source_head);
        let (target_lines, target_tail) = target.as_chunks_mut::<LINE>();
        let (source_lines, source_tail) = source.as_chunks::<LINE>();
        target_tail.copy_from_slice(source_tail);
        let groups = target_lines.len() / (PAGES * PAGE_LINES);
        let grouped = if interleaved { groups * PAGES * PAGE_LINES } else { 0 };
        let (target_grouped, target_lines) = target_lines.split_at_mut(grouped);
        let (source_grouped, source_lines) = source_lines.split_at(grouped);
        let (target_groups, _) = target_grouped.as_chunks_mut::<{ PAGES * PAGE_LINES }>();
        let (source_groups, _) = source_grouped.as_chunks::<{ PAGES * PAGE_LINES }>();
        for (target, source) in target_groups.iter_mut().zip(source_groups) {
            for line in 0..PAGE_LINES {
                // The same line of several pages in turn: one stream of reads per page.
                for page in 0..PAGES {
                    let at = page * PAGE_LINES + line;
                    copy_line(&mut target[at], &source[at]);
                }
            }
        }
        for (target, source) in target_lines.iter_mut().zip(source_lines) {
            copy_line(target, source);
        }
        // Streaming stores are weakly ordered: without this fence, a thread that sees the block
        // published could read its previous bytes.
        _mm_sfence();
    }

    /// Copies a line to a target aligned to 64 bytes, as `copy_avx2` ensures.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn copy_line(target: &mut Line, source: &Line) {
        let (low, high) = source.split_at(LINE / 2);
        // SAFETY: 32 bytes, the first half of the line; the load needs no alignment.
        let low = unsafe { _mm256_loadu_si256(low.as_ptr().cast()) };
        // SAFETY: 32 bytes, the second half.
        let high = unsafe { _mm256_loadu_si256(high.as_ptr().cast()) };
        let (to_low, to_high) = target.split_at_mut(LINE / 2);
        // SAFETY: 32 bytes at a multiple of 64, as the caller keeps it.
        unsafe { _mm256_stream_si256(to_low.as_mut_ptr().cast(), low) };
        // SAFETY: 32 bytes further, so at a multiple of 32.
        unsafe { _mm256_stream_si256(to_high.as_mut_ptr().cast(), high) };
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod stream {
    /// Not used: nothing is streamed.
    pub(super) fn prefers_interleaved_pages() -> bool {
        false
    }

    /// No streaming stores on this processor.
    pub(super) fn copy(_target: &mut [u8], _source: &[u8], _interleaved: bool) -> bool {
        false
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn a_streamed_copy_writes_exactly_its_target(
            start in 0_usize..200,
            len in 0_usize..40_000,
            source in prop::collection::vec(any::<u8>(), 40_200),
            offset in 0_usize..200,
            interleaved: bool,
        ) {
            let mut target = vec![0xa5; 40_400];
            let (to, from) = (&mut target[start..start + len], &source[offset..offset + len]);
            if !stream::copy(to, from, interleaved) {
                copy(to, from, false);
            }
            prop_assert_eq!(&target[start..start + len], &source[offset..offset + len]);
            prop_assert!(target[..start].iter().all(|byte| *byte == 0xa5));
            prop_assert!(target[start + len..].iter().all(|byte| *byte == 0xa5));
        }
    }

    #[test]
    #[should_panic(expected = "a block is copied whole")]
    fn a_shorter_target_is_refused() {
        copy_in(&mut [0; 10], &[1; 11]);
    }
}
