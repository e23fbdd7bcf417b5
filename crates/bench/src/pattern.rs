//! Bytes that are a function of an offset: whoever knows the offset can tell right from wrong.

/// The word at this offset.
fn word(offset: u64) -> u64 {
    // The finaliser of SplitMix64: neighbouring offsets have unlike words.
    let mixed = offset.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Fills a buffer with the pattern from an offset that is a multiple of eight.
pub(crate) fn fill(offset: u64, into: &mut [u8]) {
    for (word_at, into) in (offset..).step_by(8).zip(into.chunks_mut(8)) {
        into.copy_from_slice(&word(word_at).to_le_bytes()[..into.len()]);
    }
}
