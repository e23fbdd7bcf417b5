//! How much work the current hold of the lock has done.

use super::StoreState;
use crate::core::bound::KEYS_PER_HOLD;

impl StoreState {
    /// Counts work of the current hold: one for each key, more for work that takes longer.
    #[inline]
    pub(crate) fn charge(&mut self, keys: u32) {
        self.cost = self.cost.saturating_add(keys);
        if let Some(recorder) = &self.recorder {
            recorder.count(keys);
        }
    }

    /// Counts a part of a batch that is handled in the current hold.
    pub(crate) fn charge_keys<T>(&mut self, keys: &[T]) {
        self.charge(u32::try_from(keys.len()).unwrap_or(u32::MAX));
    }

    /// Whether the current hold has done as much as one hold may do.
    #[inline]
    pub(crate) fn is_hold_full(&self) -> bool {
        self.cost_left() == 0
    }

    /// What the current hold may still do.
    #[inline]
    pub(crate) fn cost_left(&self) -> usize {
        KEYS_PER_HOLD.saturating_sub(self.cost as usize)
    }
}
