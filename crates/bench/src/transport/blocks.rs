//! Which blocks a batch moves, and what they contain. Both processes compute it from numbers.

use cascade_replay::random::SplitMix64;
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
        let mut numbers = SplitMix64(self.seed ^ (thread << 32) ^ (iteration << 40));
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
    fn new(numbers: &mut SplitMix64, count: u64) -> Self {
        // An odd stride visits each of a power of two once.
        debug_assert!(count.is_power_of_two(), "regions and blocks are powers of two");
        Self { start: numbers.below(count), stride: numbers.below(count) | 1, count }
    }

    fn at(&self, step: u64) -> u64 {
        step.wrapping_mul(self.stride).wrapping_add(self.start) % self.count
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// What happened: the numbers of all batches of a row began alike, so that each batch moved the
    /// blocks of the one before it, which were in a cache.
    #[test]
    fn the_batches_of_a_row_move_different_blocks() {
        let region_bytes = 512 << 20;
        for block_bytes in [1 << 10, 16 << 10, 64 << 10] {
            let (batch, threads, iterations) = (100, 2, 8);
            let sequence =
                Sequence { seed: 3, region_bytes, block_bytes, batch, threads, iterations };
            let each = || (0..2).flat_map(|thread| (0..8).map(move |it| (thread, it)));
            let blocks = |at: (u64, u64)| sequence.blocks(at.0, at.1);
            let sources: BTreeSet<_> = each().flat_map(|at| blocks(at).map(|it| it.0)).collect();
            let targets: BTreeSet<_> = each().flat_map(|at| blocks(at).map(|it| it.1)).collect();
            assert!(sources.len() > 1200, "{} of 1600 are different", sources.len());
            assert!(targets.len() > 1200, "{} of 1600 are different", targets.len());
        }
    }

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
