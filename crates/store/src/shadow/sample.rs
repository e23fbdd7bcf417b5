//! Which blocks a shadow follows: a share of all, chosen by their fingerprints alone.
//!
//! The choice is made block by block, not chain by chain: a block is a hit for its request exactly
//! if it is resident, because leaves leave first, so single blocks tell what whole chains would.
//! Chosen by chain, one popular prompt in or out of the sample would decide the outcome
//! (`docs/decisions/0015-shadow-caches.md` has the figures).

/// One block in `2^shift`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Sample {
    shift: u32,
}

/// Shifts beyond this would leave nothing of any tier.
const SHIFT_MAX: u32 = 40;

impl Sample {
    /// The largest share that leaves at most `most` of so many blocks.
    pub(super) fn of_at_most(blocks: u64, most: u64) -> Self {
        let shift = (0..SHIFT_MAX).find(|shift| blocks >> shift <= most);
        Self { shift: shift.unwrap_or(SHIFT_MAX) }
    }

    /// Half of it: whatever the half holds, the whole held too.
    pub(super) fn halved(self) -> Self {
        Self { shift: (self.shift + 1).min(SHIFT_MAX) }
    }

    /// Whether it holds a block.
    pub(super) fn holds(self, fingerprint: u64) -> bool {
        // The product's high bits depend on all of the fingerprint, and not in the way in which the
        // tables use it. One multiplication: every block of every lookup comes by here.
        fingerprint.wrapping_mul(0xd6e8_feb8_6659_fd93) <= u64::MAX >> self.shift
    }

    /// How many blocks each one of it stands for.
    pub(super) fn weight(self) -> u64 {
        1 << self.shift
    }

    /// Its share of a quantity, at least one.
    pub(super) fn share(self, of: u64) -> u64 {
        (of >> self.shift).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_holds_its_share_and_its_half_lies_in_it() {
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
    fn the_share_leaves_at_most_what_was_asked() {
        assert_eq!(Sample::of_at_most(2048, 2048).weight(), 1);
        assert_eq!(Sample::of_at_most(2049, 2048).weight(), 2);
        assert_eq!(Sample::of_at_most(10_000_000, 2048).weight(), 8192);
        assert_eq!(Sample::of_at_most(u64::MAX, 2048).share(5), 1);
    }
}
