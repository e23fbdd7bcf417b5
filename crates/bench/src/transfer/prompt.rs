//! The KV of a prompt: how many pages of what length, which of both processes' pages, and what they
//! contain. Both processes compute it from numbers.

use cascade_replay::random::SplitMix64;
use serde::{Deserialize, Serialize};

/// The tokens of a block.
pub(super) const BLOCK_TOKENS: u64 = 16;
/// Of each pool, one page in this many holds no block of the prompt.
const SPARE: u64 = 8;
/// Set in the offset that a page has at first where pages arrive.
const BEFORE: u64 = 1 << 62;

/// The paged KV of a model. Each layer has a region of keys and one of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Geometry {
    /// Layers of the model.
    pub(super) layers: u64,
    /// Blocks of the longest prompt.
    pub(super) blocks: u64,
    /// Length of the keys of one block in one layer, and of its values.
    pub(super) page_bytes: u64,
}

/// Which pages a round moves: page `source[i]` of one process to page `target[i]` of the other, in
/// all layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mapping {
    pub(super) source: Vec<u64>,
    pub(super) target: Vec<u64>,
}

impl Geometry {
    /// Pages of each region.
    pub(super) fn pool_pages(&self) -> u64 {
        self.blocks + self.blocks.div_ceil(SPARE)
    }

    /// Length of a region.
    pub(super) fn region_bytes(&self) -> u64 {
        self.pool_pages() * self.page_bytes
    }

    /// Keys and values of one layer.
    pub(super) fn regions(&self) -> u64 {
        2 * self.layers
    }

    /// Bytes of one layer of a prompt of so many blocks.
    pub(super) fn layer_bytes(&self, blocks: u64) -> u64 {
        2 * blocks * self.page_bytes
    }

    /// The pages of a round, in random order on both sides.
    pub(super) fn mapping(&self, round: u64, blocks: u64) -> Mapping {
        let mut numbers = SplitMix64(0x7472_616e_7366_6572 ^ round << 20);
        let mut pages = || shuffled(&mut numbers, self.pool_pages(), blocks);
        Mapping { source: pages(), target: pages() }
    }

    /// Where in the pattern the bytes of a page of the sending process begin.
    pub(super) fn pattern_offset(&self, region: u64, page: u64) -> u64 {
        (region * self.pool_pages() + page) * self.page_bytes
    }
}

/// So many different numbers below `limit`, in random order.
fn shuffled(numbers: &mut SplitMix64, limit: u64, count: u64) -> Vec<u64> {
    let mut all: Vec<u64> = (0..limit).collect();
    for last in (1..all.len()).rev() {
        let other = numbers.below(last as u64 + 1);
        all.swap(last, usize::try_from(other).expect("an index"));
    }
    all.truncate(usize::try_from(count).expect("a number of pages"));
    all
}

/// What the pages of the receiving process must contain.
#[derive(Debug, Clone)]
pub(super) struct Expected {
    /// For each page, the page of the sending process whose bytes it has, if one arrived.
    sources: Vec<Option<u64>>,
}

impl Expected {
    /// No page has arrived.
    pub(super) fn nothing(geometry: &Geometry) -> Self {
        Self { sources: vec![None; usize::try_from(geometry.pool_pages()).expect("a number")] }
    }

    /// The pages of a round have arrived.
    pub(super) fn arrive(&mut self, mapping: &Mapping) {
        for (source, target) in mapping.source.iter().zip(&mapping.target) {
            self.sources[usize::try_from(*target).expect("an index")] = Some(*source);
        }
    }

    /// Where in the pattern the bytes of each page of a region begin.
    pub(super) fn pattern_offsets(
        &self,
        geometry: &Geometry,
        region: u64,
    ) -> impl Iterator<Item = u64> {
        self.sources.iter().zip(0..).map(move |(source, page)| match source {
            Some(source) => geometry.pattern_offset(region, *source),
            None => BEFORE | geometry.pattern_offset(region, page),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const GEOMETRY: Geometry = Geometry { layers: 3, blocks: 20, page_bytes: 64 };

    #[test]
    fn a_round_moves_different_pages_in_an_order_of_its_own() {
        let mapping = GEOMETRY.mapping(1, 20);
        for pages in [&mapping.source, &mapping.target] {
            let different: BTreeSet<_> = pages.iter().collect();
            assert_eq!((pages.len(), different.len()), (20, 20));
            assert!(pages.iter().all(|page| *page < GEOMETRY.pool_pages()));
            assert!(pages.windows(2).any(|pair| pair[0] > pair[1]), "not in order: {pages:?}");
        }
        assert_ne!(mapping.source, mapping.target);
        assert_ne!(mapping, GEOMETRY.mapping(2, 20));
        assert_eq!(mapping, GEOMETRY.mapping(1, 20), "both processes compute the same");
    }

    #[test]
    fn no_two_pages_have_the_same_bytes_and_pages_that_did_not_arrive_keep_theirs() {
        let mut expected = Expected::nothing(&GEOMETRY);
        let before: Vec<_> =
            (0..6).flat_map(|it| expected.pattern_offsets(&GEOMETRY, it)).collect();
        let (round, pages) = (GEOMETRY.mapping(1, 5), GEOMETRY.pool_pages());
        expected.arrive(&round);
        let after: Vec<_> = (0..6).flat_map(|it| expected.pattern_offsets(&GEOMETRY, it)).collect();
        assert_eq!(after.iter().collect::<BTreeSet<_>>().len(), after.len());
        let changed = before.iter().zip(&after).filter(|(before, after)| before != after);
        assert_eq!(changed.count(), 6 * 5);
        let [source, target] = [round.source[0], round.target[0]].map(|it| it + 2 * pages);
        assert_eq!(after[usize::try_from(target).unwrap()], source * 64);
    }
}
