//! The keys that a stage is about to record.
//!
//! A key that shares the bytes of another one is in the catalog before a stage knows it. Until then
//! its bytes are read under a key that the stage has: its `via`.

use std::collections::BTreeMap;
use std::ops::Bound;

use cascade_block::BlockKey;

use crate::core::awaited::Place;
use crate::core::bound::KEYS_PER_HOLD;
use crate::core::pending::KeyChange;

/// The keys that one stage is about to record.
#[derive(Debug, Default)]
pub(crate) struct Additions {
    /// A tree, because a hash table of 65,536 keys would grow in one hold of the store's lock.
    pending: BTreeMap<BlockKey, Pending>,
    /// Number of additions that the stage has recorded, or that were dropped.
    settled: u64,
}

/// A key with queued additions: a key can be removed and added again while it is queued.
#[derive(Debug)]
struct Pending {
    count: u32,
    /// The content that the latest addition names.
    place: Place,
    /// Another key of the same content. The stage has it, or records it before this key. It is
    /// removed from the stage only after this key is recorded.
    via: BlockKey,
}

impl Additions {
    /// The addition of a key was queued.
    pub(crate) fn push(&mut self, key: BlockKey, place: Place, via: BlockKey) {
        let count = self.pending.get(&key).map_or(0, |pending| pending.count);
        self.pending.insert(key, Pending { count: count + 1, place, via });
    }

    /// These changes were recorded, or dropped from the queue.
    pub(crate) fn settle(&mut self, changes: &[KeyChange]) {
        for change in changes {
            let KeyChange::Add(facts, _) = change else { continue };
            self.settled += 1;
            if let Some(pending) = self.pending.get_mut(&facts.key) {
                pending.count -= 1;
                if pending.count == 0 {
                    self.pending.remove(&facts.key);
                }
            }
        }
    }

    /// The content that the latest queued addition of a key names, and the key under which its
    /// bytes are read until then.
    pub(crate) fn latest_of(&self, key: &BlockKey) -> Option<(Place, BlockKey)> {
        self.pending.get(key).map(|pending| (pending.place, pending.via))
    }

    /// Whether an addition of this key is queued or being recorded.
    pub(crate) fn is_pending(&self, key: &BlockKey) -> bool {
        self.pending.contains_key(key)
    }

    /// The contents that the next queued additions after this key name, as many as a hold handles,
    /// and the last of their keys if there are more.
    pub(crate) fn places_after(&self, key: Option<&BlockKey>) -> (Vec<Place>, Option<BlockKey>) {
        let from = key.map_or(Bound::Unbounded, Bound::Excluded);
        let next: Vec<_> = self
            .pending
            .range::<BlockKey, _>((from, Bound::Unbounded))
            .take(KEYS_PER_HOLD)
            .collect();
        let last = next.last().filter(|_| next.len() == KEYS_PER_HOLD).map(|(key, _)| **key);
        (next.into_iter().map(|(_, pending)| pending.place).collect(), last)
    }

    /// Grows with each addition that the stage has recorded.
    pub(crate) fn settled(&self) -> u64 {
        self.settled
    }
}
