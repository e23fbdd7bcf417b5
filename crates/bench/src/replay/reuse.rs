//! How far apart the uses of a block lie, and what a cache without limit would hit.

use std::collections::HashSet;

use serde::Serialize;

use crate::trace::Trace;

/// How many other blocks are used between two uses of one.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct ReuseDistances {
    /// Pairs of a bound and the count of uses at a distance below it (and not below the last).
    pub buckets: Vec<(u64, u64)>,
    /// Uses of blocks that had not been used before.
    pub first_uses: u64,
}

impl ReuseDistances {
    /// Distances of all uses of a trace, in powers of two.
    pub fn of(trace: &Trace) -> Self {
        let references = usize::try_from(trace.block_count()).expect("a trace is in memory");
        let unique = usize::try_from(trace.unique_blocks).expect("a trace is in memory");
        let mut latest: Vec<Option<usize>> = vec![None; unique];
        let mut is_latest = Marks::new(references);
        let mut distances = Self::default();
        let mut counts = [0_u64; 64];
        let blocks = trace.requests.iter().flat_map(|request| &request.blocks);
        for (now, block) in blocks.enumerate() {
            let last = &mut latest[usize::try_from(*block).expect("below unique_blocks")];
            match last.replace(now) {
                None => distances.first_uses += 1,
                Some(before) => {
                    let between = is_latest.count_after(before);
                    counts[(u64::BITS - between.leading_zeros()) as usize] += 1;
                    is_latest.clear(before);
                }
            }
            is_latest.set(now);
        }
        let used = counts.iter().rposition(|count| *count > 0).map_or(0, |at| at + 1);
        let bounded = counts[..used].iter().enumerate();
        distances.buckets = bounded.map(|(bit, count)| (1 << bit, *count)).collect();
        distances
    }

    /// Uses of blocks that had been used before.
    pub fn reuses(&self) -> u64 {
        self.buckets.iter().map(|(_, count)| count).sum()
    }

    /// The smallest bound below which at least `share` of the reuses lie.
    pub fn bound_of(&self, share: f64) -> Option<u64> {
        let mut sum = 0;
        let wanted = self.reuses() as f64 * share;
        self.buckets.iter().find_map(|(bound, count)| {
            sum += count;
            (sum > 0 && sum as f64 >= wanted).then_some(*bound)
        })
    }
}

/// How many blocks of each request a cache without limit hits, unbroken from the request's start.
pub fn endless_cache_hits(trace: &Trace) -> Vec<u64> {
    let mut seen = HashSet::new();
    let hits = trace.requests.iter().map(|request| {
        let leading = request.blocks.iter().take_while(|block| seen.contains(*block)).count();
        seen.extend(request.blocks.iter().copied());
        leading as u64
    });
    hits.collect()
}

/// A set of positions that counts how many lie after one, in logarithmic time (a Fenwick tree).
struct Marks {
    sums: Vec<u64>,
    total: u64,
}

impl Marks {
    fn new(positions: usize) -> Self {
        Self { sums: vec![0; positions + 1], total: 0 }
    }

    fn set(&mut self, position: usize) {
        self.total += 1;
        self.walk_up(position, |sum| *sum += 1);
    }

    fn clear(&mut self, position: usize) {
        self.total -= 1;
        self.walk_up(position, |sum| *sum -= 1);
    }

    fn walk_up(&mut self, position: usize, change: impl Fn(&mut u64)) {
        let mut at = position + 1;
        while at < self.sums.len() {
            change(&mut self.sums[at]);
            at += at & at.wrapping_neg();
        }
    }

    fn count_after(&self, position: usize) -> u64 {
        let mut up_to = 0;
        let mut at = position + 1;
        while at > 0 {
            up_to += self.sums[at];
            at &= at - 1;
        }
        self.total - up_to
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::trace::TraceRequest;

    fn trace(requests: &[Vec<u64>]) -> Trace {
        let request = |blocks: &Vec<u64>| TraceRequest {
            at: Duration::ZERO,
            blocks: blocks.clone(),
            input_tokens: 0,
            output_tokens: 0,
            partial_tail: false,
            session: None,
            stop: None,
        };
        let unique_blocks = requests.iter().flatten().max().map_or(0, |most| most + 1);
        Trace {
            requests: requests.iter().map(request).collect(),
            unique_blocks,
            ..Trace::default()
        }
    }

    #[test]
    fn hits_count_only_while_unbroken() {
        assert_eq!(endless_cache_hits(&trace(&[vec![0, 1], vec![0, 2, 1], vec![3, 0]])), [0, 1, 0]);
    }

    proptest! {
        #[test]
        fn distances_are_those_of_a_list_moved_to_front(
            requests in prop::collection::vec(prop::collection::vec(0_u64..40, 0..12), 0..40),
        ) {
            let mut list: Vec<u64> = Vec::new();
            let (mut first_uses, mut counts) = (0, [0_u64; 64]);
            for block in requests.iter().flatten() {
                match list.iter().position(|other| other == block) {
                    Some(at) => {
                        list.remove(at);
                        counts[(64 - (at as u64).leading_zeros()) as usize] += 1;
                    }
                    None => first_uses += 1,
                }
                list.insert(0, *block);
            }
            let found = ReuseDistances::of(&trace(&requests));
            prop_assert_eq!(found.first_uses, first_uses);
            for (at, (_, count)) in found.buckets.iter().enumerate() {
                prop_assert_eq!(*count, counts[at]);
            }
            prop_assert_eq!(found.reuses(), counts.iter().sum::<u64>());
        }
    }
}
