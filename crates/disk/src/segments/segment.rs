//! One segment in memory: its file, and a slot of 24 bytes for each block.

use std::path::PathBuf;
use std::sync::{Arc, PoisonError};

use cascade_block::{BlockKey, Checksum};
use cascade_runtime::{Deadline, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::DiskError;
use crate::format::{
    ENTRY_BYTES, EntryKind, PAGE_BYTES, RandomId, RecordEntry, decode_entries, page_aligned,
};
use crate::io::{FileHandle, FileIo, PageBuffer};
use crate::place::Place as _;

/// A segment.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) number: u32,
    pub(super) id: RandomId,
    pub(super) path: PathBuf,
    pub(super) file: Arc<FileHandle>,
    state: RwLock<SegmentState>,
}

/// The mutable state of a segment.
#[derive(Debug)]
pub(super) struct SegmentState {
    /// In the order of their payloads.
    slots: Vec<BlockSlot>,
    pub(super) entry_location: EntryLocation,
    /// Bytes that the file uses on the device.
    /// Until the segment is sealed this is its preallocated size.
    pub(super) file_bytes: u64,
    /// Bytes of live payloads, padded to pages.
    pub(super) live_bytes: u64,
    /// The page after the last frame.
    pub(super) end_page: u32,
}

/// Where the entries of a segment are.
#[derive(Debug, Clone)]
pub(super) enum EntryLocation {
    /// In memory, encoded: the segment has no footer yet.
    Memory(Vec<u8>),
    /// In the footer.
    Footer { page: u32, count: u32, checksum: Checksum },
}

/// A block of a segment.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockSlot {
    /// The first eight bytes of the key. A whole key would more than double the 24 bytes of a slot.
    fingerprint: [u32; 2],
    page: u32,
    pub(super) payload_bytes: u32,
    pub(super) checksum: Checksum,
    /// Whether the key that it was written with is still valid.
    has_first_key: bool,
    /// Whether any key is valid.
    is_live: bool,
}

fn key_fingerprint(key: &BlockKey) -> [u32; 2] {
    let bytes = key.as_bytes();
    let half =
        |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    [half(0), half(4)]
}

impl BlockSlot {
    /// The first page of its payload.
    pub(super) fn page(&self) -> u32 {
        self.page
    }

    /// Whether an entry describes this block.
    pub(super) fn matches_entry(&self, entry: &RecordEntry) -> bool {
        self.payload_bytes == entry.meta.bytes
            && self.checksum == entry.payload_checksum
            && self.fingerprint == key_fingerprint(&entry.meta.key)
    }

    /// Whether the block was written with this key and the key is still valid.
    pub(super) fn is_first_key(&self, key: &BlockKey) -> bool {
        self.has_first_key && self.fingerprint == key_fingerprint(key)
    }

    pub(super) fn is_live(&self) -> bool {
        self.is_live
    }

    fn padded_bytes(&self) -> u64 {
        page_aligned(u64::from(self.payload_bytes))
    }
}

impl Segment {
    pub(super) fn new(
        number: u32,
        id: RandomId,
        path: PathBuf,
        file: Arc<FileHandle>,
        state: SegmentState,
    ) -> Self {
        Self { number, id, path, file, state: RwLock::new(state) }
    }

    pub(super) fn state(&self) -> RwLockReadGuard<'_, SegmentState> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn state_mut(&self) -> RwLockWriteGuard<'_, SegmentState> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// All entries written to the segment, from memory or from the footer.
    pub(super) fn entries(
        &self,
        io: &FileIo,
        deadline: Deadline,
    ) -> Result<Vec<RecordEntry>, EntriesError> {
        // Cloned, so that the state is not locked during the read below.
        let entry_location = self.state().entry_location.clone();
        match entry_location {
            EntryLocation::Memory(encoded) => Ok(encoded
                .chunks(ENTRY_BYTES)
                .map(RecordEntry::decode)
                .collect::<Result<_, _>>()
                .expect("entries in memory were encoded here")),
            EntryLocation::Footer { page, count, checksum } => {
                let file = Arc::clone(&self.file);
                let bytes = count as usize * ENTRY_BYTES;
                let footer = io.call("read", &self.path, deadline, move |files| {
                    let mut pages = PageBuffer::zeroed(bytes);
                    let offset = u64::from(page) * PAGE_BYTES as u64;
                    files.read(&file, offset, pages.bytes_mut())?;
                    Ok(pages)
                });
                match footer {
                    Ok(footer) => decode_entries(&footer.bytes()[..bytes], checksum)
                        .map_err(|error| EntriesError::Damaged(error.to_string())),
                    // A footer that cannot be read is replaced like a damaged one: the frames have
                    // the same entries. A time-out says nothing about the footer, so it is returned
                    // as an error.
                    Err(DiskError::Io { source, .. }) => {
                        Err(EntriesError::Damaged(source.to_string()))
                    }
                    Err(error) => Err(EntriesError::Failed(error)),
                }
            }
        }
    }
}

/// Why the entries of a segment could not be read.
#[derive(Debug)]
pub(super) enum EntriesError {
    /// The footer is damaged or cannot be read.
    Damaged(String),
    /// The call failed; the footer may be intact.
    Failed(DiskError),
}

impl SegmentState {
    /// An empty segment with a file of `file_bytes`.
    pub(super) fn empty(file_bytes: u64) -> Self {
        Self {
            slots: Vec::new(),
            entry_location: EntryLocation::Memory(Vec::new()),
            file_bytes,
            live_bytes: 0,
            // Page 0 is the header.
            end_page: 1,
        }
    }

    /// Adds an entry that was written after all others.
    pub(super) fn add_entry(&mut self, entry: &RecordEntry) {
        if let EntryLocation::Memory(encoded) = &mut self.entry_location {
            let start = encoded.len();
            encoded.resize(start + ENTRY_BYTES, 0);
            entry.encode(&mut encoded[start..]);
        }
        if entry.kind == EntryKind::Block {
            self.add_slot(entry);
        }
    }

    /// Adds a live block after all others.
    pub(super) fn add_slot(&mut self, entry: &RecordEntry) {
        let page = entry.address.page();
        // `position` searches by bisection.
        debug_assert!(self.slots.last().is_none_or(|last| last.page < page));
        let slot = BlockSlot {
            fingerprint: key_fingerprint(&entry.meta.key),
            page,
            payload_bytes: entry.meta.bytes,
            checksum: entry.payload_checksum,
            has_first_key: true,
            is_live: true,
        };
        self.live_bytes += slot.padded_bytes();
        self.slots.push(slot);
    }

    /// The block whose payload starts at `page`.
    pub(super) fn slot(&self, page: u32) -> Option<BlockSlot> {
        self.position(page).map(|at| self.slots[at])
    }

    fn position(&self, page: u32) -> Option<usize> {
        self.slots.binary_search_by_key(&page, |slot| slot.page).ok()
    }

    /// Removes the first key of a block. The block is dead unless it has an alias.
    pub(super) fn remove_first_key(&mut self, page: u32, has_alias: bool) {
        if let Some(at) = self.position(page) {
            self.slots[at].has_first_key = false;
        }
        if !has_alias {
            self.mark_dead(page);
        }
    }

    /// Marks a block without aliases as dead unless its first key is valid.
    pub(super) fn mark_dead_if_unkeyed(&mut self, page: u32) {
        if self.position(page).is_some_and(|at| !self.slots[at].has_first_key) {
            self.mark_dead(page);
        }
    }

    /// Marks a block without any key as dead.
    pub(super) fn mark_dead(&mut self, page: u32) {
        let Some(at) = self.position(page) else { return };
        // The slot stays: its pages are freed only with the whole segment. A block that is already
        // dead must not be subtracted from `live_bytes` again.
        let slot = &mut self.slots[at];
        if slot.is_live {
            slot.is_live = false;
            slot.has_first_key = false;
            self.live_bytes -= slot.padded_bytes();
        }
    }

    /// The live blocks.
    pub(super) fn live_slots(&self) -> impl Iterator<Item = &BlockSlot> {
        self.slots.iter().filter(|slot| slot.is_live)
    }

    pub(super) fn live_records(&self) -> u64 {
        self.slots.iter().filter(|slot| slot.is_live).count() as u64
    }

    pub(super) fn entry_count(&self) -> usize {
        match &self.entry_location {
            EntryLocation::Memory(encoded) => encoded.len() / ENTRY_BYTES,
            EntryLocation::Footer { count, .. } => *count as usize,
        }
    }
}
