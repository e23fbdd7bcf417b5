//! Finding blocks by the first digits of their keys, as pages and logs show them.

use cascade_block::{BlockKey, Deadline};

use crate::{CallOptions, Store, StoreError};

/// Entries that are looked at while the state is held.
const PIECE: u32 = 2048;
/// Prefixes that many requests share, which pages name: as many as are watched.
const HOT_PREFIXES: usize = 192;

impl Store {
    /// Keys whose bytes begin with these, `most` at most, in the order of the keys. Keys of hot
    /// prefixes are found even when their blocks are gone.
    ///
    /// Looks at every key there is, 2,048 at a time, so that calls go on meanwhile.
    ///
    /// # Errors
    /// If the time was up before every key was looked at.
    pub fn find_keys(
        &self,
        beginning: &[u8],
        most: usize,
        options: CallOptions,
    ) -> Result<Vec<BlockKey>, StoreError> {
        let node = self.node();
        let timeout = options.timeout.unwrap_or(node.config.timeout);
        let deadline = Deadline::after(node.clock.as_ref(), timeout);
        let is_meant = |key: &BlockKey| key.as_bytes().starts_with(beginning);
        let hot = self.hot_prefixes(HOT_PREFIXES).into_iter().map(|prefix| prefix.key);
        let mut found: Vec<BlockKey> = hot.filter(is_meant).collect();
        let mut from = 0;
        loop {
            let state = node.lock();
            let end = state.catalog.key_indices_end();
            let to = from + PIECE.min(end.saturating_sub(from));
            let here = state.catalog.keys_at(from..to).map(|key| state.catalog.entry(key).key);
            found.extend(here.filter(is_meant));
            drop(state);
            found.sort_unstable();
            found.dedup();
            found.truncate(most);
            if to >= end || found.len() == most {
                return Ok(found);
            }
            if deadline.remaining(node.clock.as_ref()).is_zero() {
                let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
                return Err(StoreError::Timeout { operation: "find a block", timeout_ms });
            }
            from = to;
        }
    }
}
