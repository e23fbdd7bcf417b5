//! Reuse distances of a trace, and the hit rate of LRU at every capacity.

use super::ratio;
use crate::trace::Trace;

/// The distribution of reuse distances: the number of other unique blocks between two uses of one.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct ReuseDistances {
    /// Element `n` counts uses at a distance from `2^(n-1)` to below `2^n`; element 0, distance 0.
    pub uses_by_octave: Vec<u64>,
    /// Number of first uses of a block.
    pub first_uses: u64,
    /// Number of all uses.
    pub uses: u64,
}

impl ReuseDistances {
    /// The share of uses that LRU hits with a capacity of `2^n` blocks, for each `n` from zero.
    pub fn hit_rates(&self) -> Vec<(u64, f64)> {
        let mut hits = 0;
        let octaves = self.uses_by_octave.iter().enumerate();
        octaves
            .map(|(octave, uses)| {
                hits += uses;
                (1 << octave, ratio(hits, self.uses))
            })
            .collect()
    }
}

/// Measures all reuse distances in one pass: Mattson's stack algorithm (1970) with a Fenwick tree.
///
/// Each use is a time. The tree marks the last use of every block, so the marks after the previous
/// use of a block count the other blocks used since then.
///
/// # Panics
/// If the trace's block numbers are not dense.
pub fn reuse_distances(trace: &Trace) -> ReuseDistances {
    let references = usize::try_from(trace.block_count()).expect("a trace that fits in memory");
    let blocks = usize::try_from(trace.unique_blocks).expect("a trace that fits in memory");
    let mut tree = Fenwick { sums: vec![0; references + 1] };
    let mut last_use: Vec<Option<usize>> = vec![None; blocks];
    let mut distances =
        ReuseDistances { uses_by_octave: Vec::new(), first_uses: 0, uses: references as u64 };
    let mut time = 0;
    for request in &trace.requests {
        // From the last block to the root, so that the root counts as used last: LRU then evicts
        // leaves before their parents.
        for block in request.blocks.iter().rev() {
            let last = &mut last_use[usize::try_from(*block).expect("block numbers are dense")];
            match *last {
                Some(before) => {
                    let distance = tree.sum(time) - tree.sum(before + 1);
                    let octave = (u64::BITS - distance.leading_zeros()) as usize;
                    if distances.uses_by_octave.len() <= octave {
                        distances.uses_by_octave.resize(octave + 1, 0);
                    }
                    distances.uses_by_octave[octave] += 1;
                    tree.add(before, false);
                }
                None => distances.first_uses += 1,
            }
            tree.add(time, true);
            *last = Some(time);
            time += 1;
        }
    }
    distances
}

/// Counts of marked times, summed over prefixes in logarithmic time.
struct Fenwick {
    sums: Vec<u64>,
}

impl Fenwick {
    fn add(&mut self, at: usize, is_marked: bool) {
        let mut node = at + 1;
        while node < self.sums.len() {
            let sum = self.sums[node];
            self.sums[node] = if is_marked { sum + 1 } else { sum - 1 };
            node += node & node.wrapping_neg();
        }
    }

    /// Number of marks before a time.
    fn sum(&self, end: usize) -> u64 {
        let (mut node, mut sum) = (end, 0);
        while node > 0 {
            sum += self.sums[node];
            node &= node - 1;
        }
        sum
    }
}
