//! A checkpoint: the live entries at one moment, so that recovery need not read what it covers.

use cascade_block::{Checksum, checksum};

use super::fields::{FieldReader, FieldWriter, begin_page, finish_page, open_page};
use super::{ENTRY_BYTES, FormatError, PAGE_BYTES, RandomId, RecordEntry, decode_entries};

const MAGIC: [u8; 8] = *b"CSCCHKPT";
const SEGMENT_BYTES: usize = 24;

/// A segment that a checkpoint covers up to a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CoveredSegment {
    /// The segment number.
    pub number: u32,
    /// Frames that start before this page are covered.
    pub covered_page: u32,
    /// The segment ID. Another file with the same number is not covered.
    pub segment_id: RandomId,
}

/// The first page of a checkpoint: lengths and checksums of the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckpointHead {
    store_id: RandomId,
    next_sequence: u64,
    entry_count: u64,
    next_number: u32,
    segment_count: u32,
    segments_checksum: Checksum,
    entries_checksum: Checksum,
}

/// The content of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// The store that it belongs to.
    pub store_id: RandomId,
    /// The writer's next sequence number.
    pub next_sequence: u64,
    /// The writer's next segment number.
    pub next_number: u32,
    /// The segments that it covers.
    pub segments: Vec<CoveredSegment>,
    /// The live entries of these segments.
    pub entries: Vec<RecordEntry>,
}

impl CheckpointHead {
    /// Decodes the first page.
    pub fn decode(page: &[u8]) -> Result<Self, FormatError> {
        let mut reader = open_page(page, MAGIC)?;
        Ok(Self {
            store_id: reader.array(),
            next_sequence: reader.u64(),
            entry_count: reader.u64(),
            next_number: reader.u32(),
            segment_count: reader.u32(),
            segments_checksum: reader.u32(),
            entries_checksum: reader.u32(),
        })
    }

    fn encode(&self, page: &mut [u8]) {
        let mut writer = begin_page(&mut page[..PAGE_BYTES], MAGIC);
        writer
            .bytes(&self.store_id)
            .u64(self.next_sequence)
            .u64(self.entry_count)
            .u32(self.next_number)
            .u32(self.segment_count)
            .u32(self.segments_checksum)
            .u32(self.entries_checksum);
        finish_page(page);
    }
}

impl Checkpoint {
    /// Encodes the whole file: head page, segments, entries.
    ///
    /// # Panics
    /// If there are more segments than segment numbers.
    pub fn encode(&self) -> Vec<u8> {
        let segments_end = PAGE_BYTES + self.segments.len() * SEGMENT_BYTES;
        let mut bytes = vec![0; segments_end + self.entries.len() * ENTRY_BYTES];
        for (slot, segment) in
            bytes[PAGE_BYTES..segments_end].chunks_mut(SEGMENT_BYTES).zip(&self.segments)
        {
            FieldWriter::new(slot)
                .u32(segment.number)
                .u32(segment.covered_page)
                .bytes(&segment.segment_id);
        }
        for (slot, entry) in bytes[segments_end..].chunks_mut(ENTRY_BYTES).zip(&self.entries) {
            entry.encode(slot);
        }
        let head = CheckpointHead {
            store_id: self.store_id,
            next_sequence: self.next_sequence,
            entry_count: self.entries.len() as u64,
            next_number: self.next_number,
            segment_count: u32::try_from(self.segments.len())
                .expect("segment numbers have 32 bits"),
            segments_checksum: checksum(&bytes[PAGE_BYTES..segments_end]),
            entries_checksum: checksum(&bytes[segments_end..]),
        };
        head.encode(&mut bytes[..PAGE_BYTES]);
        bytes
    }

    /// Decodes a whole file. A checkpoint with any damage is not used at all.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let head = CheckpointHead::decode(bytes)?;
        let body = &bytes[PAGE_BYTES..];
        // The counts are compared with the file's length before anything is allocated for them.
        let segment_bytes = (head.segment_count as usize)
            .checked_mul(SEGMENT_BYTES)
            .filter(|&length| length <= body.len())
            .ok_or(FormatError::Truncated)?;
        let (segments, entries) = body.split_at(segment_bytes);
        if head.entry_count.checked_mul(ENTRY_BYTES as u64) != Some(entries.len() as u64) {
            return Err(FormatError::Truncated);
        }
        if checksum(segments) != head.segments_checksum {
            return Err(FormatError::Checksum);
        }
        let segments = segments
            .chunks(SEGMENT_BYTES)
            .map(|row| {
                let mut reader = FieldReader::new(row);
                let (number, covered_page) = (reader.u32(), reader.u32());
                CoveredSegment { number, covered_page, segment_id: reader.array() }
            })
            .collect();
        Ok(Self {
            store_id: head.store_id,
            next_sequence: head.next_sequence,
            next_number: head.next_number,
            segments,
            entries: decode_entries(entries, head.entries_checksum)?,
        })
    }
}
