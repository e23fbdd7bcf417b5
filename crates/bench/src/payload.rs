//! Payloads that are a pure function of the block's key, so that every byte read can be checked.

use cascade_block::BlockKey;

/// An odd constant without structure; successive words differ by it before mixing.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// How many words are compared before the result is looked at; wide enough to vectorise.
const CHECK_WORDS: usize = 512;

/// The first byte of a block that is not what its key says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WrongByte {
    /// Offset in the block; the block's length if it is too short or too long.
    pub offset: usize,
    /// What should be there; nothing if the block is too long.
    pub expected: Option<u8>,
    /// What is there; nothing if the block is too short.
    pub found: Option<u8>,
}

/// Writes a key's payload over the whole buffer.
///
/// A block of `n` bytes is the first `n` bytes of an endless stream. No eight-byte word occurs
/// twice in a block, and two blocks differ in every word, so a shifted, torn, stale or swapped
/// block is noticed at its first word.
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

/// Compares a block with its key's payload of `expected_bytes` bytes.
pub fn check(key: &BlockKey, bytes: &[u8], expected_bytes: usize) -> Result<(), WrongByte> {
    let shared = bytes.len().min(expected_bytes);
    let mut state = key.fingerprint();
    for (at, run) in bytes[..shared].chunks(CHECK_WORDS * 8).enumerate() {
        let (words, tail) = run.as_chunks::<8>();
        let mut difference = 0;
        for word in words {
            difference |= u64::from_le_bytes(*word) ^ mix(state);
            state = state.wrapping_add(STEP);
        }
        let is_tail_right = *tail == mix(state).to_le_bytes()[..tail.len()];
        if difference != 0 || !is_tail_right {
            return Err(first_wrong(key, &bytes[..shared], at * CHECK_WORDS * 8));
        }
    }
    if bytes.len() == expected_bytes {
        return Ok(());
    }
    let expected = (shared < expected_bytes).then(|| byte_at(key, shared));
    Err(WrongByte { offset: shared, expected, found: bytes.get(shared).copied() })
}

/// Invertible, so that distinct states give distinct words.
fn mix(state: u64) -> u64 {
    state ^ (state >> 29)
}

fn byte_at(key: &BlockKey, offset: usize) -> u8 {
    let steps = (offset / 8) as u64;
    let state = key.fingerprint().wrapping_add(STEP.wrapping_mul(steps));
    mix(state).to_le_bytes()[offset % 8]
}

fn first_wrong(key: &BlockKey, bytes: &[u8], from: usize) -> WrongByte {
    let wrong = (from..bytes.len()).find(|&offset| bytes[offset] != byte_at(key, offset));
    let offset = wrong.expect("the run holds a difference");
    WrongByte { offset, expected: Some(byte_at(key, offset)), found: Some(bytes[offset]) }
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
        fn one_flipped_bit_is_found_where_it_is(
            seed: u64, bytes in 1_usize..20_000, at: prop::sample::Index, bit in 0_u8..8,
        ) {
            let mut block = vec![0; bytes];
            fill(&key(seed), &mut block);
            let offset = at.index(bytes);
            block[offset] ^= 1 << bit;
            prop_assert_eq!(check(&key(seed), &block, bytes).unwrap_err().offset, offset);
        }

        #[test]
        fn another_blocks_bytes_are_wrong_from_the_first_word(one: u64, other: u64) {
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
    fn the_stream_does_not_change() {
        let mut block = [0; 12];
        fill(&key(1), &mut block);
        assert_eq!(block, [1, 0, 0, 0, 0, 0, 0, 0, 0xdd, 0xb1, 0xf1, 0x8e]);
    }
}
