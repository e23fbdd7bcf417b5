//! Where a block below DRAM is read from, and what the reply of its stage says about the catalog.

use cascade_block::BlockKey;

use crate::core::awaited::Place;
use crate::core::catalog::ContentIndex;
use crate::core::history::Loss;
use crate::core::pending::KeyChange;
use crate::core::state::StoreState;
use cascade_tier::tier::Address;

/// Where a block is read from.
#[derive(Debug, Clone, Copy)]
pub(super) struct FetchSource {
    pub(super) content: ContentIndex,
    generation: u32,
    pub(super) stage: usize,
    pub(super) address: Address,
    /// The key under which the stage had the bytes when the read was planned.
    pub(super) key: BlockKey,
    /// Number of keys that the stage had recorded by then.
    recorded: u64,
}

impl FetchSource {
    pub(super) fn new(
        state: &StoreState,
        place: Place,
        (stage, address): (usize, Address),
        key: BlockKey,
    ) -> Self {
        let key = state.recorded_key(stage, place, key).unwrap_or(key);
        let recorded = state.lower[stage].additions.settled();
        let (content, generation) = place;
        Self { content, generation, stage, address, key, recorded }
    }

    /// The content, with its generation: a later content can reuse the index.
    pub(super) fn place(self) -> Place {
        (self.content, self.generation)
    }

    /// Whether the stage has recorded no key since the read was planned, and is not about to record
    /// this one. Otherwise a caller may have removed the key, and put it again with other bytes.
    pub(super) fn has_same_key(self, state: &StoreState) -> bool {
        let additions = &state.lower[self.stage].additions;
        additions.settled() == self.recorded && !additions.is_pending(&self.key)
    }

    /// The bytes are no longer at the address in the catalog: removes the address for all keys of
    /// the content.
    pub(super) fn forget_address(self, state: &mut StoreState, why: Loss) {
        if state.catalog.live_content(self.place()).is_none() {
            return;
        }
        if state.catalog.address(self.content, self.stage) == Some(self.address) {
            state.clear_address(self.content, self.stage);
            for key in state.catalog.keys_of(self.content) {
                let name = state.catalog.entry(key).key;
                state.push_key_change(self.stage, KeyChange::Remove(name, self.address));
            }
            state.forget_if_in_no_tier(self.content, why);
        }
    }

    /// The stage does not know the key that the block was read as. For the only key of a content,
    /// its bytes are gone; otherwise forgets this key alone. Forgets nothing if the stage has
    /// recorded keys meanwhile: this one may have been removed and added again. Returns false if
    /// the stage cannot be read before it has recorded the key.
    pub(super) fn settle_gone(self, state: &mut StoreState, requested: &BlockKey) -> bool {
        let Some(content) = state.catalog.live_content(self.place()) else { return true };
        let key_count = content.key_count;
        // The tier drops some blocks unasked: expired ones, and what it failed to move.
        let was_reclaimed = content.was_reclaimed || state.lower[self.stage].is_making_room();
        let why = if was_reclaimed { Loss::Reclaimed } else { Loss::Vanished };
        let has_moved = state.catalog.address(self.content, self.stage) != Some(self.address);
        if has_moved || state.lower[self.stage].additions.settled() != self.recorded {
            return true;
        }
        match state.catalog.find(&self.key) {
            Some(key) if state.catalog.entry(key).content != self.content => return true,
            Some(_) if !self.has_same_key(state) => return false,
            Some(_) if key_count == 1 => self.forget_address(state, why),
            Some(key) => state.forget(key, why),
            None => return self.key == *requested,
        }
        true
    }
}
