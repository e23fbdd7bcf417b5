//! The slab of a new block.

use cascade_block::BlockKey;
use cascade_memory::SlabMut;
use cascade_tier::{DeclineReason, Put, PutOutcome};

use crate::core::eviction::{Incoming, Slot};
use crate::core::state::StoreState;
use crate::shared::hold::StateGuard;
use crate::shared::room::{AllocationFailure, Room};

/// A new block that needs a slab.
#[derive(Debug, Clone, Copy)]
pub(super) struct PutCandidate<'a> {
    pub(super) put: &'a Put<'a>,
    /// Length of the block; `put.bytes` is empty in a two-phase put.
    pub(super) bytes: usize,
    /// The nearest resident ancestor.
    pub(super) ancestor: Option<Slot>,
}

impl PutCandidate<'_> {
    /// Allocates a slab. Without a lower tier, a block is declined if the policy values
    /// all resident blocks more. With lower tiers every block is admitted, because DRAM is on its
    /// way to them.
    pub(super) fn allocate<'a>(
        self,
        room: Room<'a>,
        state: StateGuard<'a>,
        holds_some: bool,
    ) -> (StateGuard<'a>, Result<SlabMut, AllocationFailure>) {
        let (Self { put, bytes, ancestor }, core) = (self, room.core);
        if !core.stages.is_empty() {
            // Ends the round instead of waiting: other calls may wait for the slabs that this call
            // holds. Publishing them releases them.
            if holds_some && room.is_backlogged(&state) {
                return (state, Err(AllocationFailure::TimedOut));
            }
            let (state, has_room) = room.wait_for_backlog(state);
            if !has_room {
                return (state, Err(AllocationFailure::TimedOut));
            }
            return room.allocate(state, bytes, holds_some, None);
        }
        let incoming = Incoming {
            // The block gets the index of its key only when it is published.
            owner: u32::MAX,
            fingerprint: core.seed.of_key(&put.key),
            parent: ancestor,
            bytes: u32::try_from(bytes).expect("longer blocks were refused"),
            is_protected: put.is_prefix,
        };
        room.allocate(state, bytes, holds_some, Some(&incoming))
    }

    /// The outcome of a put for which no slab was allocated.
    pub(super) fn outcome_without_slab(
        self,
        room: Room<'_>,
        state: &StoreState,
        failure: AllocationFailure,
    ) -> PutOutcome {
        match failure {
            AllocationFailure::TooLarge => PutOutcome::Declined(DeclineReason::TooLarge),
            AllocationFailure::Full => PutOutcome::Declined(DeclineReason::Full),
            AllocationFailure::WorthLess => PutOutcome::Declined(DeclineReason::WorthLess),
            AllocationFailure::TimedOut | AllocationFailure::Erasing => {
                PutOutcome::Failed(room.error(state, failure, self.bytes))
            }
        }
    }
}

/// The nearest resident ancestor of a new block: its parent, or for a parent that got its slab in
/// this round and is not published yet, the ancestor of the parent. The ancestor must not be
/// evicted to make room for the block: without it, no lookup would match the block.
pub(super) fn resident_ancestor(
    state: &StoreState,
    put: &Put<'_>,
    previous: Option<(BlockKey, Option<Slot>)>,
) -> Option<Slot> {
    let parent = put.parent?;
    // First, because most blocks of a batch follow the block before them.
    if let Some((_, slot)) = previous.filter(|(key, _)| *key == parent) {
        return slot;
    }
    state.catalog.find(&parent).and_then(|found| state.catalog.entry(found).slot())
}
