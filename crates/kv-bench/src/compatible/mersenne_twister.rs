//! The generator of Python's `random` and of NumPy: a seed gives what it gives in the original.

/// Words of the state.
const WORDS: usize = 624;
/// Distance of the words that make the next one.
const DISTANCE: usize = 397;

/// MT19937, seeded and drawn from as Python does.
#[derive(Debug, Clone)]
pub struct MersenneTwister {
    words: Box<[u32]>,
    at: usize,
}

impl MersenneTwister {
    /// The generator after `random.seed(seed)`.
    pub fn new(seed: u64) -> Self {
        let high = u32::try_from(seed >> 32).unwrap_or(u32::MAX);
        let low = u32::try_from(seed & u64::from(u32::MAX)).unwrap_or(u32::MAX);
        let key = [low, high];
        let key = if high == 0 { &key[..1] } else { &key[..] };
        let mut words = first_words(19_650_218);
        let mut at = 1;
        for step in 0..WORDS {
            let before = words[at - 1];
            let part = step % key.len();
            let mixed = words[at] ^ (before ^ (before >> 30)).wrapping_mul(1_664_525);
            words[at] = mixed.wrapping_add(key[part]).wrapping_add(small(part));
            at = next_position(&mut words, at);
        }
        for _ in 1..WORDS {
            let before = words[at - 1];
            let mixed = words[at] ^ (before ^ (before >> 30)).wrapping_mul(1_566_083_941);
            words[at] = mixed.wrapping_sub(small(at));
            at = next_position(&mut words, at);
        }
        words[0] = 1 << 31;
        Self { words, at: WORDS }
    }

    /// The generator after `numpy.random.seed(seed)`.
    pub fn of_numpy(seed: u64) -> Self {
        let low = u32::try_from(seed & u64::from(u32::MAX)).unwrap_or(u32::MAX);
        Self { words: first_words(low), at: WORDS }
    }

    /// A number of 32 bits: `random.getrandbits(32)`.
    pub fn next_u32(&mut self) -> u32 {
        if self.at == WORDS {
            self.twist();
            self.at = 0;
        }
        let mut word = self.words[self.at];
        self.at += 1;
        word ^= word >> 11;
        word ^= (word << 7) & 0x9d2c_5680;
        word ^= (word << 15) & 0xefc6_0000;
        word ^ (word >> 18)
    }

    /// A number from zero to below one: `random.random()`.
    pub fn unit(&mut self) -> f64 {
        let (high, low) = (self.next_u32() >> 5, self.next_u32() >> 6);
        (f64::from(high) * 67_108_864.0 + f64::from(low)) / 9_007_199_254_740_992.0
    }

    /// A number below `limit`, which is not zero: the position that `random.choice` takes.
    pub fn below(&mut self, limit: u32) -> u32 {
        let unused = limit.leading_zeros();
        loop {
            let number = self.next_u32() >> unused;
            if number < limit {
                return number;
            }
        }
    }

    /// A whole number of a range, both ends included: `random.randint`.
    pub fn between(&mut self, (least, most): (u32, u32)) -> u32 {
        least + self.below(most - least + 1)
    }

    /// A number of a range: `random.uniform`.
    pub fn uniform(&mut self, (least, most): (f64, f64)) -> f64 {
        least + (most - least) * self.unit()
    }

    fn twist(&mut self) {
        for at in 0..WORDS {
            let (high, low) = (self.words[at], self.words[(at + 1) % WORDS]);
            let joined = (high & (1 << 31)) | (low & !(1 << 31));
            let odd = if joined & 1 == 1 { 0x9908_b0df } else { 0 };
            self.words[at] = self.words[(at + DISTANCE) % WORDS] ^ (joined >> 1) ^ odd;
        }
    }
}

fn first_words(seed: u32) -> Box<[u32]> {
    let mut words = vec![seed; WORDS];
    for at in 1..WORDS {
        let before = words[at - 1];
        words[at] = (before ^ (before >> 30)).wrapping_mul(1_812_433_253).wrapping_add(small(at));
    }
    words.into_boxed_slice()
}

/// The position after `at`. At the end, the last word becomes the first one.
fn next_position(words: &mut [u32], at: usize) -> usize {
    if at + 1 < WORDS {
        return at + 1;
    }
    words[0] = words[WORDS - 1];
    1
}

fn small(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What Python 3 prints after `random.seed(seed)`.
    #[test]
    fn numbers_are_those_of_python() {
        for (seed, words, units) in [
            (
                0,
                [3_626_764_237, 1_654_615_998, 3_255_389_356],
                [0.890_243_920_837_131, 0.040_484_378_180_777_55],
            ),
            (
                42,
                [2_746_317_213, 478_163_327, 107_420_369],
                [0.741_550_499_759_832_9, 0.244_891_853_803_476_22],
            ),
            (
                (1 << 40) + 7,
                [2_635_837_658, 3_209_733_218, 3_500_038_837],
                [0.937_932_416_386_988, 0.639_523_644_524_743_3],
            ),
        ] {
            let mut random = MersenneTwister::new(seed);
            assert_eq!([(); 3].map(|()| random.next_u32()), words, "{seed}");
            let drawn = [(); 2].map(|()| random.unit().to_bits());
            assert_eq!(drawn, units.map(f64::to_bits), "{seed}");
        }
    }

    #[test]
    fn each_number_of_a_range_occurs_about_as_often() {
        let mut random = MersenneTwister::new(1);
        let mut counts = [0; 5];
        for _ in 0..5000 {
            counts[random.between((3, 7)) as usize - 3] += 1;
        }
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
    }
}
