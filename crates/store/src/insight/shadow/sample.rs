//! The sample: a share of all blocks, chosen by their fingerprints alone.
//!
//! The choice is made per block, not per chain. Leaves are evicted first, so a block is a hit for
//! its request exactly if it is resident: single blocks show what whole chains would. With a choice
//! per chain, one popular prompt inside or outside the sample would decide the result
//! (`docs/decisions/0015-shadow-caches.md` has the figures).

/// One block in `2^shift`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Sample {
    shift: u32,
}

/// Largest shift: beyond it, no tier would have a sampled block.
const SHIFT_MAX: u32 = 40;

impl Sample {
    /// The largest sample with at most `most` of `blocks` blocks.
    pub(super) fn of_at_most(blocks: u64, most: u64) -> Self {
        let shift = (0..SHIFT_MAX).find(|shift| blocks >> shift <= most);
        Self { shift: shift.unwrap_or(SHIFT_MAX) }
    }

    /// Half of the sample, and a subset of it.
    pub(super) fn halved(self) -> Self {
        Self { shift: (self.shift + 1).min(SHIFT_MAX) }
    }

    /// Whether a block is in the sample.
    pub(super) fn holds(self, fingerprint: u64) -> bool {
        // The product's high bits depend on the whole fingerprint, and differ from the bits that
        // the tables use. One multiplication, because every block of every lookup is tested.
        // A larger shift has a lower bound, so smaller samples are subsets of larger ones.
        fingerprint.wrapping_mul(0xd6e8_feb8_6659_fd93) <= u64::MAX >> self.shift
    }

    /// How many blocks each sampled one represents.
    pub(super) fn weight(self) -> u64 {
        1 << self.shift
    }

    /// The sample's share of a quantity, at least one.
    pub(super) fn share(self, of: u64) -> u64 {
        (of >> self.shift).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_has_its_share_of_blocks_and_contains_its_half() {
        let mut sample = Sample::of_at_most(1000, 1000);
        assert_eq!(sample.weight(), 1);
        for shift in 0..6 {
            let held = |sample: Sample| (0..100_000_u64).filter(move |block| sample.holds(*block));
            let expected = 100_000 >> shift;
            let count = held(sample).count();
            assert!(count.abs_diff(expected) <= expected / 10, "{count} of {expected}");
            assert!(held(sample.halved()).all(|block| sample.holds(block)));
            sample = sample.halved();
        }
    }

    #[test]
    fn a_sample_has_at_most_the_requested_number_of_blocks() {
        assert_eq!(Sample::of_at_most(2048, 2048).weight(), 1);
        assert_eq!(Sample::of_at_most(2049, 2048).weight(), 2);
        assert_eq!(Sample::of_at_most(10_000_000, 2048).weight(), 8192);
        assert_eq!(Sample::of_at_most(u64::MAX, 2048).share(5), 1);
    }
}
