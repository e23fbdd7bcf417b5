//! The index of a record stage: its blocks, their names, and the room that they take.

use std::collections::BTreeMap;
use std::ops::Bound;

use cascade_block::BlockKey;
use cascade_tier::tier::BlockFacts;

use super::record::{HEADER_BYTES, RecordHeader, RecordKind, name_of};

/// Blocks by address, so the oldest comes first.
#[derive(Debug, Default)]
pub(super) struct RecordIndex {
    entries: BTreeMap<u64, IndexedBlock>,
    used_bytes: u64,
}

/// One block.
#[derive(Debug)]
pub(super) struct IndexedBlock {
    /// The first name, which is in the block's own record.
    pub(super) origin: BlockKey,
    bytes: u32,
    names: Vec<BlockName>,
    revocation: Option<u64>,
}

#[derive(Debug)]
struct BlockName {
    key: BlockKey,
    /// The name's own record; the first name has none.
    record: Option<u64>,
}

/// The writes and deletions that remove names.
#[derive(Debug, Default)]
pub(super) struct RemovalPlan {
    /// Records to delete.
    pub(super) records: Vec<String>,
    /// Blocks that lose their first name and keep others.
    pub(super) revoked: Vec<(u64, BlockKey)>,
}

impl IndexedBlock {
    pub(super) fn has(&self, key: &BlockKey) -> bool {
        self.names.iter().any(|name| name.key == *key)
    }

    /// Length of the block.
    pub(super) fn bytes(&self) -> u32 {
        self.bytes
    }

    /// The record that revokes the first name.
    pub(super) fn revocation(&self) -> Option<u64> {
        self.revocation
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = BlockKey> + '_ {
        self.names.iter().map(|name| name.key)
    }

    /// Bytes of all its records.
    pub(super) fn room(&self) -> u64 {
        let records = 1
            + self.names.iter().filter(|name| name.record.is_some()).count()
            + usize::from(self.revocation.is_some());
        u64::from(self.bytes) + (records * HEADER_BYTES) as u64
    }

    /// The names of all its records.
    fn records(&self, address: u64) -> impl Iterator<Item = String> + '_ {
        let names = self.names.iter().filter_map(|name| name.record);
        std::iter::once(address).chain(names).chain(self.revocation).map(name_of)
    }
}

impl RecordIndex {
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Reserves room before a record is written; false when there is none.
    pub(super) fn reserve(&mut self, bytes: u64, capacity_bytes: u64) -> bool {
        let used_bytes = self.used_bytes.saturating_add(bytes);
        let fits = used_bytes <= capacity_bytes;
        if fits {
            self.used_bytes = used_bytes;
        }
        fits
    }

    /// Releases the room of a record that was not written.
    pub(super) fn release(&mut self, bytes: u64) {
        self.used_bytes -= bytes;
    }

    /// Adds a block; the room of its record is already reserved.
    pub(super) fn insert(&mut self, address: u64, facts: &BlockFacts) {
        let names = vec![BlockName { key: facts.key, record: None }];
        let entry = IndexedBlock { origin: facts.key, bytes: facts.bytes, names, revocation: None };
        let before = self.entries.insert(address, entry);
        assert!(before.is_none(), "an address is given out once");
    }

    pub(super) fn get(&self, address: u64) -> Option<&IndexedBlock> {
        self.entries.get(&address)
    }

    /// Applies a record about the block at another address; its room is already reserved. Returns
    /// false if it has no effect; then its room is released.
    pub(super) fn apply(&mut self, header: &RecordHeader) -> bool {
        let (key, record) = (header.facts.key, header.address);
        // The names of a block end with it.
        let Some(entry) = self.entries.get_mut(&header.target) else {
            self.release(HEADER_BYTES as u64);
            return false;
        };
        let is_first = entry.origin == key;
        let has_effect = match header.kind {
            RecordKind::Alias => !is_first && entry.bytes == header.facts.bytes && !entry.has(&key),
            _ => is_first && entry.revocation.is_none(),
        };
        if !has_effect {
            self.release(HEADER_BYTES as u64);
        } else if header.kind == RecordKind::Alias {
            entry.names.push(BlockName { key, record: Some(record) });
        } else {
            entry.revocation = Some(record);
            entry.names.retain(|name| name.key != key);
        }
        has_effect
    }

    /// Restores the first name of a block; the record that revoked it is deleted.
    pub(super) fn restore_origin(&mut self, address: u64) {
        let Some(entry) = self.entries.get_mut(&address) else { return };
        if entry.revocation.take().is_some() {
            entry.names.push(BlockName { key: entry.origin, record: None });
            self.used_bytes -= HEADER_BYTES as u64;
        }
    }

    /// The writes and deletes needed before names can be forgotten.
    pub(super) fn plan_removal(&self, batch: &[(BlockKey, u64)]) -> RemovalPlan {
        // By block, because all names of the batch together decide whether a block loses its last
        // one.
        let mut by_address: BTreeMap<u64, Vec<BlockKey>> = BTreeMap::new();
        for (key, address) in batch {
            by_address.entry(*address).or_default().push(*key);
        }
        let mut removal = RemovalPlan::default();
        for (address, keys) in by_address {
            let Some(entry) = self.entries.get(&address) else { continue };
            let is_removed = |name: &&BlockName| keys.contains(&name.key);
            if entry.names.iter().all(|name| is_removed(&name)) {
                removal.records.extend(entry.records(address));
                continue;
            }
            for name in entry.names.iter().filter(is_removed) {
                match name.record {
                    Some(record) => removal.records.push(name_of(record)),
                    None => removal.revoked.push((address, name.key)),
                }
            }
        }
        removal
    }

    /// Forgets names; a block is removed with its last one.
    pub(super) fn forget(&mut self, batch: &[(BlockKey, u64)]) {
        for (key, address) in batch {
            let Some(entry) = self.entries.get_mut(address) else { continue };
            let room = entry.room();
            entry.names.retain(|name| name.key != *key);
            if entry.names.is_empty() {
                self.entries.remove(address);
                self.used_bytes -= room;
            } else {
                self.used_bytes -= room - entry.room();
            }
        }
    }

    /// Forgets a block and returns it: its record is missing or about to be deleted.
    pub(super) fn drop_block(&mut self, address: u64) -> Option<IndexedBlock> {
        let entry = self.entries.remove(&address)?;
        self.used_bytes -= entry.room();
        Some(entry)
    }

    /// All records of a block.
    pub(super) fn records(&self, address: u64) -> Vec<String> {
        self.entries.get(&address).map(|entry| entry.records(address).collect()).unwrap_or_default()
    }

    /// Up to `count` blocks after an address, the oldest first.
    pub(super) fn after(
        &self,
        address: Option<u64>,
        count: usize,
    ) -> impl Iterator<Item = (u64, &IndexedBlock)> {
        let from = address.map_or(Bound::Unbounded, Bound::Excluded);
        let younger = self.entries.range((from, Bound::Unbounded));
        younger.take(count).map(|(address, entry)| (*address, entry))
    }
}
