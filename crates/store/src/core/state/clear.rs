//! What a clear and an erase change in the state.

use cascade_block::BlockKey;

use super::StoreState;
use crate::core::eviction::Eviction;
use crate::core::history::{History, Loss};
use crate::core::lower_tier::LowerTier;

impl StoreState {
    /// Makes every block absent. `remove_cleared` must follow.
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
        eviction.succeed(&self.memory.eviction);
        let seed = self.catalog.seed();
        self.memory.prefetched_bytes = 0;
        let unstored = |tier: &mut LowerTier| {
            tier.requeue_count = 0;
            std::mem::take(&mut tier.unstored)
        };
        let unstored: Vec<_> = self.lower.iter_mut().map(unstored).collect();
        (
            std::mem::replace(&mut self.memory.eviction, eviction),
            std::mem::replace(&mut self.history, History::new(now_unix_ms, seed)),
            std::mem::take(&mut self.memory.prefetched),
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
