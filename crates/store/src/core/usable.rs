//! Whether a block in DRAM may be evicted.

use crate::core::catalog::{Catalog, ContentIndex, ExpectedAccess, KeyIndex};
use crate::core::eviction::{ParkReason, Verdict};

/// Whether a block may be evicted from DRAM: written to all stages, not pinned, not prefetched and
/// unused, and no reader holds its slab. The end of each of these is reported to the eviction
/// state: see `core/state/release.rs`.
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
