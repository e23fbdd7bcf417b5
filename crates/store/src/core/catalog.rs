//! The catalog: block key to content, content to residences, with reference counts.
//!
//! It has two layers: a lookup needs keys, because it happens before the bytes exist, and equal
//! bytes are stored once, which needs contents. Without content hashing each key has its own
//! content.

mod arena;
mod cleared;
mod residences;
mod table;

use std::collections::BTreeSet;

use cascade_block::{BlockKey, Digest, FingerprintSeed};
use cascade_memory::Slab;
use cascade_tier::{Change, TIERS_MAX};

use crate::core::change_log::ChangeLog;
use crate::core::eviction::Slot;
use arena::Arena;
use cleared::Cleared;
use residences::{INLINE_ADDRESSES, StageAddresses};
pub(crate) use table::KeyTable;

/// Most stages below DRAM in one pipeline.
pub(crate) const LOWER_STAGES_MAX: usize = TIERS_MAX - 1;

/// Most keys that share a content, which bounds walks over its keys. Equal bytes with more keys are
/// stored once per this many keys.
const KEYS_PER_CONTENT_MAX: u32 = 1024;

/// The index of no entry.
const NONE: u32 = u32::MAX;

/// Index of a key's entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct KeyIndex(pub(crate) u32);

/// Index of a content's entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ContentIndex(pub(crate) u32);

/// The access that is expected for a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExpectedAccess {
    /// None.
    None,
    /// A chain lookup has reported the coming access to the policy.
    ReportedAccess,
    /// Prefetch promoted the block and it has not been requested since.
    FirstUse,
}

/// One key: its content, and its state in eviction and for callers. One cache line.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct KeyEntry {
    pub(crate) key: BlockKey,
    pub(crate) content: ContentIndex,
    slot: u32,
    next_of_content: u32,
    /// The index may have been reused for another key: `parent_tag` shows whether it was.
    parent: u32,
    parent_tag: u32,
    pub(crate) pins: u16,
    flags: u8,
    pub(crate) expected_access: ExpectedAccess,
    /// Milliseconds since 1970; zero for never.
    pub(crate) expires_unix_ms: u64,
}

/// Flag of a key: its block is protected as part of a prefix.
const IS_PREFIX: u8 = 1;
/// Flag of a key: a chain lookup has matched it since it was added.
const WAS_MATCHED: u8 = 2;

const _: () = assert!(size_of::<Option<KeyEntry>>() == 64, "a key entry fits a cache line");

/// One content: where its bytes are and which keys name it. One cache line, like a key's entry: a
/// lookup has three memory accesses (slot, key, content). Only the read of a block that more than
/// two lower stages have makes a fourth.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Content {
    pub(crate) slab: Option<Slab>,
    /// The addresses in the lower stages of `stages`, or their index; see `residences`.
    addresses: [u64; INLINE_ADDRESSES],
    first_key: u32,
    pub(crate) key_count: u32,
    /// Keys of this content that the policy counts as resident in DRAM.
    pub(crate) resident_keys: u32,
    pub(crate) bytes: u32,
    /// Distinguishes this content from earlier ones at the same index.
    pub(crate) generation: u32,
    /// Bit per lower stage: write-back is queued or in flight.
    pub(crate) dirty: u8,
    /// A caller is reading it from a lower stage.
    pub(crate) is_loading: bool,
    /// Bit per lower stage: requested since it was written there.
    pub(crate) referenced: u8,
    /// Bit per lower stage: it has the bytes.
    stages: u8,
    /// Whether a lower tier has reclaimed its copy to make room, or may do so at any moment.
    pub(crate) was_reclaimed: bool,
    /// Whether a source gave it, which may still have it.
    pub(crate) was_fetched: bool,
    /// Reads since it was put or recovered; saturates.
    pub(crate) uses: u16,
    /// When it was put, as a stamp of the history; zero if it was recovered.
    pub(crate) put_stamp: u32,
    /// When it was last read, as a stamp; zero for never.
    pub(crate) used_stamp: u32,
    /// The writer that put it; zero if not given.
    pub(crate) writer: u32,
}

const _: () = assert!(size_of::<Option<Content>>() == 64, "a content fits a cache line");

impl KeyEntry {
    pub(crate) fn slot(&self) -> Option<Slot> {
        Slot::some(self.slot)
    }

    pub(crate) fn set_slot(&mut self, slot: Option<Slot>) {
        self.slot = Slot::raw(slot);
    }

    pub(crate) fn is_prefix(&self) -> bool {
        self.flags & IS_PREFIX != 0
    }

    /// Whether reads of it follow a lookup that has counted them already.
    pub(crate) fn was_matched(&self) -> bool {
        self.flags & WAS_MATCHED != 0
    }

    pub(crate) fn note_matched(&mut self) {
        self.flags |= WAS_MATCHED;
    }

    pub(crate) fn has_expired(&self, now_unix_ms: u64) -> bool {
        self.expires_unix_ms != 0 && self.expires_unix_ms <= now_unix_ms
    }
}

impl Content {
    /// Counts a read of its bytes.
    pub(crate) fn note_use(&mut self, stamp: u32) {
        self.uses = self.uses.saturating_add(1);
        self.used_stamp = stamp;
    }
}

/// Initial values of a key entry.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewKey {
    pub(crate) key: BlockKey,
    pub(crate) parent: Option<BlockKey>,
    pub(crate) is_prefix: bool,
    pub(crate) expires_unix_ms: u64,
}

/// All keys and contents of one node.
#[derive(Debug)]
pub(crate) struct Catalog {
    seed: FingerprintSeed,
    table: KeyTable,
    keys: Arena<KeyEntry>,
    contents: Arena<Content>,
    /// Digest of each content by its index; empty when content hashing is off.
    digests: Arena<Digest>,
    by_digest: KeyTable,
    /// The addresses of contents that more lower stages have than fit into their entries.
    many_addresses: Arena<StageAddresses>,
    generation: u32,
    /// The key that was added last; another key may have its index by now.
    added_last: u32,
    cleared: Cleared,
    /// Number of contents with an address in each lower stage.
    stage_blocks: [u64; LOWER_STAGES_MAX],
    /// The keys added and removed, while a subscriber follows them.
    changes: Option<Box<ChangeLog>>,
    /// To be dropped without the lock.
    discarded: Vec<Discarded>,
}

/// What can be large, and is dropped only after the lock is released.
#[derive(Debug)]
#[expect(dead_code, reason = "kept only to be dropped")]
pub(crate) enum Discarded {
    /// A change log without a reader.
    Log(Box<ChangeLog>),
    /// The expiration times of cleared keys.
    Expirations(BTreeSet<(u64, u32)>),
    /// The slab of a removed block: its memory and its header go back to their allocators, which
    /// may return a large part of the process's memory to the kernel.
    Slab(Slab),
}

impl Catalog {
    pub(crate) fn new(seed: FingerprintSeed) -> Self {
        Self {
            seed,
            table: KeyTable::new(),
            keys: Arena::new(),
            contents: Arena::new(),
            digests: Arena::new(),
            by_digest: KeyTable::new(),
            many_addresses: Arena::new(),
            generation: 0,
            added_last: NONE,
            cleared: Cleared::default(),
            stage_blocks: [0; LOWER_STAGES_MAX],
            changes: None,
            discarded: Vec::new(),
        }
    }

    /// The secret seed of the tables.
    pub(crate) fn seed(&self) -> FingerprintSeed {
        self.seed
    }

    /// Keys known in any tier.
    pub(crate) fn key_count(&self) -> usize {
        self.keys.len() - self.cleared_keys()
    }

    /// Contents known in any tier.
    pub(crate) fn content_count(&self) -> usize {
        self.contents.len()
    }

    /// Memory of the tables and entries.
    pub(crate) fn memory_bytes(&self) -> usize {
        let tables = self.table.memory_bytes() + self.by_digest.memory_bytes();
        let entries = self.keys.memory_bytes() + self.contents.memory_bytes();
        let changes = self.changes.as_ref().map_or(0, |log| log.memory_bytes());
        let addresses = self.many_addresses.memory_bytes();
        tables + entries + addresses + self.digests.memory_bytes() + changes
    }

    pub(crate) fn changes_mut(&mut self) -> &mut Option<Box<ChangeLog>> {
        &mut self.changes
    }

    /// Reports a change to subscribers, if there are any.
    pub(crate) fn report(&mut self, change: Change) {
        if let Some(log) = &mut self.changes
            && !log.push(change)
        {
            // The log has no reader any more.
            self.discarded.extend(self.changes.take().map(Discarded::Log));
        }
    }

    /// Empties the expiration times of the log.
    pub(crate) fn clear_expirations(&mut self) {
        if let Some(log) = &mut self.changes {
            let expirations = std::mem::take(&mut log.expirations);
            self.discarded.push(Discarded::Expirations(expirations));
        }
    }

    /// Keeps the slab of a removed content until the lock is released.
    pub(crate) fn discard(&mut self, slab: Slab) {
        self.discarded.push(Discarded::Slab(slab));
    }

    /// What was discarded since the last call. To be dropped after the lock is released.
    #[inline]
    pub(crate) fn take_discarded(&mut self) -> Vec<Discarded> {
        // Usually empty, which allocates nothing.
        std::mem::take(&mut self.discarded)
    }

    pub(crate) fn find(&self, key: &BlockKey) -> Option<KeyIndex> {
        self.find_by(key, self.fingerprint(key))
    }

    fn find_by(&self, key: &BlockKey, fingerprint: u64) -> Option<KeyIndex> {
        #[cfg(test)]
        PROBES.set(PROBES.get() + 1);
        let found = self.table.find(fingerprint, |index| self.keys.get(index).key == *key);
        let found = found.map(KeyIndex);
        if self.cleared_keys() == 0 {
            return found;
        }
        found.filter(|key| !self.is_cleared(self.entry(*key).content))
    }

    /// As `find`, also a cleared key, and not counted in tests.
    fn find_in_table(&self, key: &BlockKey) -> Option<u32> {
        self.table.find(self.fingerprint(key), |index| self.keys.get(index).key == *key)
    }

    /// The fingerprint of a key in this store.
    pub(crate) fn fingerprint(&self, key: &BlockKey) -> u64 {
        self.seed.of_key(key)
    }

    /// Finds a batch. Prefetches a row of slots, then of keys, then of contents before they are
    /// used, so that the memory accesses overlap instead of adding up.
    pub(crate) fn find_batch(&self, keys: &[BlockKey], found: &mut Vec<Option<KeyIndex>>) {
        /// This many keys with three cache lines each stay in the L1 cache.
        const ROW: usize = 64;
        let mut prints = [0; ROW];
        for row in keys.chunks(ROW) {
            for (key, print) in row.iter().zip(&mut prints) {
                *print = self.fingerprint(key);
                self.table.prefetch(*print);
            }
            for print in &prints[..row.len()] {
                // A candidate with an equal tag may be another key; then only a prefetch is wasted.
                if let Some(candidate) = self.table.candidate(*print) {
                    self.keys.prefetch(candidate);
                }
            }
            let first = found.len();
            found.extend(row.iter().zip(&prints).map(|(key, print)| self.find_by(key, *print)));
            for key in found[first..].iter().flatten() {
                self.contents.prefetch(self.entry(*key).content.0);
            }
        }
    }

    pub(crate) fn entry(&self, key: KeyIndex) -> &KeyEntry {
        self.keys.get(key.0)
    }

    pub(crate) fn entry_mut(&mut self, key: KeyIndex) -> &mut KeyEntry {
        self.keys.get_mut(key.0)
    }

    pub(crate) fn content(&self, content: ContentIndex) -> &Content {
        self.contents.get(content.0)
    }

    pub(crate) fn content_mut(&mut self, content: ContentIndex) -> &mut Content {
        self.contents.get_mut(content.0)
    }

    /// The content at an index, if its generation is still the same.
    pub(crate) fn live_content(&mut self, of: (ContentIndex, u32)) -> Option<&mut Content> {
        // Reads and writes refer to a content while the lock is released, and its index may be
        // reused meanwhile.
        let is_live = self.contents.try_get(of.0.0)?.generation == of.1 && !self.is_cleared(of.0);
        is_live.then(|| self.contents.get_mut(of.0.0))
    }

    pub(crate) fn find_digest(&self, digest: &Digest) -> Option<ContentIndex> {
        let mark = self.seed.of_digest(digest);
        let is_it =
            |index| self.digests.get(index) == digest && !self.is_cleared(ContentIndex(index));
        self.by_digest.find(mark, is_it).map(ContentIndex)
    }

    pub(crate) fn digest_of(&self, content: ContentIndex) -> Option<&Digest> {
        self.digests.try_get(content.0)
    }

    /// The entry of the previous block of the chain, while it is known.
    pub(crate) fn parent_of(&self, key: KeyIndex) -> Option<KeyIndex> {
        let entry = self.entry(key);
        let parent = self.keys.try_get(entry.parent)?;
        // The index may have been reused for another key; then its tag differs.
        (self.tag_of(&parent.key) == entry.parent_tag).then_some(KeyIndex(entry.parent))
    }

    pub(crate) fn set_parent(&mut self, key: KeyIndex, parent: &BlockKey) {
        // Most keys are added right after their parent.
        let is_parent = |index: &u32| {
            let entry = self.keys.try_get(*index);
            entry.is_some_and(|entry| entry.key == *parent && !self.is_cleared(entry.content))
        };
        let known = Some(self.added_last).filter(is_parent);
        // `parent_of` finds no entry at the index `NONE` of an unknown parent.
        let index = known.or_else(|| self.find(parent).map(|found| found.0)).unwrap_or(NONE);
        let parent_tag = self.tag_of(parent);
        let entry = self.entry_mut(key);
        entry.parent = index;
        entry.parent_tag = parent_tag;
    }

    /// Adds a key that names new bytes.
    pub(crate) fn insert(
        &mut self,
        new: &NewKey,
        bytes: u32,
        digest: Option<Digest>,
    ) -> (KeyIndex, ContentIndex) {
        // A new number for each content: work that released the lock does not take it for an
        // earlier one at the same index.
        self.generation = self.generation.wrapping_add(1);
        let content = ContentIndex(self.contents.insert(Content {
            slab: None,
            addresses: [0; INLINE_ADDRESSES],
            first_key: NONE,
            key_count: 0,
            resident_keys: 0,
            bytes,
            generation: self.generation,
            dirty: 0,
            is_loading: false,
            referenced: 0,
            stages: 0,
            was_reclaimed: false,
            was_fetched: false,
            uses: 0,
            put_stamp: 0,
            used_stamp: 0,
            writer: 0,
        }));
        if let Some(digest) = digest {
            self.digests.insert_at(content.0, digest);
            self.by_digest.insert(self.seed.of_digest(&digest), content.0);
        }
        (self.link(new, content), content)
    }

    /// Adds a key for bytes that are known already.
    pub(crate) fn link(&mut self, new: &NewKey, content: ContentIndex) -> KeyIndex {
        debug_assert!(self.find_in_table(&new.key).is_none(), "a key has one entry");
        let next_of_content = self.content(content).first_key;
        let key = self.keys.insert(KeyEntry {
            key: new.key,
            content,
            slot: Slot::raw(None),
            next_of_content,
            parent: NONE,
            parent_tag: 0,
            pins: 0,
            flags: if new.is_prefix { IS_PREFIX } else { 0 },
            expected_access: ExpectedAccess::None,
            expires_unix_ms: new.expires_unix_ms,
        });
        self.table.insert(self.fingerprint(&new.key), key);
        let at = content;
        let content = self.content_mut(content);
        content.first_key = key;
        content.key_count += 1;
        let is_full = content.key_count == KEYS_PER_CONTENT_MAX;
        if is_full && let Some(digest) = self.digests.try_get(at.0) {
            // Further puts of equal bytes make a new content.
            self.by_digest.remove(self.seed.of_digest(digest), at.0);
        }
        if let Some(parent) = &new.parent {
            self.set_parent(KeyIndex(key), parent);
        }
        self.added_last = key;
        if let Some(log) = &mut self.changes {
            log.add_expiration(new.expires_unix_ms, key);
            self.report(Change::Stored(new.key));
        }
        KeyIndex(key)
    }

    /// Removes a key. Returns its content's entry when this was the last key that named it.
    pub(crate) fn remove(&mut self, key: KeyIndex) -> Option<Content> {
        let entry = self.keys.remove(key.0);
        self.table.remove(self.fingerprint(&entry.key), key.0);
        let was_cleared = self.note_removal(entry.content);
        // One change was reported when all were cleared.
        if let Some(log) = self.changes.as_mut().filter(|_| !was_cleared) {
            log.remove_expiration(entry.expires_unix_ms, key.0);
            self.report(Change::Removed(entry.key));
        }
        // The entry is removed already, but holds the link to the next key of its content.
        self.unlink(&entry, key);
        let content = self.content_mut(entry.content);
        content.key_count -= 1;
        if content.key_count > 0 {
            return None;
        }
        // A content that reached the limit of keys has left `by_digest` already.
        if let Some(digest) = self.digests.try_remove(entry.content.0) {
            self.by_digest.remove_if_present(self.seed.of_digest(&digest), entry.content.0);
        }
        let content = self.contents.remove(entry.content.0);
        // Addresses that were not cleared by `set_address` are counted down here.
        self.drop_addresses(&content);
        Some(content)
    }

    fn unlink(&mut self, entry: &KeyEntry, key: KeyIndex) {
        // A singly linked list: at most `KEYS_PER_CONTENT_MAX` steps.
        let first = self.content(entry.content).first_key;
        if first == key.0 {
            self.content_mut(entry.content).first_key = entry.next_of_content;
            return;
        }
        // The key is in the list of its content, so the walk ends.
        let mut at = first;
        while self.keys.get(at).next_of_content != key.0 {
            at = self.keys.get(at).next_of_content;
        }
        self.keys.get_mut(at).next_of_content = entry.next_of_content;
    }

    /// One of the keys that name a content.
    pub(crate) fn first_key_of(&self, content: ContentIndex) -> KeyIndex {
        KeyIndex(self.content(content).first_key)
    }

    /// The keys that name a content, in no particular order.
    pub(crate) fn each_key_of(&self, content: ContentIndex) -> impl Iterator<Item = KeyIndex> + '_ {
        let next_of = |key: &KeyIndex| {
            let next = self.entry(*key).next_of_content;
            (next != NONE).then_some(KeyIndex(next))
        };
        std::iter::successors(Some(self.first_key_of(content)), next_of)
    }

    /// As `each_key_of`, for a caller that changes the catalog meanwhile.
    pub(crate) fn keys_of(&self, content: ContentIndex) -> Vec<KeyIndex> {
        self.each_key_of(content).collect()
    }

    /// The keys at these indices, skipping free and cleared ones.
    pub(crate) fn keys_at(
        &self,
        indices: std::ops::Range<u32>,
    ) -> impl Iterator<Item = KeyIndex> + '_ {
        let is_known = |index: &u32| {
            self.keys.try_get(*index).is_some_and(|entry| !self.is_cleared(entry.content))
        };
        indices.filter(is_known).map(KeyIndex)
    }

    /// The exclusive upper bound of key indices.
    pub(crate) fn key_indices_end(&self) -> u32 {
        self.keys.end()
    }

    /// Distinguishes a parent from a later key at its index.
    fn tag_of(&self, key: &BlockKey) -> u32 {
        (self.fingerprint(key) >> 32) as u32
    }
}

#[cfg(test)]
thread_local! {
    /// Lookups of keys by this thread.
    pub(crate) static PROBES: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

#[cfg(test)]
mod tests;
