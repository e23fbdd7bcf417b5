//! The table of block files in memory: the write of each key's file, oldest first.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use cascade_block::BlockKey;

use super::block_file::{address_of, file_bytes};
use super::unsynced::Unsynced;
use crate::Address;
use crate::format::RecordEntry;

/// Stale items tolerated in `reclaim_order` beside one per file.
const STALE_ORDER_MAX: usize = 64;

/// The block files. A hint: other processes add and remove files at any time.
#[derive(Debug, Default)]
pub(super) struct BlockFileTable {
    files: HashMap<BlockKey, TableFile>,
    /// The key of every file in `files`, by its address. Ordered, so that `any_key` does not depend
    /// on the seed of a hash table.
    keys: BTreeMap<Address, BlockKey>,
    /// The order in which files are reclaimed. May contain writes that no longer exist.
    reclaim_order: VecDeque<Address>,
    /// Bytes of `files` and `damaged`.
    used_bytes: u64,
    /// Files with a damaged header. They cannot be read, and a reclaim removes them first.
    damaged: Vec<DamagedFile>,
    /// Removed blocks whose files may still exist.
    hidden: HashSet<(BlockKey, Address)>,
    pub(super) unsynced: Unsynced,
}

/// A file with a block's name that contains no block.
#[derive(Debug, Clone, Copy)]
pub(super) struct DamagedFile {
    pub(super) key: BlockKey,
    pub(super) bytes: u64,
}

#[derive(Debug, Clone, Copy)]
struct TableFile {
    address: Address,
    bytes: u64,
}

impl BlockFileTable {
    /// Adds a file from its header's entry and replaces an earlier write of the same key.
    pub(super) fn add(&mut self, entry: &RecordEntry) {
        let (key, address) = (entry.meta.key, address_of(entry));
        // A known write keeps its place in the reclaim order.
        if self.contains(&key, address) {
            return;
        }
        let bytes = file_bytes(entry.meta.bytes);
        if let Some(before) = self.files.insert(key, TableFile { address, bytes }) {
            self.keys.remove(&before.address);
            self.used_bytes -= before.bytes;
        }
        self.keys.insert(address, key);
        self.used_bytes += bytes;
        self.reclaim_order.push_back(address);
        // At this length more than half of the items are stale, so each scan removes at least as
        // many items as it keeps.
        if self.reclaim_order.len() > 2 * self.keys.len() + STALE_ORDER_MAX {
            self.reclaim_order.retain(|each| self.keys.contains_key(each));
        }
    }

    /// Whether the key's file is that of this write.
    pub(super) fn contains(&self, key: &BlockKey, address: Address) -> bool {
        self.files.get(key).is_some_and(|file| file.address == address)
    }

    /// Whether a key has a file.
    pub(super) fn has(&self, key: &BlockKey) -> bool {
        self.files.contains_key(key)
    }

    /// The key of a write.
    pub(super) fn key_at(&self, address: Address) -> Option<BlockKey> {
        self.keys.get(&address).copied()
    }

    pub(super) fn any_key(&self) -> Option<BlockKey> {
        self.keys.values().next().copied()
    }

    /// Removes a write. Returns the bytes of its file, or 0 if it is not in the table.
    pub(super) fn remove(&mut self, key: &BlockKey, address: Address) -> u64 {
        if !self.contains(key, address) {
            return 0;
        }
        // Its item in `reclaim_order` becomes stale, and `pop_oldest` skips it.
        self.keys.remove(&address);
        let bytes = self.files.remove(key).map_or(0, |file| file.bytes);
        self.used_bytes -= bytes;
        bytes
    }

    /// Takes the oldest write out of the reclaim order: key, address, bytes.
    pub(super) fn pop_oldest(&mut self) -> Option<(BlockKey, Address, u64)> {
        while let Some(address) = self.reclaim_order.pop_front() {
            if let Some(key) = self.keys.get(&address) {
                return Some((*key, address, self.files.get(key).map_or(0, |file| file.bytes)));
            }
        }
        None
    }

    pub(super) fn add_damaged(&mut self, files: Vec<DamagedFile>) {
        self.used_bytes += files.iter().map(|file| file.bytes).sum::<u64>();
        self.damaged.extend(files);
    }

    /// Takes the damaged files out of the table and no longer counts their bytes.
    pub(super) fn take_damaged(&mut self) -> Vec<DamagedFile> {
        let files = std::mem::take(&mut self.damaged);
        self.used_bytes -= files.iter().map(|file| file.bytes).sum::<u64>();
        files
    }

    /// Returns writes to the end of the reclaim order.
    pub(super) fn requeue(&mut self, writes: impl IntoIterator<Item = Address>) {
        self.reclaim_order.extend(writes);
    }

    /// Reads of these blocks return `Gone` from now on, even if their files remain.
    pub(super) fn hide(&mut self, blocks: &[(BlockKey, Address)]) {
        self.hidden.extend(blocks);
    }

    /// Ends the hiding of blocks whose files no longer exist or belong to other writes.
    pub(super) fn unhide(&mut self, blocks: &[(BlockKey, Address)]) {
        for block in blocks {
            self.hidden.remove(block);
        }
    }

    pub(super) fn is_hidden(&self, key: &BlockKey, address: Address) -> bool {
        self.hidden.contains(&(*key, address))
    }

    pub(super) fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    pub(super) fn file_count(&self) -> u64 {
        self.files.len() as u64
    }
}
