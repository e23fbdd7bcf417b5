//! An arena of entries at stable indices, which grows without moving entries.

use cascade_memory::{prefer_huge_pages, prefetch};

use crate::core::eviction::chunks::Chunks;

const CHUNK_BITS: u32 = 16;
const CHUNK: usize = 1 << CHUNK_BITS;

/// Entries by index. Growth adds a chunk, so no insert copies existing entries. A chunk's memory is
/// touched only as it fills.
#[derive(Debug)]
pub(super) struct Arena<T> {
    chunks: Vec<Vec<Option<T>>>,
    free: Chunks<u32>,
    next: u32,
    len: usize,
}

impl<T> Arena<T> {
    pub(super) fn new() -> Self {
        Self { chunks: Vec::new(), free: Chunks::default(), next: 0, len: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Memory of the entries so far; the untouched rest of a chunk takes none.
    pub(super) fn memory_bytes(&self) -> usize {
        let entries: usize = self.chunks.iter().map(Vec::len).sum();
        entries * size_of::<Option<T>>() + self.free.memory_bytes()
    }

    pub(super) fn get(&self, index: u32) -> &T {
        self.try_get(index).expect("an index is used only while its entry lives")
    }

    pub(super) fn get_mut(&mut self, index: u32) -> &mut T {
        self.try_get_mut(index).expect("an index is used only while its entry lives")
    }

    /// Prefetches an entry into the CPU cache.
    pub(super) fn prefetch(&self, index: u32) {
        let (chunk, within) = split(index);
        if let Some(entry) = self.chunks.get(chunk).and_then(|chunk| chunk.get(within)) {
            prefetch(entry);
        }
    }

    pub(super) fn try_get(&self, index: u32) -> Option<&T> {
        let (chunk, within) = split(index);
        self.chunks.get(chunk)?.get(within)?.as_ref()
    }

    pub(super) fn try_get_mut(&mut self, index: u32) -> Option<&mut T> {
        let (chunk, within) = split(index);
        self.chunks.get_mut(chunk)?.get_mut(within)?.as_mut()
    }

    pub(super) fn insert(&mut self, entry: T) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| {
            // The catalog stores `u32::MAX` for no entry.
            assert!(self.next < u32::MAX, "an arena holds fewer than 2^32 - 1 entries");
            self.next += 1;
            self.next - 1
        });
        self.place(index, entry);
        index
    }

    /// Inserts an entry at a given index; an arena uses either this or `insert`.
    pub(super) fn insert_at(&mut self, index: u32, entry: T) {
        self.place(index, entry);
    }

    pub(super) fn remove(&mut self, index: u32) -> T {
        let entry = self.try_remove(index).expect("an entry is removed once");
        self.free.push(index);
        entry
    }

    /// Removes an entry that `insert_at` may have added.
    pub(super) fn try_remove(&mut self, index: u32) -> Option<T> {
        // The index is not put on the free list: with `insert_at`, the caller assigns indices.
        let (chunk, within) = split(index);
        let entry = self.chunks.get_mut(chunk)?.get_mut(within)?.take()?;
        self.len -= 1;
        Some(entry)
    }

    /// One more than the highest index in use so far.
    pub(super) fn end(&self) -> u32 {
        self.next
    }

    fn place(&mut self, index: u32, entry: T) {
        let (chunk, within) = split(index);
        while self.chunks.len() <= chunk {
            // Reserved at once, so that growth within the chunk moves no entry.
            let entries = Vec::with_capacity(CHUNK);
            // Requested before the first write. Not for the first chunk: a huge page takes its
            // 2 MiB for the first entry, which counts in a store with little DRAM.
            if !self.chunks.is_empty() {
                prefer_huge_pages(&entries);
            }
            self.chunks.push(entries);
        }
        let entries = &mut self.chunks[chunk];
        if entries.len() <= within {
            entries.resize_with(within + 1, || None);
        }
        let before = entries[within].replace(entry);
        debug_assert!(before.is_none(), "an index holds one entry");
        self.len += 1;
    }
}

fn split(index: u32) -> (usize, usize) {
    ((index >> CHUNK_BITS) as usize, index as usize & (CHUNK - 1))
}
