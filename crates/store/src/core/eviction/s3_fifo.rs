//! S3-FIFO: a small queue for new blocks, a main queue for blocks that were used again, and ghosts
//! of blocks evicted from the small queue (Yang et al., SOSP '23).

use std::time::Duration;

use super::{
    BlockList, BlockTable, ChainPart, ChainProgress, Ghosts, Policy, RemovalReason, Search, Slot,
    Visits,
};

/// Share of all blocks up to which blocks are evicted from the main queue first.
const SMALL_PERCENT: usize = 10;
const USES_MAX: u32 = 3;
/// Blocks inserted at most this many requests apart count as put together.
const SAME_PUT_REQUESTS: u32 = 8;

/// Blocks searched in one queue before the other queue is searched: if all blocks of a queue have
/// children in the other queue, none of them can be evicted.
const SEARCH_BLOCKS: usize = 256;

/// A block's state: bit 0 is its queue, bits 1 and 2 its uses, the others the number of the request
/// that inserted it.
#[derive(Debug, Clone, Copy)]
struct S3FifoState(u32);

impl S3FifoState {
    fn new(is_main: bool, request: u32) -> Self {
        Self(u32::from(is_main) | request << 3)
    }

    fn is_main(self) -> bool {
        self.0 & 1 == 1
    }

    fn uses(self) -> u32 {
        (self.0 >> 1) & USES_MAX
    }

    fn with_uses(self, uses: u32) -> Self {
        Self(self.0 & !(USES_MAX << 1) | uses.min(USES_MAX) << 1)
    }

    /// Number of requests between the other block's insertion and this one's.
    fn since(self, other: Self) -> u32 {
        // Numbers have 29 bits, so their difference is taken modulo 2^29.
        (self.0 >> 3).wrapping_sub(other.0 >> 3) & (u32::MAX >> 3)
    }
}

/// The policy.
#[derive(Debug)]
pub struct S3Fifo {
    small: BlockList,
    main: BlockList,
    ghosts: Ghosts,
    requests: u32,
    /// Uses after which a block moves from the small queue to the main one.
    promote_at: u32,
    /// Where a search that used up its visits goes on.
    search: Option<S3FifoSearch>,
}

/// A search that is not finished: one of up to three passes.
#[derive(Debug, Clone, Copy)]
struct S3FifoSearch {
    /// Whether the first pass is over the small queue.
    begins_with_small: bool,
    pass: u8,
    /// Blocks left to visit in this pass.
    left: usize,
}

impl Default for S3Fifo {
    fn default() -> Self {
        Self::promoting_at(2)
    }
}

impl S3Fifo {
    /// A policy that moves blocks to the main queue after `uses` uses (1 to 3); the paper has 2.
    pub fn promoting_at(uses: u32) -> Self {
        Self {
            small: BlockList::default(),
            main: BlockList::default(),
            ghosts: Ghosts::default(),
            requests: 0,
            promote_at: uses.clamp(1, USES_MAX),
            search: None,
        }
    }

    fn list(&mut self, blocks: &BlockTable, slot: Slot) -> &mut BlockList {
        let is_main = S3FifoState(blocks.state(slot)).is_main();
        if is_main { &mut self.main } else { &mut self.small }
    }

    fn victim_of_small(
        &mut self,
        blocks: &mut BlockTable,
        spared: Option<Slot>,
        left: &mut usize,
        visits: &mut Visits,
    ) -> Search {
        // Each block is looked at once: it is promoted, returned or moved to the newest end.
        while *left > 0 {
            let Some(slot) = self.small.oldest() else { break };
            if !visits.take(1) {
                return Search::Unfinished;
            }
            *left -= 1;
            let state = S3FifoState(blocks.state(slot));
            if state.uses() >= self.promote_at {
                self.small.remove(blocks, slot);
                // Bit 0 marks the main queue, where uses are counted from zero again.
                blocks.set_state(slot, state.with_uses(0).0 | 1);
                self.main.push_newest(blocks, slot);
            } else if Some(slot) != spared && blocks.is_candidate(slot) {
                return Search::Found(slot);
            } else {
                self.small.move_to_newest(blocks, slot);
            }
        }
        Search::None
    }

    fn victim_of_main(
        &mut self,
        blocks: &mut BlockTable,
        spared: Option<Slot>,
        left: &mut usize,
        visits: &mut Visits,
    ) -> Search {
        while *left > 0 {
            let Some(slot) = self.main.oldest() else { break };
            if !visits.take(1) {
                return Search::Unfinished;
            }
            *left -= 1;
            let state = S3FifoState(blocks.state(slot));
            if state.uses() == 0 && Some(slot) != spared && blocks.is_candidate(slot) {
                return Search::Found(slot);
            }
            blocks.set_state(slot, state.with_uses(state.uses().saturating_sub(1)).0);
            self.main.move_to_newest(blocks, slot);
        }
        Search::None
    }

    /// Blocks to visit in a pass over the small or the main queue.
    fn blocks_of_pass(&self, is_small: bool, pass: u8) -> usize {
        // Each round over the main queue reduces a block's uses by one, so the last round meets
        // only blocks with none.
        let rounds = USES_MAX as usize + 1;
        let all = if is_small { self.small.len() } else { self.main.len() * rounds };
        if pass == 0 { all.min(SEARCH_BLOCKS) } else { all }
    }
}

impl Policy for S3Fifo {
    fn name(&self) -> &'static str {
        "s3fifo"
    }

    fn request(
        &mut self,
        blocks: &mut BlockTable,
        now: Duration,
        chain: &mut ChainPart<'_>,
        progress: &mut ChainProgress,
        visits: &mut Visits,
    ) -> bool {
        if progress.begin() {
            self.requests = self.requests.wrapping_add(1);
        }
        // The order of the blocks has no effect here.
        progress.touch_from_leaf(blocks, chain, visits, |blocks, slot| {
            self.touch(blocks, now, slot);
        })
    }

    fn touch(&mut self, blocks: &mut BlockTable, _: Duration, slot: Slot) {
        if !blocks.is_protected(slot) {
            let state = S3FifoState(blocks.state(slot));
            blocks.set_state(slot, state.with_uses(state.uses() + 1).0);
        }
    }

    fn insert(&mut self, blocks: &mut BlockTable, _: Duration, slot: Slot) {
        if blocks.is_protected(slot) {
            return;
        }
        let is_main = self.ghosts.take(blocks.fingerprint(slot)).is_some();
        let state = S3FifoState::new(is_main, self.requests);
        blocks.set_state(slot, state.0);
        let list = if is_main { &mut self.main } else { &mut self.small };
        // Before its parent, if that is in this queue: blocks that were put together are evicted
        // from the end of their chain.
        let parent_in_list = blocks.parent(slot).filter(|parent| {
            let other = S3FifoState(blocks.state(*parent));
            !blocks.is_protected(*parent)
                && !blocks.is_parked(*parent)
                && other.is_main() == is_main
                && state.since(other) <= SAME_PUT_REQUESTS
        });
        match parent_in_list {
            Some(parent) => list.push_before(blocks, slot, parent),
            None => list.push_newest(blocks, slot),
        }
    }

    fn remove(&mut self, blocks: &mut BlockTable, slot: Slot, why: RemovalReason) {
        if blocks.is_protected(slot) {
            return;
        }
        if !blocks.is_parked(slot) {
            self.list(blocks, slot).remove(blocks, slot);
        }
        let is_main = S3FifoState(blocks.state(slot)).is_main();
        if !is_main && why == RemovalReason::Evicted {
            // As in the paper, as many ghosts as the main queue has blocks. Blocks of the main
            // queue leave none.
            let main_blocks = blocks.len() - blocks.len() * SMALL_PERCENT / 100;
            self.ghosts.push(blocks.fingerprint(slot), 0, main_blocks);
        }
    }

    fn park(&mut self, blocks: &mut BlockTable, slot: Slot) {
        self.list(blocks, slot).remove(blocks, slot);
    }

    fn unpark(&mut self, blocks: &mut BlockTable, slot: Slot) {
        self.list(blocks, slot).push_newest(blocks, slot);
    }

    fn victim(
        &mut self,
        blocks: &mut BlockTable,
        _: Duration,
        spared: Option<Slot>,
        visits: &mut Visits,
    ) -> Search {
        // A few blocks of one queue, then all of the other, then all of the first.
        let search = self.search.take().unwrap_or_else(|| {
            let begins_with_small = self.small.len() * 100 >= blocks.len() * SMALL_PERCENT;
            let left = self.blocks_of_pass(begins_with_small, 0);
            S3FifoSearch { begins_with_small, pass: 0, left }
        });
        let S3FifoSearch { begins_with_small, pass, mut left } = search;
        for pass in pass..3 {
            let is_small = begins_with_small == (pass != 1);
            let search = if is_small {
                self.victim_of_small(blocks, spared, &mut left, visits)
            } else {
                self.victim_of_main(blocks, spared, &mut left, visits)
            };
            match search {
                Search::None => left = self.blocks_of_pass(!is_small, pass + 1),
                Search::Unfinished => {
                    self.search = Some(S3FifoSearch { begins_with_small, pass, left });
                    return Search::Unfinished;
                }
                found @ Search::Found(_) => return found,
            }
        }
        // Blocks were moved while the search was not finished. It begins again.
        let is_empty = self.small.is_empty() && self.main.is_empty();
        if is_empty { Search::None } else { Search::Unfinished }
    }

    fn memory_bytes(&self) -> usize {
        size_of::<Self>() + self.ghosts.memory_bytes()
    }
}
