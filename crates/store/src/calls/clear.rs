//! Clear: every block is absent at once, and is removed in short holds of the lock.

use crate::core::catalog::KeyIndex;
use crate::core::history::Loss;
use crate::core::state::StoreState;
use crate::shared::StoreCore;
use crate::shared::hold::KEYS_PER_HOLD;

/// What the search for the next cleared key costs a hold, in keys.
const SEARCH_COST: u32 = 1;

/// Removes every block from every tier. Returns when all of them are removed.
pub(crate) fn clear(core: &StoreCore) {
    let mut state = core.lock_for(KEYS_PER_HOLD);
    if state.is_closing {
        return;
    }
    state.make_all_absent();
    core.unlock(state);
    core.insight().shadows.clear();
    remove_cleared(core, Loss::Cleared, |_, _| {}, |_| {});
    core.notify_changed();
}

/// Removes the cleared keys, also those of other calls. Calls `before` with each key, and
/// `end` at the end of each hold of the lock.
pub(crate) fn remove_cleared(
    core: &StoreCore,
    why: Loss,
    mut before: impl FnMut(&StoreState, KeyIndex),
    mut end: impl FnMut(&mut StoreState),
) {
    let mut at = 0;
    loop {
        let mut state = core.lock_for(KEYS_PER_HOLD);
        state.history.set_time(core.clock.unix_ms());
        while !state.is_hold_full() && state.catalog.cleared_keys() > 0 {
            let left = u32::try_from(KEYS_PER_HOLD).unwrap_or(u32::MAX) - state.cost;
            let from = at;
            let (found, next) = state.catalog.next_cleared(from, left);
            at = next;
            state.charge(SEARCH_COST);
            match found {
                Some(key) => {
                    before(&state, key);
                    state.forget(key, why);
                }
                None if next == from => break,
                None => state.charge(left - SEARCH_COST),
            }
        }
        let is_end = state.catalog.cleared_keys() == 0 || at >= state.catalog.key_indices_end();
        end(&mut state);
        core.unlock(state);
        if is_end {
            return;
        }
    }
}
