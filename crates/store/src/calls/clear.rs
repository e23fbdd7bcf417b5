//! Clear: every block is absent at once, and is removed in short holds of the lock.

use cascade_block::BlockKey;

use crate::core::catalog::KeyIndex;
use crate::core::eviction::Eviction;
use crate::core::history::{History, Loss};
use crate::core::lower_tier::LowerTier;
use crate::core::state::StoreState;
use crate::shared::StoreCore;
use crate::shared::hold::KEYS_PER_HOLD;

/// What the search for the next cleared key costs a hold, in keys.
const SEARCH_COST: u32 = 1;

impl StoreCore {
    /// Removes every block from every tier. Returns when all of them are removed.
    pub(crate) fn clear(&self) {
        let mut state = self.lock_for(KEYS_PER_HOLD);
        if state.is_closing {
            return;
        }
        state.make_all_absent();
        self.unlock(state);
        self.insight().shadows.clear();
        self.remove_cleared(Loss::Cleared, |_, _| {}, |_| {});
        self.notify_changed();
    }

    /// Removes the cleared keys, also those of other calls. Calls `before` with each key, and
    /// `end` at the end of each hold of the lock.
    pub(crate) fn remove_cleared(
        &self,
        why: Loss,
        mut before: impl FnMut(&StoreState, KeyIndex),
        mut end: impl FnMut(&mut StoreState),
    ) {
        let mut at = 0;
        loop {
            let mut state = self.lock_for(KEYS_PER_HOLD);
            state.history.set_time(self.clock.unix_ms());
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
            self.unlock(state);
            if is_end {
                return;
            }
        }
    }
}

impl StoreState {
    /// Makes every block absent. [`StoreCore::remove_cleared`] must follow.
    pub(crate) fn make_all_absent(&mut self) {
        self.catalog.clear();
        self.fetching.cancel_all();
        self.note_cleared();
    }

    /// Replaces what still tells of removed blocks by empty structures; returns the old ones.
    pub(crate) fn take_traces(
        &mut self,
        mut eviction: Eviction,
        now_unix_ms: u64,
    ) -> impl Sized + use<> {
        eviction.succeed(&self.eviction);
        let seed = self.catalog.seed();
        self.prefetched_bytes = 0;
        let unstored = |tier: &mut LowerTier| {
            tier.requeue_count = 0;
            std::mem::take(&mut tier.unstored)
        };
        let unstored: Vec<_> = self.lower.iter_mut().map(unstored).collect();
        (
            std::mem::replace(&mut self.eviction, eviction),
            std::mem::replace(&mut self.history, History::new(now_unix_ms, seed)),
            std::mem::take(&mut self.prefetched),
            unstored,
        )
    }

    /// Removes a cleared key that is about to be put again: a stage must learn of its removal
    /// before its new block.
    pub(crate) fn forget_cleared(&mut self, key: &BlockKey) {
        if let Some(cleared) = self.catalog.find_cleared(key) {
            self.forget(cleared, Loss::Cleared);
        }
    }
}
