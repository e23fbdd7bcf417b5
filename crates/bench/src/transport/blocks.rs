//! Which blocks a batch moves, and what they contain. Both processes compute it from numbers.

use cascade_transport::conformance::Numbers;
use serde::{Deserialize, Serialize};

/// The sequence of batches of one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Sequence {
    /// Distinguishes the rows of a run.
    pub(super) seed: u64,
    /// Length of each region.
    pub(super) region_bytes: u64,
    /// Length of a block.
    pub(super) block_bytes: u64,
    /// Blocks of a batch.
    pub(super) batch: u64,
    /// Threads. Each writes blocks of a part of its own.
    pub(super) threads: u64,
    /// Batches of each thread.
    pub(super) iterations: u64,
}

impl Sequence {
    /// The blocks of a batch: source and target, by their index. No target occurs twice.
    pub(super) fn blocks(&self, thread: u64, iteration: u64) -> impl Iterator<Item = (u64, u64)> {
        let mut numbers = Numbers(self.seed ^ (thread << 32) ^ (iteration << 40));
        let sources = self.region_bytes / self.block_bytes;
        let part = sources / self.threads;
        let source = Walk::new(&mut numbers, sources);
        let target = Walk::new(&mut numbers, part);
        (0..self.batch).map(move |at| (source.at(at), thread * part + target.at(at)))
    }
}

/// A walk over all numbers below a limit, in an order that hardware does not predict.
#[derive(Debug, Clone, Copy)]
struct Walk {
    start: u64,
    stride: u64,
    count: u64,
}

impl Walk {
    fn new(numbers: &mut Numbers, count: u64) -> Self {
        // An odd stride visits each of a power of two once.
        debug_assert!(count.is_power_of_two(), "regions and blocks are powers of two");
        Self { start: numbers.below(count), stride: numbers.below(count) | 1, count }
    }

    fn at(&self, step: u64) -> u64 {
        step.wrapping_mul(self.stride).wrapping_add(self.start) % self.count
    }
}

/// The word of the source region at this offset.
pub(super) fn word(offset: u64) -> u64 {
    // The finaliser of SplitMix64: neighbouring offsets have unlike words.
    let mixed = offset.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Fills a buffer with the pattern from an offset that is a multiple of eight.
pub(super) fn fill(offset: u64, into: &mut [u8]) {
    for (word_at, into) in (offset..).step_by(8).zip(into.chunks_mut(8)) {
        into.copy_from_slice(&word(word_at).to_le_bytes()[..into.len()]);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn no_target_occurs_twice_and_threads_have_parts_of_their_own() {
        let sequence = Sequence {
            seed: 3,
            region_bytes: 1 << 20,
            block_bytes: 1 << 10,
            batch: 200,
            threads: 4,
            iterations: 2,
        };
        let mut seen = BTreeSet::new();
        for thread in 0..4 {
            let blocks: Vec<_> = sequence.blocks(thread, 1).collect();
            assert!(blocks.iter().all(|(source, target)| *source < 1024 && *target < 1024));
            seen.extend(blocks.iter().map(|(_, target)| *target));
        }
        assert_eq!(seen.len(), 800);
    }
}
