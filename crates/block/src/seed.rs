//! A secret per process that turns keys into fingerprints for hash tables.
//!
//! Callers choose keys. Without a secret they could choose many keys with one fingerprint, which
//! makes every table lookup linear (hash flooding).

use crate::{BlockKey, Digest};

/// A keyed hash from 32 bytes to 64 bits, unpredictable without the seed. Not for storage: each
/// process has its own seed.
#[derive(Clone, Copy)]
pub struct FingerprintSeed([u64; 6]);

impl FingerprintSeed {
    /// The seed from this number. Take a random number from the system, except in tests and studies
    /// that have to be reproducible.
    pub fn new(number: u64) -> Self {
        // SplitMix64 (Steele, Lea, Flood, 2014) expands the number to six words.
        let mut state = number;
        Self(std::array::from_fn(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^ (mixed >> 31)
        }))
    }

    /// The fingerprint of a key.
    #[inline]
    pub fn of_key(&self, key: &BlockKey) -> u64 {
        self.hash(key.as_bytes())
    }

    /// The fingerprint of a digest.
    #[inline]
    pub fn of_digest(&self, digest: &Digest) -> u64 {
        self.hash(digest.as_bytes())
    }

    /// NH of UMAC (Black et al., 1999) in 64-bit words: the 128-bit sums of two different inputs
    /// collide with probability 2^-64 over the seeds. A final product folds the sum to 64 bits.
    #[inline]
    fn hash(&self, bytes: &[u8; 32]) -> u64 {
        let (words, _) = bytes.as_chunks::<8>();
        let word = |at: usize| u64::from_le_bytes(words[at]).wrapping_add(self.0[at]);
        let product = |one: u64, other: u64| u128::from(one) * u128::from(other);
        let sum = product(word(0), word(1)).wrapping_add(product(word(2), word(3)));
        let folded = product(low(sum) ^ self.0[4], low(sum >> 64) ^ self.0[5]);
        low(folded) ^ low(folded >> 64)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is what is wanted")]
fn low(wide: u128) -> u64 {
    wide as u64
}

impl std::fmt::Debug for FingerprintSeed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FingerprintSeed(secret)")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Keys that differ only in the word at `place`.
    fn key(number: u64, place: usize) -> BlockKey {
        let mut bytes = [0; 32];
        bytes[place * 8..][..8].copy_from_slice(&number.to_le_bytes());
        BlockKey::from_bytes(bytes)
    }

    #[test]
    fn fingerprints_are_uniform_in_every_bit_range_that_tables_use() {
        const COUNT: u64 = 1 << 14;
        for place in 0..4 {
            for seed in [0, 1, u64::MAX] {
                let seed = FingerprintSeed::new(seed);
                let prints = (0..COUNT).map(|number| seed.of_key(&key(number, place)));
                let prints: Vec<u64> = prints.collect();
                assert_eq!(prints.iter().collect::<HashSet<_>>().len(), prints.len());
                for (shift, bits) in [(0, 8), (20, 8), (32, 8), (56, 8)] {
                    let mut counts = vec![0_u64; 1 << bits];
                    for print in &prints {
                        counts[usize::try_from(print >> shift & 0xff).expect("8 bits")] += 1;
                    }
                    // 64 are expected in each; random ones stay below 110.
                    let most = counts.iter().max().expect("256 counts");
                    assert!(*most < 120, "word {place}, bits from {shift}: {most}");
                }
            }
        }
    }

    #[test]
    fn fingerprints_depend_on_the_seed() {
        let key = key(7, 0);
        assert_eq!(FingerprintSeed::new(1).of_key(&key), FingerprintSeed::new(1).of_key(&key));
        assert_ne!(FingerprintSeed::new(1).of_key(&key), FingerprintSeed::new(2).of_key(&key));
        assert_eq!(format!("{:?}", FingerprintSeed::new(1)), "FingerprintSeed(secret)");
    }
}
