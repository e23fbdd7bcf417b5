//! The blocks that calls fetch from sources, so that concurrent readers share one fetch.

use std::collections::BTreeMap;

use cascade_block::BlockKey;

/// Keys of blocks in flight from sources. They are not in the catalog: no tier has them yet.
#[derive(Debug, Default)]
pub(crate) struct Fetching {
    /// A tree, because a hash table would grow in one hold of the store's lock.
    by_key: BTreeMap<BlockKey, u64>,
    next: u64,
}

impl Fetching {
    pub(crate) fn contains(&self, key: &BlockKey) -> bool {
        self.by_key.contains_key(key)
    }

    /// A call begins to fetch a block. Returns the number of the fetch.
    pub(crate) fn begin(&mut self, key: BlockKey) -> u64 {
        self.next += 1;
        self.by_key.insert(key, self.next);
        self.next
    }

    /// A fetch has ended. Returns whether the store may keep the block: not if the block was
    /// deleted since the fetch began.
    pub(crate) fn end(&mut self, key: &BlockKey, number: u64) -> bool {
        let is_current = self.by_key.get(key) == Some(&number);
        if is_current {
            self.by_key.remove(key);
        }
        is_current
    }

    /// A block is deleted: the store does not keep what a fetch brings.
    pub(crate) fn cancel(&mut self, key: &BlockKey) {
        self.by_key.remove(key);
    }

    /// All blocks are deleted.
    pub(crate) fn cancel_all(&mut self) {
        self.by_key.clear();
    }
}
