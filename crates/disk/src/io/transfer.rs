//! A transfer: owned buffers on their way from or to one place of one file.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::ops::Range;
use std::sync::Arc;

use cascade_memory::{Slab, SlabMut};

use crate::format::PAGE_BYTES;

/// Page-aligned memory outside the pool, for headers and for slabs that are not aligned.
#[derive(Debug)]
pub struct PageBuffer {
    memory: Vec<u8>,
    start: usize,
    bytes: usize,
}

impl PageBuffer {
    /// Zeroed memory of that many bytes, rounded up to whole pages.
    pub fn zeroed(bytes: usize) -> Self {
        let bytes = bytes.next_multiple_of(PAGE_BYTES);
        let memory = vec![0; bytes + PAGE_BYTES];
        let start = memory.as_ptr().align_offset(PAGE_BYTES);
        Self { memory, start, bytes }
    }

    /// The bytes, padded with zeroes to whole pages.
    pub fn copied(source: &[u8]) -> Self {
        let mut buffer = Self::zeroed(source.len());
        buffer.bytes_mut()[..source.len()].copy_from_slice(source);
        buffer
    }

    /// The memory.
    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.bytes]
    }

    /// The memory, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.bytes]
    }
}

/// Memory that a transfer owns while it is under way.
#[derive(Debug)]
pub enum Buffer {
    /// Part of a sealed slab, to be written to a file.
    Sealed(Slab, Range<usize>),
    /// Part of an open slab, to be read into.
    Open(SlabMut, Range<usize>),
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

/// What a transfer does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransferKind {
    /// File to buffers.
    Read,
    /// Buffers to file.
    Write,
    /// Data that was written before to stable storage; has no buffers.
    Sync,
}

/// One vectored read or write, or a sync.
#[derive(Debug)]
pub struct Transfer {
    /// What to do.
    pub kind: TransferKind,
    /// With which file.
    pub file: Arc<File>,
    /// From which byte of it.
    pub offset: u64,
    /// The memory, in the order of the file.
    pub buffers: Vec<Buffer>,
    /// Bytes that earlier attempts have moved.
    moved: usize,
}

impl Transfer {
    /// A transfer of all the buffers.
    pub fn new(kind: TransferKind, file: Arc<File>, offset: u64, buffers: Vec<Buffer>) -> Self {
        Self { kind, file, offset, buffers, moved: 0 }
    }

    /// A sync of a file's data.
    pub fn sync(file: Arc<File>) -> Self {
        Self::new(TransferKind::Sync, file, 0, Vec::new())
    }

    /// Bytes of all its buffers.
    pub fn total_bytes(&self) -> usize {
        self.buffers.iter().map(|buffer| buffer.bytes().len()).sum()
    }

    /// Where the next attempt starts in the file.
    pub fn next_offset(&self) -> u64 {
        self.offset + self.moved as u64
    }

    /// What the next attempt writes.
    pub fn slices(&self) -> Vec<IoSlice<'_>> {
        let mut skip = self.moved;
        let mut slices = Vec::with_capacity(self.buffers.len());
        for bytes in self.buffers.iter().map(Buffer::bytes) {
            let skipped = skip.min(bytes.len());
            skip -= skipped;
            if skipped < bytes.len() {
                slices.push(IoSlice::new(&bytes[skipped..]));
            }
        }
        slices
    }

    /// What the next attempt reads into.
    pub fn slices_mut(&mut self) -> Vec<IoSliceMut<'_>> {
        let mut skip = self.moved;
        let mut slices = Vec::with_capacity(self.buffers.len());
        for bytes in self.buffers.iter_mut().map(Buffer::bytes_mut) {
            let skipped = skip.min(bytes.len());
            skip -= skipped;
            if skipped < bytes.len() {
                slices.push(IoSliceMut::new(&mut bytes[skipped..]));
            }
        }
        slices
    }

    /// Takes an attempt's result in; whether nothing is left to do.
    ///
    /// Progress counts in whole pages, because direct I/O goes on only from one.
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
