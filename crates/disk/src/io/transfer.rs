//! A transfer: owned buffers to read from or write to one position of one file.

use std::io::{self, IoSlice, IoSliceMut};
use std::ops::Range;
use std::sync::Arc;

use cascade_memory::{HostSlab, HostSlabMut};

use super::FileHandle;
use crate::format::PAGE_BYTES;

/// Page-aligned memory outside the pool, for headers and for unaligned slabs.
#[derive(Debug)]
pub struct PageBuffer {
    memory: Vec<u8>,
    start: usize,
    bytes: usize,
}

impl PageBuffer {
    /// Zeroed memory of `bytes` rounded up to whole pages.
    pub fn zeroed(bytes: usize) -> Self {
        let bytes = bytes.next_multiple_of(PAGE_BYTES);
        // One page more than needed, because the allocation may start anywhere. The vector never
        // grows, so its start stays aligned.
        let memory = vec![0; bytes + PAGE_BYTES];
        let start = memory.as_ptr().align_offset(PAGE_BYTES);
        Self { memory, start, bytes }
    }

    /// A copy of the bytes, padded with zeroes to whole pages.
    pub fn copied(source: &[u8]) -> Self {
        let mut buffer = Self::zeroed(source.len());
        buffer.bytes_mut()[..source.len()].copy_from_slice(source);
        buffer
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.bytes]
    }

    /// The bytes, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.bytes]
    }
}

/// Memory that a transfer owns while it is in flight.
#[derive(Debug)]
pub enum Buffer {
    /// Part of a sealed slab, for writes.
    Sealed(HostSlab, Range<usize>),
    /// Part of an open slab, for reads.
    Open(HostSlabMut, Range<usize>),
    /// Memory outside the pool.
    Pages(PageBuffer),
}

impl Buffer {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Sealed(slab, range) => &slab[range.clone()],
            Self::Open(slab, range) => &slab[range.clone()],
            Self::Pages(pages) => pages.bytes(),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Sealed(..) => &mut [],
            Self::Open(slab, range) => &mut slab[range.clone()],
            Self::Pages(pages) => pages.bytes_mut(),
        }
    }
}

/// The kind of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransferKind {
    /// From the file to the buffers.
    Read,
    /// From the buffers to the file.
    Write,
    /// Syncs the data of a file and its length to stable storage; has no buffers. The file's name
    /// is not synced. After an error each write before it may be on stable storage or lost, and a
    /// later success says nothing about it.
    Sync,
}

/// One vectored read or write, or a sync.
#[derive(Debug)]
pub struct Transfer {
    /// What the transfer does.
    pub kind: TransferKind,
    /// The file.
    pub file: Arc<FileHandle>,
    /// The byte of the file at which it starts.
    pub offset: u64,
    /// The buffers, in the order of the file.
    pub buffers: Vec<Buffer>,
    /// Bytes transferred by earlier attempts.
    moved: usize,
}

impl Transfer {
    /// A transfer of all `buffers`.
    pub fn new(
        kind: TransferKind,
        file: Arc<FileHandle>,
        offset: u64,
        buffers: Vec<Buffer>,
    ) -> Self {
        Self { kind, file, offset, buffers, moved: 0 }
    }

    /// A sync of a file's data.
    pub fn sync(file: Arc<FileHandle>) -> Self {
        Self::new(TransferKind::Sync, file, 0, Vec::new())
    }

    /// The total length of its buffers.
    pub fn total_bytes(&self) -> usize {
        self.buffers.iter().map(|buffer| buffer.bytes().len()).sum()
    }

    /// The offset in the file at which the next attempt starts.
    pub fn next_offset(&self) -> u64 {
        self.offset + self.moved as u64
    }

    /// The bytes that the next attempt writes.
    pub fn slices(&self) -> Vec<IoSlice<'_>> {
        self.pieces().map(IoSlice::new).collect()
    }

    /// The memory that the next attempt reads into.
    pub fn slices_mut(&mut self) -> Vec<IoSliceMut<'_>> {
        self.pieces_mut().map(IoSliceMut::new).collect()
    }

    /// As [`Self::slices`], without a list.
    pub(super) fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        let mut skip = self.moved;
        self.buffers.iter().map(Buffer::bytes).filter_map(move |bytes| {
            let skipped = skip.min(bytes.len());
            skip -= skipped;
            (skipped < bytes.len()).then(|| &bytes[skipped..])
        })
    }

    /// As [`Self::slices_mut`], without a list.
    pub(super) fn pieces_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let mut skip = self.moved;
        self.buffers.iter_mut().map(Buffer::bytes_mut).filter_map(move |bytes| {
            let skipped = skip.min(bytes.len());
            skip -= skipped;
            (skipped < bytes.len()).then(|| &mut bytes[skipped..])
        })
    }

    /// Applies the result of an attempt. Returns whether the transfer is complete.
    ///
    /// Progress is counted in whole pages, because direct I/O can continue only from a page
    /// boundary.
    pub(super) fn advance(&mut self, result: io::Result<usize>) -> io::Result<bool> {
        let left = self.total_bytes() - self.moved;
        let moved = match result {
            Ok(moved) => moved,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(false),
            Err(error) => return Err(error),
        };
        if moved >= left {
            self.moved += left;
            return Ok(true);
        }
        let pages = moved / PAGE_BYTES * PAGE_BYTES;
        // Less than a page: a read reached the end of the file, or a write cannot be continued at a
        // page boundary.
        if pages == 0 {
            return Err(match self.kind {
                TransferKind::Read => io::ErrorKind::UnexpectedEof.into(),
                TransferKind::Write | TransferKind::Sync => io::ErrorKind::WriteZero.into(),
            });
        }
        self.moved += pages;
        Ok(false)
    }
}
