//! Whether a block in DRAM may be evicted, and reports to the eviction state that it may again.

use crate::core::catalog::{Catalog, ContentIndex, ExpectedAccess, KeyIndex};
use crate::core::eviction::{ParkReason, Verdict};
use crate::core::state::StoreState;

impl StoreState {
    /// A key is not pinned or not awaited any more: its block may be evictable again.
    pub(crate) fn release_key(&mut self, key: KeyIndex) {
        if let Some(slot) = self.catalog.entry(key).slot() {
            self.eviction.release(slot);
        }
    }

    /// A content is not held or not dirty any more: its blocks may be evictable again.
    pub(crate) fn release_content(&mut self, content: ContentIndex) {
        for key in self.catalog.each_key_of(content) {
            if let Some(slot) = self.catalog.entry(key).slot() {
                self.eviction.release(slot);
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

/// Whether a block may be evicted from DRAM: written to all stages, not pinned, not prefetched and
/// unused, and no reader holds its slab. The end of each of these is reported to the eviction
/// state: see [`StoreState::release_key`].
pub(crate) fn verdict(catalog: &Catalog, key: KeyIndex) -> Verdict {
    let entry = catalog.entry(key);
    let content = catalog.content(entry.content);
    if content.dirty != 0 {
        return Verdict::Park(ParkReason::Unwritten);
    }
    let is_prefetched = entry.expected_access == ExpectedAccess::FirstUse;
    if entry.pins > 0 || is_prefetched {
        return Verdict::Park(ParkReason::Busy);
    }
    // The catalog itself is one holder. The drop of the last other one is reported.
    let token = release_token(entry.content, content.generation);
    let is_held = content.slab.as_ref().is_some_and(|slab| slab.watch(token));
    if is_held { Verdict::Park(ParkReason::Busy) } else { Verdict::Evict }
}

/// Identifies a content in the pool's reports of released slabs.
fn release_token(content: ContentIndex, generation: u32) -> usize {
    (generation as usize) << u32::BITS | content.0 as usize
}

const _: () = assert!(usize::BITS == 64, "a token is an index and a generation");
