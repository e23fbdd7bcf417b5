//! The bytes of blocks: a function of who put them, so that any reader can tell whose they are.

use std::fmt;

/// The memory of every store that is simulated.
pub(crate) const IN_HOST_MEMORY: &str = "simulated stores have host memory";

/// Separates the words of one content.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
/// Bytes at the start of a block that name its content.
const STAMP_BYTES: usize = 16;

/// What a block consists of: equal contents have equal bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Content {
    /// The key for which it was made. Keys can share contents.
    pub(crate) owner: u32,
    /// Which content of this owner.
    pub(crate) number: u32,
    /// Its length in bytes.
    pub(crate) length: u32,
}

impl Content {
    /// The length for indices.
    pub(crate) fn len(self) -> usize {
        self.length as usize
    }

    /// Fills the buffer with the bytes, as far as it reaches.
    pub(crate) fn fill(self, buffer: &mut [u8]) {
        let (words, rest) = buffer.as_chunks_mut();
        for (at, bytes) in words.iter_mut().enumerate() {
            *bytes = self.word(at as u64).to_le_bytes();
        }
        let last = self.word(words.len() as u64).to_le_bytes();
        rest.copy_from_slice(&last[..rest.len()]);
    }

    /// The bytes.
    pub(crate) fn bytes(self) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        self.fill(&mut bytes);
        bytes
    }

    /// The position of the first byte that is not this content's; `None` if all are, and none is
    /// missing or too much.
    pub(crate) fn first_difference(self, bytes: &[u8]) -> Option<usize> {
        let (words, rest) = bytes.as_chunks();
        // Whole words first: a world spends most of its time here and in `fill`.
        let mut at = 0;
        while at < words.len() && u64::from_le_bytes(words[at]) == self.word(at as u64) {
            at += 1;
        }
        let found = words.get(at).map_or(rest, |word| word.as_slice());
        let right = self.word(at as u64).to_le_bytes();
        let differs = found.iter().zip(right).position(|(byte, right)| *byte != right);
        match differs {
            Some(differs) => Some(at * 8 + differs),
            None => (bytes.len() != self.len()).then_some(bytes.len().min(self.len())),
        }
    }

    /// Whether both have the same bytes. Short contents of different names can.
    pub(crate) fn has_same_bytes(self, other: Self) -> bool {
        self == other
            || (self.length == other.length
                && self.len() <= STAMP_BYTES
                && self.bytes() == other.bytes())
    }

    /// The content that a block names in its first bytes, if it is long enough.
    pub(crate) fn named_in(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| {
            let bytes = bytes.get(at..at + 4)?;
            Some(u32::from_le_bytes(bytes.try_into().ok()?))
        };
        Some(Self { owner: word(0)?, number: word(4)?, length: word(8)? })
    }

    fn word(self, at: u64) -> u64 {
        match at {
            0 => u64::from(self.owner) | u64::from(self.number) << 32,
            1 => u64::from(self.length) | 0xca5c_ade0 << 32,
            _ => {
                let seed = u64::from(self.owner) << 32 | u64::from(self.number);
                let state = (seed.wrapping_add(at.wrapping_mul(GOLDEN))).wrapping_mul(GOLDEN);
                state ^ state >> 29
            }
        }
    }
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "content {} of key {}, {} bytes", self.number, self.owner, self.length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_content_knows_its_bytes_and_those_of_others() {
        for length in [0, 1, 7, 8, 15, 16, 17, 4096] {
            let content = Content { owner: 3, number: 9, length };
            let mut bytes = content.bytes();
            assert_eq!(content.first_difference(&bytes), None);
            assert!(content.has_same_bytes(content));
            if length > 11 {
                assert_eq!(Content::named_in(&bytes), Some(content));
            }
            if let Some(last) = bytes.last_mut() {
                *last ^= 1;
                assert_eq!(content.first_difference(&bytes), Some(content.len() - 1));
                bytes.pop();
                assert_eq!(content.first_difference(&bytes), Some(content.len() - 1));
            }
        }
        let short = |owner| Content { owner, number: 1, length: 4 };
        assert!(!short(1).has_same_bytes(short(2)));
        let empty = |owner| Content { owner, number: 1, length: 0 };
        assert!(empty(1).has_same_bytes(empty(2)));
    }
}
