//! The keys that a stage is about to record.
//!
//! A key that shares the bytes of another one is in the catalog before a stage knows it. Until then
//! the reply of the stage that it has no such key says nothing.

use std::collections::HashMap;

use cascade_block::BlockKey;

use crate::core::state::KeyChange;

/// The keys that one stage is about to record.
#[derive(Debug, Default)]
pub(crate) struct Additions {
    /// Queued additions by key: a key can be removed and added again while it is queued.
    pending: HashMap<BlockKey, u32>,
    /// Number of additions that the stage has recorded, or that were dropped.
    settled: u64,
}

impl Additions {
    /// A change was queued.
    pub(crate) fn push(&mut self, change: &KeyChange) {
        if let KeyChange::Add(facts, _) = change {
            *self.pending.entry(facts.key).or_default() += 1;
        }
    }

    /// These changes were recorded, or dropped from the queue.
    pub(crate) fn settle<'a>(&mut self, changes: impl IntoIterator<Item = &'a KeyChange>) {
        for change in changes {
            let KeyChange::Add(facts, _) = change else { continue };
            self.settled += 1;
            if let Some(count) = self.pending.get_mut(&facts.key) {
                *count -= 1;
                if *count == 0 {
                    self.pending.remove(&facts.key);
                }
            }
        }
    }

    /// Whether an addition of this key is queued or being recorded.
    pub(crate) fn is_pending(&self, key: &BlockKey) -> bool {
        self.pending.contains_key(key)
    }

    /// Grows with each addition that the stage has recorded.
    pub(crate) fn settled(&self) -> u64 {
        self.settled
    }
}
