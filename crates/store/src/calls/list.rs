//! A listing of the keys of a store, in pages.

use cascade_block::BlockKey;
use cascade_tier::{CallOptions, StoreError, TierName};

use crate::Store;
use crate::core::bound::KEYS_PER_HOLD;
use crate::core::catalog::KeyIndex;
use crate::core::state::StoreState;
use crate::insight::prefixes::tiers_with;
use crate::shared::StoreCore;

/// Most catalog entries that one page looks at: a filter that few keys match has short pages.
const ENTRIES_PER_PAGE: u32 = 1 << 16;

/// Which keys a page has.
#[derive(Debug, Clone, Copy, Default)]
pub struct ListRequest<'a> {
    /// Where the page begins: 0, or [`KeyPage::next`] of the page before it.
    pub from: u32,
    /// Most keys of the page; 0 counts as 1.
    pub most: usize,
    /// Only keys of blocks that this tier has.
    pub tier: Option<&'a str>,
}

/// A page of a listing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KeyPage {
    /// The keys, in no order that means anything to the caller. There may be none on a page.
    pub keys: Vec<ListedKey>,
    /// Where the next page begins; `None` on the last page.
    pub next: Option<u32>,
}

/// A key of a listing, and its block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedKey {
    /// The key.
    pub key: BlockKey,
    /// The tiers that have its block, fast to slow; empty if their circuits are open.
    pub tiers: Vec<TierName>,
    /// Length of the block.
    pub bytes: u32,
    /// When its bytes were put. `None` if recovered from an earlier run.
    pub put_unix_ms: Option<u64>,
    /// When its bytes were last read, if ever.
    pub used_unix_ms: Option<u64>,
    /// Number of reads since the put, at most 65,535.
    pub uses: u16,
}

impl Store {
    /// Returns a page of the keys for which `is_match` is true. Does not count as an access.
    ///
    /// The pages of a listing have each key once that is stored throughout. Keys that are put or
    /// removed meanwhile may be on a page; a key that is removed and put again may be on two. The
    /// positions are those of this opening of the store. A page looks at 65,536 entries at most,
    /// and releases the lock after every 256. It ends early when the deadline passes.
    ///
    /// # Errors
    /// [`StoreError::Timeout`] if the deadline passes before the first entry.
    pub fn list_keys(
        &self,
        request: &ListRequest<'_>,
        is_match: impl Fn(&BlockKey) -> bool,
        options: CallOptions,
    ) -> Result<KeyPage, StoreError> {
        let core = self.core();
        let call = core.call(options);
        let now_unix_ms = core.clock.unix_ms();
        let most = request.most.max(1);
        let last = request.from.saturating_add(ENTRIES_PER_PAGE);
        let mut keys = Vec::new();
        let mut at = request.from;
        loop {
            let Some(mut state) = core.lock_within(KEYS_PER_HOLD, call) else {
                if at == request.from {
                    return Err(call.timeout_error("list keys"));
                }
                return Ok(KeyPage { keys, next: Some(at) });
            };
            // An entry never changes its index: although the lock is released in between, the
            // listing has every key that is in the store throughout.
            let end = state.catalog.key_indices_end();
            while at < end.min(last) && keys.len() < most && !state.is_hold_full() {
                state.charge(1);
                let found = state.catalog.keys_at(at..at + 1).next();
                at += 1;
                let Some(found) = found else { continue };
                let entry = state.catalog.entry(found);
                if entry.has_expired(now_unix_ms) || !is_match(&entry.key) {
                    continue;
                }
                state.charge(1);
                let key = describe(core, &state, found);
                if request.tier.is_none_or(|tier| key.tiers.contains(&tier)) {
                    keys.push(key);
                }
            }
            drop(state);
            if at >= end {
                return Ok(KeyPage { keys, next: None });
            }
            if at == last || keys.len() == most || call.deadline.has_passed(core.clock.as_ref()) {
                return Ok(KeyPage { keys, next: Some(at) });
            }
        }
    }
}

fn describe(core: &StoreCore, state: &StoreState, key: KeyIndex) -> ListedKey {
    let entry = state.catalog.entry(key);
    let content = state.catalog.content(entry.content);
    ListedKey {
        key: entry.key,
        tiers: tiers_with(state, key).into_iter().map(|tier| core.tier_name(tier)).collect(),
        bytes: content.bytes,
        put_unix_ms: state.history.unix_ms_of(content.put_stamp),
        used_unix_ms: state.history.unix_ms_of(content.used_stamp),
        uses: content.uses,
    }
}
