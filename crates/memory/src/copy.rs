//! Copies between a caller's memory and slabs, past the caches where they would not be used.
//!
//! An ordinary store first reads the cache line that it is about to overwrite. Into memory that is
//! in no cache this costs a third of the bandwidth or more; streaming stores avoid it, but leave
//! the target cold and are slower into a cache. `docs/decisions/0002-copies.md` has the figures.

/// From here on a copy into a slab is streamed: a pool is larger than the caches, and what
/// eviction gave back was not touched for long.
const STREAM_IN_BYTES_MIN: usize = 16 << 10;

/// From here on the copies of one call do not stay in its core's second cache, so that the first
/// are gone when the caller comes to read them.
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
/// `batch_bytes` is what the caller's whole call copies: small batches are left in the cache for
/// their reader, large ones would not stay there.
///
/// # Panics
/// If the lengths differ.
pub fn copy_out(bytes: &mut [u8], slab: &[u8], batch_bytes: usize) {
    let streamed = bytes.len() >= STREAM_IN_BYTES_MIN && batch_bytes >= STREAM_OUT_BATCH_BYTES_MIN;
    copy(bytes, slab, streamed);
}

fn copy(target: &mut [u8], source: &[u8], streamed: bool) {
    assert_eq!(target.len(), source.len(), "a block is copied whole");
    if !(streamed && stream::copy(target, source, stream::prefers_pages_side_by_side())) {
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

    /// Pages that are copied side by side where that is faster.
    const PAGES: usize = 4;

    type Line = [u8; LINE];

    /// Whether several pages side by side are copied faster than one after the other. An Intel
    /// processor's own prefetching ends at the end of a page, so that more reads are under way; an
    /// AMD one, known by an extension that no other has, goes on and loses track when pages take
    /// turns.
    pub(super) fn prefers_pages_side_by_side() -> bool {
        !is_x86_feature_detected!("sse4a")
    }

    /// Copies with streaming stores, unless this processor has none. Lengths are equal.
    pub(super) fn copy(target: &mut [u8], source: &[u8], side_by_side: bool) -> bool {
        let is_able = is_x86_feature_detected!("avx2");
        if is_able {
            // SAFETY: this processor has AVX2.
            unsafe { copy_avx2(target, source, side_by_side) };
        }
        is_able
    }

    /// AVX-512 was no faster: the memory is the limit.
    #[target_feature(enable = "avx2")]
    fn copy_avx2(target: &mut [u8], source: &[u8], side_by_side: bool) {
        let head = target.as_ptr().align_offset(LINE).min(target.len());
        let (target_head, target) = target.split_at_mut(head);
        let (source_head, source) = source.split_at(head);
        target_head.copy_from_slice(source_head);
        let (target_lines, target_tail) = target.as_chunks_mut::<LINE>();
        let (source_lines, source_tail) = source.as_chunks::<LINE>();
        target_tail.copy_from_slice(source_tail);
        let groups = target_lines.len() / (PAGES * PAGE_LINES);
        let aside = if side_by_side { groups * PAGES * PAGE_LINES } else { 0 };
        let (target_aside, target_lines) = target_lines.split_at_mut(aside);
        let (source_aside, source_lines) = source_lines.split_at(aside);
        let (target_groups, _) = target_aside.as_chunks_mut::<{ PAGES * PAGE_LINES }>();
        let (source_groups, _) = source_aside.as_chunks::<{ PAGES * PAGE_LINES }>();
        for (target, source) in target_groups.iter_mut().zip(source_groups) {
            for line in 0..PAGE_LINES {
                for page in 0..PAGES {
                    let at = page * PAGE_LINES + line;
                    copy_line(&mut target[at], &source[at]);
                }
            }
        }
        for (target, source) in target_lines.iter_mut().zip(source_lines) {
            copy_line(target, source);
        }
        // Streaming stores are ordered with nothing: without this, a thread that sees the block
        // published could read what was there before.
        _mm_sfence();
    }

    /// Copies a line to a target that starts at a multiple of 64: `copy_avx2` skips what does not.
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
    /// Nothing is streamed.
    pub(super) fn prefers_pages_side_by_side() -> bool {
        false
    }

    /// No streaming stores on this processor.
    pub(super) fn copy(_target: &mut [u8], _source: &[u8], _side_by_side: bool) -> bool {
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
        fn streamed_bytes_arrive_whole_and_alone(
            start in 0_usize..200,
            len in 0_usize..40_000,
            source in prop::collection::vec(any::<u8>(), 40_200),
            offset in 0_usize..200,
            side_by_side: bool,
        ) {
            let mut target = vec![0xa5; 40_400];
            let (to, from) = (&mut target[start..start + len], &source[offset..offset + len]);
            if !stream::copy(to, from, side_by_side) {
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
