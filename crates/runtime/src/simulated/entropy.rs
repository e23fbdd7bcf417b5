//! The generator of random numbers, and the hash of events.

/// Multiplier and increment of `SplitMix64`: the golden ratio in 64 bits.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// A generator of pseudo-random numbers: `SplitMix64` (Steele, Lea, Flood, 2014).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The generator of a seed. Each stream of a seed has other numbers.
    pub fn new(seed: u64, stream: u64) -> Self {
        Self(mix(seed.wrapping_add(GOLDEN)) ^ mix(stream.wrapping_mul(GOLDEN).wrapping_add(1)))
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0)
    }

    /// A number from zero up to, but without, `count`; zero for a `count` of zero.
    pub fn below(&mut self, count: u64) -> u64 {
        high(u128::from(self.next_u64()) * u128::from(count))
    }

    /// An index into a list of `count` entries.
    #[expect(clippy::cast_possible_truncation, reason = "it is below a usize")]
    pub fn index_below(&mut self, count: usize) -> usize {
        self.below(count as u64) as usize
    }

    /// True once in `count` calls, in the mean; never for zero, and then nothing is drawn.
    pub fn one_in(&mut self, count: u32) -> bool {
        count > 0 && self.below(u64::from(count)) == 0
    }

    /// Fills the buffer.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.next_u64().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}

fn mix(state: u64) -> u64 {
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// A hash of a sequence of events. Their order matters.
#[derive(Debug, Clone, Copy)]
pub(super) struct EventHash(u64);

impl EventHash {
    pub(super) fn new(seed: u64) -> Self {
        Self(mix(seed))
    }

    /// The hash of the sequence with one more event.
    #[inline]
    pub(super) fn with(self, event: u64) -> Self {
        // For a given event, different states give different results, and the reverse. So if one
        // event of two sequences differs, their hashes differ, also after equal later events.
        Self((self.0 ^ event).wrapping_mul(GOLDEN).rotate_left(29).wrapping_add(GOLDEN))
    }

    pub(super) fn value(self) -> u64 {
        mix(self.0)
    }
}

fn high(wide: u128) -> u64 {
    (wide >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_and_seeds_have_different_numbers() {
        let first = |seed, stream| Random::new(seed, stream).next_u64();
        let numbers = [first(0, 0), first(0, 1), first(1, 0), first(1, 1)];
        for (at, number) in numbers.iter().enumerate() {
            assert!(!numbers[..at].contains(number));
        }
        assert_eq!(first(7, 3), first(7, 3));
    }

    #[test]
    fn numbers_below_a_count_are_uniform() {
        let mut random = Random::new(1, 0);
        let mut counts = [0_u32; 10];
        for _ in 0..10_000 {
            counts[random.index_below(10)] += 1;
        }
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
        assert_eq!((random.below(0), random.below(1)), (0, 0));
    }

    #[test]
    fn the_hash_of_events_depends_on_their_order() {
        let hash = |events: &[u64]| {
            events.iter().fold(EventHash::new(0), |hash, event| hash.with(*event)).value()
        };
        assert_ne!(hash(&[1, 2]), hash(&[2, 1]));
        assert_ne!(hash(&[0]), hash(&[0, 0]));
        assert_eq!(hash(&[1, 2]), hash(&[1, 2]));
    }
}
