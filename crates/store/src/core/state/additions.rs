//! Key changes of the stages: queued, settled, and what they mean for reads.

use std::collections::HashSet;

use cascade_block::BlockKey;
use cascade_tier::tier::{Address, BlockFacts};

use super::StoreState;
use crate::core::awaited::Place;
use crate::core::bound::KEYS_PER_HOLD;
use crate::core::catalog::{ContentIndex, KeyIndex};
use crate::core::history::Loss;
use crate::core::pending::{KeyChange, PendingWrite};

/// Most steps from a pending key to one that the stage has. Only deletions make the way long.
const STEPS_MAX: usize = 8;

impl StoreState {
    /// What a stage records of a key that shares a content. The rest is that of `content`.
    pub(crate) fn facts_of(&self, key: KeyIndex, content: &BlockFacts) -> BlockFacts {
        let entry = self.catalog.entry(key);
        let expires = entry.expires_unix_ms;
        BlockFacts {
            key: entry.key,
            parent: self.catalog.parent_of(key).map(|parent| self.catalog.entry(parent).key),
            is_prefix: entry.is_prefix(),
            expires_unix_ms: (expires != 0).then_some(expires),
            ..*content
        }
    }

    /// The write of a content under one of its keys. The key that it was queued with may have been
    /// deleted and put again, with other bytes: a stage with one block for each key would replace
    /// the first by the second, while other keys share its bytes. Or with the same bytes, and
    /// another time at which it expires.
    pub(crate) fn with_current_key(&mut self, mut pending: PendingWrite) -> PendingWrite {
        let place = (pending.content, pending.generation);
        if self.catalog.live_content(place).is_none() {
            return pending;
        }
        let found = self.catalog.find(&pending.facts.key).map(|key| self.catalog.entry(key));
        if let Some(entry) = found.filter(|entry| entry.content == pending.content) {
            let expires = entry.expires_unix_ms;
            pending.facts.expires_unix_ms = (expires != 0).then_some(expires);
            pending.facts.is_prefix = entry.is_prefix();
            return pending;
        }
        let Some(key) = self.catalog.each_key_of(pending.content).next() else { return pending };
        PendingWrite { facts: self.facts_of(key, &pending.facts), ..pending }
    }

    /// Queues another key of a content that a stage has. Until the stage has recorded it, its bytes
    /// are read as those of `other`, a key that the stage has or records before it.
    pub(crate) fn push_addition(
        &mut self,
        stage: usize,
        facts: BlockFacts,
        address: Address,
        (place, other): (Place, BlockKey),
    ) {
        // The removal of a deleted key from the stage is queued already, before this addition.
        let is_kept = |key: &BlockKey| self.catalog.find(key).is_some();
        let via = self.recorded_key(stage, place, other).filter(is_kept).unwrap_or(other);
        self.push_key_change(stage, KeyChange::Add(facts, address));
        self.lower[stage].additions.push(facts.key, place, via);
    }

    /// A stage has recorded these key changes, or they were dropped.
    pub(crate) fn settle_key_changes(&mut self, stage: usize, changes: &[KeyChange]) {
        self.lower[stage].additions.settle(changes);
        self.lower[stage].key_tickets.settled += changes.len() as u64;
    }

    /// Takes some of the queued key changes of a stage, as many as one hold of the lock may handle.
    /// They will not be sent.
    pub(crate) fn cancel_key_changes(&mut self, stage: usize) -> Vec<KeyChange> {
        let cancelled = self.lower[stage].key_changes.pop_some(KEYS_PER_HOLD);
        // Takes about a fourth of the time of a lookup.
        self.charge(u32::try_from(cancelled.len().div_ceil(4)).unwrap_or(u32::MAX));
        self.settle_key_changes(stage, &cancelled);
        cancelled
    }

    /// The key under which a stage has the bytes of a key: the key itself, if the stage has
    /// recorded it. `None` if it is not known.
    pub(crate) fn recorded_key(
        &self,
        stage: usize,
        place: Place,
        key: BlockKey,
    ) -> Option<BlockKey> {
        let mut at = key;
        for _ in 0..STEPS_MAX {
            let found = self.catalog.find(&at);
            let is_pending = self.lower[stage].additions.latest_of(&at);
            at = match (found, is_pending) {
                // Put again with other bytes.
                (_, Some((named, _))) if named != place => return None,
                (Some(found), _) if self.catalog.entry(found).content != place.0 => return None,
                (_, Some((_, via))) => via,
                // Also a deleted key: its removal is queued behind the addition that names it.
                (_, None) => return Some(at),
            };
        }
        None
    }

    /// A stage has dropped a content for room, with these names among others. It may have the bytes
    /// under further names, such as a record each, which a restart would recover.
    pub(crate) fn forget_dropped(
        &mut self,
        stage: usize,
        (content, address): (ContentIndex, Address),
        names: &HashSet<(BlockKey, Address)>,
    ) {
        for key in self.catalog.keys_of(content) {
            let name = self.catalog.entry(key).key;
            if !names.contains(&(name, address)) {
                self.push_key_change(stage, KeyChange::Remove(name, address));
            }
        }
        self.clear_address(content, stage);
        self.catalog.content_mut(content).was_reclaimed = true;
        self.forget_if_in_no_tier(content, Loss::Reclaimed);
    }
}
