//! Parked blocks: refused by a search because they are pinned, held or not written yet. A policy
//! does not offer them until they are unparked.

use super::{BlockTable, Search, Slot, Visits};

/// Why a block cannot be evicted now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParkReason {
    /// Pinned, held by a reader, or prefetched and not used yet.
    Busy,
    /// Waits to be written to a lower tier.
    Unwritten,
}

impl BlockTable {
    /// Whether the block is parked.
    pub fn is_parked(&self, slot: Slot) -> bool {
        self.table[slot.index()].parked.is_some()
    }

    /// Whether the block is a candidate for eviction: a leaf that is not parked.
    pub fn is_candidate(&self, slot: Slot) -> bool {
        self.is_resident(slot) && self.is_leaf(slot) && !self.is_parked(slot)
    }

    /// Whether an ordinary or a protected block other than `spared` is a candidate.
    pub(in crate::core::eviction) fn has_candidate(
        &self,
        are_protected: bool,
        spared: Option<Slot>,
    ) -> bool {
        let is_counted =
            |slot: &Slot| self.is_candidate(*slot) && self.is_protected(*slot) == are_protected;
        let spared = spared.filter(is_counted).map_or(0, |_| 1);
        self.candidates[usize::from(are_protected)] > spared
    }

    /// Whether parked blocks will become candidates once they are written.
    pub(in crate::core::eviction) fn waits_for_write(&self) -> bool {
        self.parked_counts[ParkReason::Unwritten as usize] > 0
    }

    /// Whether slots of deleted blocks are left to free.
    pub(in crate::core::eviction) fn has_unfinished(&self) -> bool {
        !self.unfinished.is_empty()
    }

    pub(in crate::core::eviction) fn park(&mut self, slot: Slot, why: ParkReason) {
        debug_assert!(self.is_candidate(slot), "only candidates are refused");
        self.candidates[usize::from(self.is_protected(slot))] -= 1;
        self.parked_counts[why as usize] += 1;
        let block = &mut self.table[slot.index()];
        block.parked = Some(why);
        if !std::mem::replace(&mut block.is_in_parked, true) {
            self.parked.push(slot.0);
        }
    }

    /// Ends the parking of a block, if it is parked.
    pub(in crate::core::eviction) fn unpark(&mut self, slot: Slot) -> bool {
        let Some(why) = self.table[slot.index()].parked.take() else { return false };
        self.parked_counts[why as usize] -= 1;
        if self.is_candidate(slot) {
            self.candidates[usize::from(self.is_protected(slot))] += 1;
        }
        true
    }

    /// All parked blocks, the longest parked ones first.
    pub(in crate::core::eviction) fn parked(&self) -> Vec<Slot> {
        let slots = self.parked.iter().copied().map(Slot);
        slots.filter(|slot| self.is_parked(*slot)).collect()
    }

    /// The first parked leaf from a place on; `place` becomes its place. Forgets places of blocks
    /// that are not parked any more.
    pub(in crate::core::eviction) fn parked_leaf(
        &mut self,
        place: &mut usize,
        visits: &mut Visits,
    ) -> Search {
        while let Some(raw) = self.parked.get(*place).copied() {
            if !visits.take(1) {
                return Search::Unfinished;
            }
            let slot = Slot(raw);
            if !self.is_parked(slot) {
                self.table[slot.index()].is_in_parked = false;
                self.parked.swap_remove(*place);
            } else if self.is_leaf(slot) {
                return Search::Found(slot);
            } else {
                *place += 1;
            }
        }
        Search::None
    }
}
