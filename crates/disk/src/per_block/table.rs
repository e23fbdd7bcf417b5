//! What a writer knows of the block files: which write each key's file is of, oldest first.

use std::collections::{HashMap, HashSet, VecDeque};

use cascade_block::BlockKey;

use super::block_file::{address_of, file_bytes};
use crate::Address;
use crate::format::RecordEntry;

/// Dead places of the order that are kept before it is swept.
const STALE_ORDER_MAX: usize = 64;

/// The files that this writer knows of. A hint: others add and remove files at any time.
#[derive(Debug, Default)]
pub(super) struct BlockFileTable {
    files: HashMap<BlockKey, TableFile>,
    /// The key of every file in `files`, by its write.
    keys: HashMap<Address, BlockKey>,
    /// The order in which files are reclaimed; may name writes that are gone.
    reclaim_order: VecDeque<Address>,
    used_bytes: u64,
    /// Files whose header is damaged: they cannot be read, and a reclaim removes them first.
    damaged: Vec<DamagedFile>,
    /// Blocks that are to be gone but whose files may still be there.
    hidden: HashSet<(BlockKey, Address)>,
    pub(super) unsynced: Vec<BlockKey>,
}

/// A file under a block's name that holds no block.
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
    /// Takes in what a file's header says; another write of the same key is forgotten.
    pub(super) fn add(&mut self, entry: &RecordEntry) {
        let (key, address) = (entry.meta.key, address_of(entry));
        if self.contains(&key, address) {
            return;
        }
        let bytes = file_bytes(entry.meta.payload_bytes);
        if let Some(before) = self.files.insert(key, TableFile { address, bytes }) {
            self.keys.remove(&before.address);
            self.used_bytes -= before.bytes;
        }
        self.keys.insert(address, key);
        self.used_bytes += bytes;
        self.reclaim_order.push_back(address);
        if self.reclaim_order.len() > 2 * self.keys.len() + STALE_ORDER_MAX {
            self.reclaim_order.retain(|each| self.keys.contains_key(each));
        }
    }

    /// Whether a key's file is that of a write.
    pub(super) fn contains(&self, key: &BlockKey, address: Address) -> bool {
        self.files.get(key).is_some_and(|file| file.address == address)
    }

    /// The key that a write was for.
    pub(super) fn key_at(&self, address: Address) -> Option<BlockKey> {
        self.keys.get(&address).copied()
    }

    pub(super) fn any_key(&self) -> Option<BlockKey> {
        self.files.keys().next().copied()
    }

    /// Forgets a write; the bytes of its file, or 0 if it was not known.
    pub(super) fn remove(&mut self, key: &BlockKey, address: Address) -> u64 {
        if !self.contains(key, address) {
            return 0;
        }
        self.keys.remove(&address);
        let bytes = self.files.remove(key).map_or(0, |file| file.bytes);
        self.used_bytes -= bytes;
        bytes
    }

    /// Takes the next write to reclaim out of the order: key, address, bytes.
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

    /// Their bytes are counted no longer.
    pub(super) fn take_damaged(&mut self) -> Vec<DamagedFile> {
        let files = std::mem::take(&mut self.damaged);
        self.used_bytes -= files.iter().map(|file| file.bytes).sum::<u64>();
        files
    }

    /// Puts writes back behind the others.
    pub(super) fn requeue(&mut self, writes: impl IntoIterator<Item = Address>) {
        self.reclaim_order.extend(writes);
    }

    /// Reads answer `Gone` from now on, whatever becomes of the files.
    pub(super) fn hide(&mut self, blocks: &[(BlockKey, Address)]) {
        self.hidden.extend(blocks);
    }

    /// The files of these blocks are gone, or are other blocks'.
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
