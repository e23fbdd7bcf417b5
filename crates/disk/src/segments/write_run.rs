//! A write run: entries placed in frames, with the buffers of one write to a segment.

use cascade_block::{BlockKey, Checksum, NamespaceId};
use cascade_memory::HostSlab;

use super::segment::Segment;
use crate::alignment::write_buffers;
use crate::format::{
    ENTRIES_PER_FRAME, EntryKind, PAGE_BYTES, RecordEntry, SegmentFrame, pages_of,
};
use crate::io::{Buffer, PageBuffer};
use crate::place::Place as _;
use crate::{Address, BlockFacts};

/// Maximum bytes of the first write of a call, and of each other write.
pub(super) const FIRST_WRITE_BYTES_MAX: u64 = 1 << 20;
pub(super) const WRITE_BYTES_MAX: u64 = 4 << 20;
/// Maximum buffers of one write. The kernel accepts 1,024 per call.
const WRITE_BUFFERS_MAX: usize = 1000;

/// The bytes of a block to write.
#[derive(Debug)]
pub(super) enum PendingPayload {
    Slab(HostSlab),
    /// Padded to whole pages.
    Pages(PageBuffer),
}

/// An entry to write.
#[derive(Debug)]
pub(super) struct PendingEntry {
    pub(super) kind: EntryKind,
    pub(super) meta: BlockFacts,
    /// The block that an alias or tombstone refers to. The address of a block is assigned when it
    /// is placed.
    pub(super) target: Address,
    /// Checksum of the payload. That of a slab is computed just before it is placed.
    pub(super) checksum: Checksum,
    /// Its old sequence number if it is rewritten; otherwise the next one is assigned.
    pub(super) sequence: Option<u64>,
    pub(super) payload: Option<PendingPayload>,
}

/// The frames of one write to a segment.
#[derive(Debug, Default)]
pub(super) struct WriteRun {
    pub(super) frames: Vec<SegmentFrame>,
    pub(super) buffers: Vec<Buffer>,
    pub(super) pages: u32,
    pub(super) entries: usize,
}

impl WriteRun {
    /// Whether the next entry needs a frame of its own.
    pub(super) fn needs_frame(&self) -> bool {
        self.frames.last().is_none_or(|frame| frame.entries.len() == ENTRIES_PER_FRAME)
    }

    /// Whether this many more pages exceed the limits of one write.
    pub(super) fn is_full(&self, pages: u32, bytes_max: u64) -> bool {
        // An entry adds at most three buffers: the page of a new frame, the aligned part of a slab,
        // and the copied rest.
        u64::from(self.pages + pages) * PAGE_BYTES as u64 > bytes_max
            || self.buffers.len() + 3 > WRITE_BUFFERS_MAX
    }

    /// Places an entry after the others.
    pub(super) fn add(
        &mut self,
        segment: &Segment,
        start: u32,
        pending: PendingEntry,
        next_sequence: &mut u64,
    ) {
        if self.needs_frame() {
            self.frames.push(SegmentFrame {
                segment_id: segment.id,
                page: start + self.pages,
                page_count: 1,
                entries: Vec::with_capacity(1),
            });
            // Encoded in `finish`, when all entries of the frame are known.
            self.buffers.push(Buffer::Pages(PageBuffer::zeroed(PAGE_BYTES)));
            self.pages += 1;
        }
        let sequence = pending.sequence.unwrap_or_else(|| {
            *next_sequence += 1;
            *next_sequence - 1
        });
        let address = match pending.kind {
            EntryKind::Block => Address::in_segment(segment.number, start + self.pages),
            EntryKind::Alias | EntryKind::Tombstone => pending.target,
        };
        let pages = payload_pages(&pending);
        let frame = self.frames.last_mut().expect("a frame was made above");
        frame.page_count += pages;
        frame.entries.push(RecordEntry {
            kind: pending.kind,
            meta: pending.meta,
            address,
            payload_checksum: pending.checksum,
            sequence,
        });
        self.pages += pages;
        self.entries += 1;
        match pending.payload {
            None => {}
            Some(PendingPayload::Pages(pages)) => self.buffers.push(Buffer::Pages(pages)),
            Some(PendingPayload::Slab(slab)) => self.buffers.extend(write_buffers(slab)),
        }
    }

    /// Encodes the header pages, after all frames are complete.
    pub(super) fn finish(&mut self) {
        let mut frames = self.frames.iter();
        let mut next = frames.next();
        let mut page = next.map_or(0, |frame| frame.page);
        for buffer in &mut self.buffers {
            let pages = pages_of(buffer.bytes().len() as u64);
            // A copied payload is a `Pages` buffer too. Only the position identifies the page of a
            // frame.
            if let (Some(frame), Buffer::Pages(header)) = (next, buffer)
                && frame.page == page
            {
                frame.encode(header.bytes_mut());
                next = frames.next();
            }
            page += pages;
        }
        debug_assert!(next.is_none(), "every frame has its header page");
    }
}

/// The entry for the removal of a key.
pub(super) fn tombstone(key: &BlockKey, target: Address) -> PendingEntry {
    // A tombstone is about a key at an address. All other fields are without meaning.
    let meta = BlockFacts {
        key: *key,
        digest: None,
        parent: None,
        namespace: NamespaceId::default(),
        bytes: 0,
        is_prefix: false,
        written_unix_ms: 0,
        expires_unix_ms: None,
    };
    let kind = EntryKind::Tombstone;
    PendingEntry { kind, meta, target, checksum: 0, sequence: None, payload: None }
}

/// Pages of an entry's payload in its segment.
pub(super) fn payload_pages(pending: &PendingEntry) -> u32 {
    match pending.kind {
        EntryKind::Block => pages_of(u64::from(pending.meta.bytes)),
        EntryKind::Alias | EntryKind::Tombstone => 0,
    }
}
