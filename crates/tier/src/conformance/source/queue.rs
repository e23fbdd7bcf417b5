//! A queue that checks what a source does with its blocks.

use std::collections::{BTreeMap, VecDeque};

use cascade_memory::Pool;

use crate::conformance::block_store::bytes_of;
use crate::source::LocatedBlock;
use crate::tier::{Load, LoadOutcome, LoadQueue};

use super::LATE_BLOCKS_MAX;

/// Gives out located blocks; panics if one ends twice, never, or with other bytes.
pub(super) struct CheckedQueue<'a> {
    pool: &'a Pool,
    waiting: VecDeque<LocatedBlock>,
    taken: BTreeMap<usize, LocatedBlock>,
    next_number: usize,
    /// Maximum number of blocks in flight.
    pub(super) in_flight_max: usize,
    /// Gives out each block again once it has ended.
    pub(super) is_endless: bool,
    /// Whether the call should have ended: from then on it may take few more blocks.
    pub(super) is_over: Box<dyn Fn() -> bool + 'a>,
    late: u64,
    /// Whether the queue is empty from now on.
    pub(super) ends: Box<dyn Fn() -> bool + 'a>,
    pub(super) hits: u64,
    pub(super) misses: u64,
    pub(super) failures: u64,
}

impl<'a> CheckedQueue<'a> {
    pub(super) fn new(pool: &'a Pool, blocks: &[LocatedBlock]) -> Self {
        Self {
            pool,
            waiting: blocks.iter().copied().collect(),
            taken: BTreeMap::new(),
            next_number: 0,
            in_flight_max: 64,
            is_endless: false,
            is_over: Box::new(|| false),
            late: 0,
            ends: Box::new(|| false),
            hits: 0,
            misses: 0,
            failures: 0,
        }
    }

    /// Checks after the call that every block has ended.
    pub(super) fn assert_ended(&self) {
        assert!(self.taken.is_empty(), "{} blocks did not end", self.taken.len());
    }
}

impl LoadQueue for CheckedQueue<'_> {
    fn next_load(&mut self) -> Option<(usize, Load)> {
        if self.taken.len() >= self.in_flight_max || (self.ends)() {
            return None;
        }
        let block = self.waiting.pop_front()?;
        if (self.is_over)() {
            self.late += 1;
            assert!(self.late <= LATE_BLOCKS_MAX, "the call takes blocks after its end");
        }
        let number = self.next_number;
        self.next_number += 1;
        self.taken.insert(number, block);
        let slab = self.pool.allocate(block.facts.bytes as usize);
        let slab = slab.expect("the blocks in flight fit the pool");
        Some((number, Load { key: block.facts.key, address: block.address, slab }))
    }

    fn ended(&mut self, number: usize, outcome: LoadOutcome) {
        let block = self.taken.remove(&number);
        let block = block.unwrap_or_else(|| panic!("block {number} ended, but was not taken"));
        match outcome {
            LoadOutcome::Hit(slab) => {
                let bytes = bytes_of(&block.facts.key, block.facts.bytes as usize);
                assert!(
                    slab.host() == Some(&bytes),
                    "{} came back with other bytes",
                    block.facts.key
                );
                self.hits += 1;
            }
            LoadOutcome::Gone | LoadOutcome::Damaged => self.misses += 1,
            LoadOutcome::Failed(_) => self.failures += 1,
        }
        if self.is_endless {
            self.waiting.push_back(block);
        }
    }
}
