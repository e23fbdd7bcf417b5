//! The results of writes to a stage, applied to the state.

use cascade_tier::tier::{Address, TierError};

use crate::core::history::Loss;
use crate::core::pending::{KeyChange, PendingWrite};
use crate::core::state::StoreState;
use crate::shared::StoreCore;
use crate::shared::hold::StateGuard;

/// Failed writes of one block, with a closed circuit, before the block is given up: the block
/// itself may be the cause.
const WRITE_TRIES_MAX: u8 = 3;

/// Applies the result of the write of one block.
pub(super) fn settle(
    state: &mut StoreState,
    stage: usize,
    pending: &PendingWrite,
    result: Result<Address, TierError>,
) {
    state.lower[stage].pending_bytes -= u64::from(pending.facts.bytes);
    let place = (pending.content, pending.generation);
    state.awaited.note(place, stage, &result);
    let Some(content) = state.catalog.live_content(place) else {
        // Deleted during the write.
        let address = result.ok();
        if let Some(address) = address {
            state.push_key_change(stage, KeyChange::Remove(pending.facts.key, address));
        }
        return;
    };
    // Also after a failure: a block that a stage does not take must become evictable.
    if result.is_ok() {
        content.was_reclaimed = false;
    }
    let is_clean = state.clear_dirty(pending.content, stage);
    match result {
        Ok(address) => {
            state.set_address(pending.content, stage, address);
            state.counters.demoted_blocks += 1;
            state.counters.demoted_bytes += u64::from(pending.facts.bytes);
            add_other_keys(state, stage, pending, address);
        }
        Err(TierError::Declined { .. }) => state.counters.demote_declines += 1,
        // Counted as damage when it was dropped from memory.
        Err(TierError::ChangedInMemory) => {}
        Err(error) => {
            state.counters.demote_failures += 1;
            state.write_failures.count(stage, 1);
            // Time-outs and open circuits are not the fault of the block and do not count.
            let is_block_error = matches!(
                error,
                TierError::Failed(_)
                    | TierError::NoResult
                    | TierError::Device(_)
                    | TierError::NotHostMemory
            );
            let tries =
                pending.tries + u8::from(is_block_error && !state.is_write_circuit_open(stage));
            // Making room for this block was tried already, without effect.
            if !matches!(error, TierError::Full) && tries < WRITE_TRIES_MAX {
                state.note_unstored(stage, PendingWrite { tries, ..*pending });
            }
            state.note_error(stage, error);
        }
    }
    // Without a DRAM tier, memory holds a block only until it is written.
    if is_clean && !state.memory.keeps_blocks {
        state.drop_slab(pending.content);
        state.forget_if_in_no_tier(pending.content, Loss::Unwritten);
    }
}

/// Queues the other keys of a content for the stage, and the removal of the key it was written
/// under if that was deleted meanwhile.
fn add_other_keys(state: &mut StoreState, stage: usize, pending: &PendingWrite, address: Address) {
    let mut has_written_key = false;
    for key in state.catalog.keys_of(pending.content) {
        state.charge(1);
        let entry = state.catalog.entry(key);
        if entry.key == pending.facts.key {
            has_written_key = true;
            continue;
        }
        let facts = state.facts_of(key, &pending.facts);
        let written = ((pending.content, pending.generation), pending.facts.key);
        state.push_addition(stage, facts, address, written);
    }
    if !has_written_key {
        state.push_key_change(stage, KeyChange::Remove(pending.facts.key, address));
    }
}

/// Fails all queued writes of a stage: a whole batch timed out, its write circuit opened, or the
/// store closes. The failures are counted; the blocks stay in DRAM until they are evicted.
pub(crate) fn fail_queue<'a>(
    core: &'a StoreCore,
    mut state: StateGuard<'a>,
    stage: usize,
    why: &TierError,
) -> StateGuard<'a> {
    // Not those that are queued meanwhile.
    let mut left = state.lower[stage].queue.len();
    while left > 0
        && let Some(pending) = state.lower[stage].queue.pop_front()
    {
        left -= 1;
        state.charge(1);
        state.lower[stage].block_tickets.settled += 1;
        settle(&mut state, stage, &pending, Err(why.clone()));
        state = core.end_full_hold(state);
    }
    state
}

/// As `fail_queue`, in the same hold of the lock, for the few blocks that were queued since.
pub(crate) fn settle_queue(state: &mut StoreState, stage: usize, why: &TierError) {
    while let Some(pending) = state.lower[stage].queue.pop_front() {
        state.lower[stage].block_tickets.settled += 1;
        settle(state, stage, &pending, Err(why.clone()));
    }
}
