//! Least recently used, aware of chains: the blocks of one request are evicted from its end.

use std::time::Duration;

use super::{
    BlockList, BlockTable, ChainPart, ChainProgress, Policy, RemovalReason, Search, Slot, Visits,
};

/// A parent that was used at most this many requests ago counts as used by the same request: other
/// requests may come between a request and its puts.
const SAME_USE_REQUESTS: u32 = 8;

/// Inserts a block into a list: right before its parent if the same request used both, otherwise as
/// the newest. The state of each block in the list is the number of its last request.
pub(super) fn place(
    list: &mut BlockList,
    blocks: &mut BlockTable,
    slot: Slot,
    parent: Option<Slot>,
) {
    let request = blocks.state(slot);
    // If a later request used the parent, the difference wraps to almost 2^32: not the same use.
    let same_use = |parent: &Slot| request.wrapping_sub(blocks.state(*parent)) <= SAME_USE_REQUESTS;
    match parent.filter(same_use) {
        Some(parent) => list.push_before(blocks, slot, parent),
        None => list.push_newest(blocks, slot),
    }
}

/// The policy. A block's state is the number of the request that used it last.
#[derive(Debug, Default)]
pub struct Lru {
    list: BlockList,
    requests: u32,
}

impl Policy for Lru {
    fn name(&self) -> &'static str {
        "lru"
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
        progress.touch_from_leaf(blocks, chain, visits, |blocks, slot| {
            self.touch(blocks, now, slot);
        })
    }

    fn touch(&mut self, blocks: &mut BlockTable, _: Duration, slot: Slot) {
        if !blocks.is_protected(slot) {
            blocks.set_state(slot, self.requests);
            if !blocks.is_parked(slot) {
                self.list.move_to_newest(blocks, slot);
            }
        }
    }

    fn insert(&mut self, blocks: &mut BlockTable, _: Duration, slot: Slot) {
        if !blocks.is_protected(slot) {
            blocks.set_state(slot, self.requests);
            let is_in_list =
                |parent: &Slot| !blocks.is_protected(*parent) && !blocks.is_parked(*parent);
            let parent = blocks.parent(slot).filter(is_in_list);
            place(&mut self.list, blocks, slot, parent);
        }
    }

    fn remove(&mut self, blocks: &mut BlockTable, slot: Slot, _: RemovalReason) {
        if !blocks.is_protected(slot) && !blocks.is_parked(slot) {
            self.list.remove(blocks, slot);
        }
    }

    fn park(&mut self, blocks: &mut BlockTable, slot: Slot) {
        self.list.remove(blocks, slot);
    }

    fn unpark(&mut self, blocks: &mut BlockTable, slot: Slot) {
        self.list.push_newest(blocks, slot);
    }

    fn victim(
        &mut self,
        blocks: &mut BlockTable,
        _: Duration,
        spared: Option<Slot>,
        visits: &mut Visits,
    ) -> Search {
        let mut among = usize::MAX;
        self.list.oldest_candidate(blocks, spared, &mut among, visits)
    }

    fn memory_bytes(&self) -> usize {
        size_of::<Self>()
    }
}
