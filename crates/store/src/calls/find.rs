//! Search for keys by their first digits, as pages and logs show them.

use cascade_block::BlockKey;
use cascade_tier::{CallOptions, StoreError};

use crate::Store;

/// Catalog entries scanned while the lock is held once.
const PIECE_KEYS: u32 = 256;

impl Store {
    /// Returns up to `most` of the keys for which `is_match` is true, in the order of the keys. If
    /// more keys match, it is not specified which of them are returned. Also finds keys of hot
    /// prefixes whose blocks are no longer in the store.
    ///
    /// Scans every key, and releases the lock after every 256, so that other calls can proceed.
    ///
    /// # Errors
    /// [`StoreError::Timeout`] if the deadline passes before the scan is complete.
    pub fn find_keys(
        &self,
        is_match: impl Fn(&BlockKey) -> bool,
        most: usize,
        options: CallOptions,
    ) -> Result<Vec<BlockKey>, StoreError> {
        let core = self.core();
        let call = core.call(options);
        let mut found = core.insight().hot_keys();
        found.retain(&is_match);
        let mut from = 0;
        loop {
            let Some(mut state) = core.lock_within(PIECE_KEYS as usize, call) else {
                return Err(call.timeout_error("scan all keys"));
            };
            let end = state.catalog.key_indices_end();
            // An entry never changes its index: although the lock is released between pieces, the
            // scan finds every key that is in the store throughout.
            let to = from + PIECE_KEYS.min(end.saturating_sub(from));
            state.charge(to - from);
            let before = found.len();
            let keys = state.catalog.keys_at(from..to).map(|key| state.catalog.entry(key).key);
            found.extend(keys.filter(&is_match));
            drop(state);
            // A key can be in the catalog and the last of a hot prefix.
            if found.len() > before {
                found.sort_unstable();
                found.dedup();
            }
            found.truncate(most);
            if to >= end || found.len() == most {
                return Ok(found);
            }
            if call.deadline.has_passed(core.clock.as_ref()) {
                return Err(call.timeout_error("scan all keys"));
            }
            from = to;
        }
    }
}
