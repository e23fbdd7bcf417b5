//! Promotion: keeps blocks that a read has loaded or fetched in DRAM.

use cascade_memory::Slab;
use cascade_tier::tier::BlockFacts;

use super::{PendingRead, ReadPurpose};
use crate::calls::fetch_source::FetchSource;
use crate::core::catalog::{ExpectedAccess, KeyIndex, NewKey};
use crate::core::located::FoundBlock;
use crate::core::state::StoreState;
use crate::shared::StoreCore;

/// Prefetched blocks are protected from eviction until their first use, within DRAM divided by
/// this.
const PREFETCHED_SHARE: u64 = 4;

/// Keeps a block from a lower stage in DRAM, if the policy promotes hits and the block was not
/// deleted meanwhile.
pub(super) fn promote(
    core: &StoreCore,
    state: &mut StoreState,
    pending: &PendingRead,
    from: FetchSource,
    slab: &Slab,
    purpose: ReadPurpose,
) {
    // The stage reads by key, and the key may have been deleted and put with other bytes during
    // the read. Only if the key still has this content, at this address, are these its bytes.
    let found = state.catalog.find(&pending.key);
    let has_content = |key: &KeyIndex| state.catalog.entry(*key).content == from.content;
    let Some(key) = found.filter(has_content) else { return };
    let stamp = state.history.stamp();
    if state.catalog.live_content(from.place()).is_none() {
        return;
    }
    let has_moved = state.catalog.address(from.content, from.stage) != Some(from.address);
    if has_moved || purpose == ReadPurpose::Compare {
        return;
    }
    let content = state.catalog.content_mut(from.content);
    content.referenced |= 1 << from.stage;
    if purpose == ReadPurpose::Use {
        content.note_use(stamp);
    }
    if !core.pipeline.keeps_in_memory || !state.memory.eviction.policy().promotes_hits() {
        return;
    }
    state.counters.promoted_blocks += 1;
    state.counters.promoted_bytes += slab.len() as u64;
    let now = core.policy_now(state);
    state.put_slab(from.content, slab.clone(), None);
    state.make_resident(key, now);
    if state.catalog.content(from.content).key_count > 1 {
        // A pin keeps a content in DRAM only through a slot of the pinned key.
        for other in state.catalog.keys_of(from.content) {
            if state.catalog.entry(other).pins > 0 {
                state.make_resident(other, now);
            }
        }
    }
    if purpose == ReadPurpose::Prefetch {
        protect_prefetched(core, state, key);
    } else {
        state.catalog.entry_mut(key).expected_access = ExpectedAccess::None;
    }
}

/// Protects a block that was prefetched until its first use.
fn protect_prefetched(core: &StoreCore, state: &mut StoreState, key: KeyIndex) {
    state.counters.prefetched_blocks += 1;
    state.protect_prefetched(key, core.memory_bytes() / PREFETCHED_SHARE);
}

/// Keeps a fetched block in DRAM, if the policy promotes hits. The lower tiers do not get it:
/// its source has it.
pub(super) fn keep_fetched(
    core: &StoreCore,
    state: &mut StoreState,
    found: &FoundBlock,
    slab: &Slab,
    purpose: ReadPurpose,
) {
    let promotes = core.pipeline.keeps_in_memory && state.memory.eviction.policy().promotes_hits();
    if !promotes || state.is_closing || state.is_erasing {
        return;
    }
    let (now, facts) = (core.policy_now(state), &found.block.facts);
    state.forget_cleared(&facts.key);
    let new = NewKey {
        key: facts.key,
        parent: facts.parent,
        is_prefix: facts.is_prefix,
        expires_unix_ms: facts.expires_unix_ms.unwrap_or(0),
    };
    // A digest is not taken from others: equal digests link a key to bytes of this store.
    let facts = BlockFacts { digest: None, ..*facts };
    state.content_bytes += u64::from(facts.bytes);
    let (key, content) = state.catalog.insert(&new, facts.bytes, None);
    state.history.forget(&facts.key);
    let stamp = state.history.stamp();
    if found.is_matched {
        state.catalog.entry_mut(key).note_matched();
    }
    let entry = state.catalog.content_mut(content);
    entry.put_stamp = stamp;
    entry.was_fetched = true;
    if purpose == ReadPurpose::Use {
        entry.note_use(stamp);
    }
    state.put_slab(content, slab.clone(), Some(&facts));
    state.make_resident(key, now);
    state.counters.promoted_blocks += 1;
    state.counters.promoted_bytes += slab.len() as u64;
    if purpose == ReadPurpose::Prefetch {
        protect_prefetched(core, state, key);
    }
}
