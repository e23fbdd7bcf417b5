//! Cleared keys: absent for every call at once, removed one after the other.
//!
//! Removing a million keys takes most of a second, too long to hold the lock. Contents are
//! numbered, so one number says which of them a clear has made absent.

use super::{Catalog, Content, ContentIndex, KeyIndex};
use cascade_block::BlockKey;

/// Absent indices that are looked at for the price of one key.
const ABSENT_PER_KEY: u32 = 16;
/// Half of all numbers: a content is older than a mark if it is less than this behind it.
const HALF: u32 = 1 << 31;

/// Which contents a clear has made absent.
#[derive(Debug, Default)]
pub(super) struct Cleared {
    /// The number of the newest cleared content.
    mark: u32,
    /// Cleared keys that are not removed yet. The mark has no meaning without any.
    keys: usize,
}

impl Catalog {
    /// Makes every key absent. They stay in the tables until they are removed one by one.
    pub(crate) fn clear(&mut self) {
        self.cleared = Cleared { mark: self.generation, keys: self.keys.len() };
    }

    /// Cleared keys that are not removed yet.
    pub(crate) fn cleared_keys(&self) -> usize {
        self.cleared.keys
    }

    /// Whether a content was cleared.
    #[inline]
    pub(crate) fn is_cleared(&self, content: ContentIndex) -> bool {
        self.cleared.keys > 0 && self.is_before_mark(self.content(content))
    }

    /// A key that was cleared and is not removed yet.
    pub(crate) fn find_cleared(&self, key: &BlockKey) -> Option<KeyIndex> {
        if self.cleared.keys == 0 {
            return None;
        }
        let found = self.table.find(self.fingerprint(key), |at| self.keys.get(at).key == *key);
        found.map(KeyIndex).filter(|key| self.is_cleared(self.entry(*key).content))
    }

    /// The next cleared key from an index on, and the index after it. Looks at the indices that
    /// `most` keys pay for; if none of them is cleared, returns the index after these.
    pub(crate) fn next_cleared(&self, from: u32, most: u32) -> (Option<KeyIndex>, u32) {
        let end = self.keys.end();
        let to = from.saturating_add(most.saturating_mul(ABSENT_PER_KEY)).min(end);
        let is_cleared = |index: &u32| {
            self.keys.try_get(*index).is_some_and(|entry| self.is_cleared(entry.content))
        };
        match (from..to).find(is_cleared) {
            Some(index) => (Some(KeyIndex(index)), index + 1),
            None => (None, to),
        }
    }

    /// Counts the removal of a key of a content; returns whether the content was cleared.
    pub(super) fn note_removal(&mut self, content: ContentIndex) -> bool {
        let is_cleared = self.is_cleared(content);
        self.cleared.keys -= usize::from(is_cleared);
        is_cleared
    }

    pub(super) fn is_before_mark(&self, content: &Content) -> bool {
        // Modulo the numbers, which begin again at zero.
        self.cleared.mark.wrapping_sub(content.generation) < HALF
    }
}
