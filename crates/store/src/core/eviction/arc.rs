//! ARC: two LRU lists, for blocks used once and for blocks used more often; hits on ghosts shift
//! the balance between them (Megiddo and Modha, FAST '03).

use std::time::Duration;

use super::lru::place;
use super::{
    BlockList, BlockTable, ChainPart, ChainProgress, Ghosts, Policy, RemovalReason, Search, Slot,
    Visits,
};

/// A block's state: the top bit is set once the block was used again; the other bits are the number
/// of the request that used it last.
const OFTEN: u32 = 1 << 31;

/// Blocks searched in the list to shrink before the other list is searched: if all blocks of a list
/// have children in the other list, none of them can be evicted.
const SEARCH_BLOCKS: usize = 64;

/// The policy.
#[derive(Debug, Default)]
pub struct Arc {
    once: BlockList,
    often: BlockList,
    once_ghosts: Ghosts,
    often_ghosts: Ghosts,
    /// Target length of `once`: `p` of the paper.
    once_target: usize,
    requests: u32,
    /// The largest number of resident blocks so far: the capacity of the tier once it is full.
    capacity: usize,
    /// Where a search that used up its visits goes on.
    search: Option<ArcSearch>,
}

/// A search that is not finished: one of up to three passes.
#[derive(Debug, Clone, Copy)]
struct ArcSearch {
    /// Whether the list to shrink is `once`.
    shrinks_once: bool,
    pass: u8,
    /// Blocks left to visit in this pass.
    left: usize,
}

impl Arc {
    /// Begins a search, or takes over one that is not finished.
    fn take_search(&mut self) -> ArcSearch {
        self.search.take().unwrap_or_else(|| {
            let shrinks_once = self.once.len() > self.once_target;
            let first = if shrinks_once { &self.once } else { &self.often };
            ArcSearch { shrinks_once, pass: 0, left: first.len().min(SEARCH_BLOCKS) }
        })
    }

    fn list(&mut self, blocks: &BlockTable, slot: Slot) -> &mut BlockList {
        if blocks.state(slot) & OFTEN == 0 { &mut self.once } else { &mut self.often }
    }

    /// Adapts the target length to a hit on a ghost, as the paper does. Returns whether there was
    /// one.
    fn adapt(&mut self, fingerprint: u64) -> bool {
        // The paper's step is the other list's length divided by this one's, at least one. Lengths
        // are those before the hit, so the hit itself keeps the divisor above zero.
        let (once, often) = (self.once_ghosts.len().max(1), self.often_ghosts.len().max(1));
        if self.once_ghosts.take(fingerprint).is_some() {
            self.once_target = (self.once_target + (often / once).max(1)).min(self.capacity);
            return true;
        }
        if self.often_ghosts.take(fingerprint).is_some() {
            self.once_target = self.once_target.saturating_sub((once / often).max(1));
            return true;
        }
        false
    }

    /// Trims the ghosts to the paper's bounds: `once` with its ghosts has at most `capacity`
    /// entries, and so have all ghosts together.
    fn forget(&mut self) {
        while !self.once_ghosts.is_empty()
            && self.once.len() + self.once_ghosts.len() > self.capacity
        {
            self.once_ghosts.pop();
        }
        while !self.often_ghosts.is_empty()
            && self.once_ghosts.len() + self.often_ghosts.len() > self.capacity
        {
            self.often_ghosts.pop();
        }
    }
}

impl Policy for Arc {
    fn name(&self) -> &'static str {
        "arc"
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
            self.requests = self.requests.wrapping_add(1) & !OFTEN;
        }
        progress.touch_from_leaf(blocks, chain, visits, |blocks, slot| {
            self.touch(blocks, now, slot);
        })
    }

    fn touch(&mut self, blocks: &mut BlockTable, _: Duration, slot: Slot) {
        if !blocks.is_protected(slot) {
            // The state selects the list, so the block leaves its list before its state changes.
            let is_parked = blocks.is_parked(slot);
            if !is_parked {
                self.list(blocks, slot).remove(blocks, slot);
            }
            blocks.set_state(slot, self.requests | OFTEN);
            if !is_parked {
                self.often.push_newest(blocks, slot);
            }
        }
    }

    fn insert(&mut self, blocks: &mut BlockTable, _: Duration, slot: Slot) {
        if blocks.is_protected(slot) {
            return;
        }
        self.capacity = self.capacity.max(blocks.len());
        let often = if self.adapt(blocks.fingerprint(slot)) { OFTEN } else { 0 };
        blocks.set_state(slot, self.requests | often);
        // A block can only be inserted before a parent in the same list. `place` subtracts their
        // states; their `OFTEN` bits are equal and cancel out.
        let parent_in_list = blocks.parent(slot).filter(|parent| {
            !blocks.is_protected(*parent)
                && !blocks.is_parked(*parent)
                && blocks.state(*parent) & OFTEN == often
        });
        place(self.list(blocks, slot), blocks, slot, parent_in_list);
        self.forget();
    }

    fn remove(&mut self, blocks: &mut BlockTable, slot: Slot, why: RemovalReason) {
        if blocks.is_protected(slot) {
            return;
        }
        if !blocks.is_parked(slot) {
            self.list(blocks, slot).remove(blocks, slot);
        }
        if why == RemovalReason::Evicted {
            let is_often = blocks.state(slot) & OFTEN != 0;
            let ghosts = if is_often { &mut self.often_ghosts } else { &mut self.once_ghosts };
            // Twice the capacity, because ghosts that were taken out leave holes in the ring.
            ghosts.push(blocks.fingerprint(slot), 0, self.capacity * 2);
            self.forget();
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
        // A few blocks of the list to shrink, then all of the other list, then all of the first.
        let ArcSearch { shrinks_once, pass, mut left } = self.take_search();
        for pass in pass..3 {
            let list = if shrinks_once == (pass != 1) { &mut self.once } else { &mut self.often };
            match list.oldest_candidate(blocks, spared, &mut left, visits) {
                Search::None => {}
                Search::Unfinished => {
                    self.search = Some(ArcSearch { shrinks_once, pass, left });
                    return Search::Unfinished;
                }
                found @ Search::Found(_) => return found,
            }
            let next = if shrinks_once == (pass == 1) { &self.once } else { &self.often };
            left = next.len();
        }
        // Blocks were moved while the search was not finished. It begins again.
        let is_empty = self.once.is_empty() && self.often.is_empty();
        if is_empty { Search::None } else { Search::Unfinished }
    }

    fn memory_bytes(&self) -> usize {
        size_of::<Self>() + self.once_ghosts.memory_bytes() + self.often_ghosts.memory_bytes()
    }
}
