//! Reports to the eviction state that a block may be evicted again.

use super::StoreState;
use crate::core::catalog::{ContentIndex, KeyIndex};

impl StoreState {
    /// A key is not pinned or not awaited any more: its block may be evictable again.
    pub(crate) fn release_key(&mut self, key: KeyIndex) {
        if let Some(slot) = self.catalog.entry(key).slot() {
            self.memory.eviction.release(slot);
        }
    }

    /// A content is not held or not dirty any more: its blocks may be evictable again.
    pub(crate) fn release_content(&mut self, content: ContentIndex) {
        for key in self.catalog.each_key_of(content) {
            if let Some(slot) = self.catalog.entry(key).slot() {
                self.memory.eviction.release(slot);
            }
        }
    }

    /// Applies a report of the pool that only the catalog still holds a slab.
    pub(crate) fn note_released(&mut self, token: usize) {
        let half = |half: usize| u32::try_from(half).expect("half of a token has 32 bits");
        let index = ContentIndex(half(token & u32::MAX as usize));
        let generation = half(token >> u32::BITS);
        // The content may have been deleted meanwhile.
        if self.catalog.live_content((index, generation)).is_some() {
            self.release_content(index);
        }
    }

    /// A content need not be written to a stage any more. Returns whether it waits for no other
    /// stage.
    pub(crate) fn clear_dirty(&mut self, content: ContentIndex, stage: usize) -> bool {
        let entry = self.catalog.content_mut(content);
        entry.dirty &= !(1 << stage);
        let is_clean = entry.dirty == 0;
        if is_clean {
            self.release_content(content);
        }
        is_clean
    }
}
