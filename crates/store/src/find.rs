//! Search for keys by their first digits, as pages and logs show them.

use cascade_block::{BlockKey, Deadline};

use crate::{CallOptions, Store, StoreError};

/// Catalog entries scanned while the lock is held once.
const PIECE_KEYS: u32 = 2048;
/// Hot prefixes to search: all that are tracked.
const HOT_PREFIXES: usize = 192;

impl Store {
    /// Returns up to `most` keys that begin with these bytes, in the order of the keys. Also finds
    /// keys of hot prefixes whose blocks are no longer in the store.
    ///
    /// Scans every key, and releases the lock after every 2,048, so that other calls can proceed.
    ///
    /// # Errors
    /// [`StoreError::Timeout`] if the deadline passes before the scan is complete.
    pub fn find_keys(
        &self,
        beginning: &[u8],
        most: usize,
        options: CallOptions,
    ) -> Result<Vec<BlockKey>, StoreError> {
        let core = self.core();
        let timeout = options.timeout.unwrap_or(core.config.timeout);
        let deadline = Deadline::after(core.clock.as_ref(), timeout);
        let is_match = |key: &BlockKey| key.as_bytes().starts_with(beginning);
        let hot = self.hot_prefixes(HOT_PREFIXES).into_iter().map(|prefix| prefix.key);
        let mut found: Vec<BlockKey> = hot.filter(is_match).collect();
        let mut from = 0;
        loop {
            let state = core.lock();
            let end = state.catalog.key_indices_end();
            // An entry never changes its index: although the lock is released between pieces, the
            // scan finds every key that is in the store throughout.
            let to = from + PIECE_KEYS.min(end.saturating_sub(from));
            let keys = state.catalog.keys_at(from..to).map(|key| state.catalog.entry(key).key);
            found.extend(keys.filter(is_match));
            drop(state);
            // A key can be in the catalog and the last of a hot prefix.
            found.sort_unstable();
            found.dedup();
            found.truncate(most);
            if to >= end || found.len() == most {
                return Ok(found);
            }
            if deadline.remaining(core.clock.as_ref()).is_zero() {
                let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
                return Err(StoreError::Timeout { operation: "scan all keys", timeout_ms });
            }
            from = to;
        }
    }
}
