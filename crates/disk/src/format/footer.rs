//! The footer of a sealed segment: all its entries, then a trailer page with their position.

use cascade_block::{Checksum, checksum};

use super::fields::{begin_page, finish_page, open_page};
use super::{ENTRY_BYTES, FormatError, PAGE_BYTES, RandomId, RecordEntry, page_aligned, pages_of};

const MAGIC: [u8; 8] = *b"CSCFOOTR";

/// The trailer: the last page of a sealed segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentTrailer {
    /// The segment ID.
    pub segment_id: RandomId,
    /// The segment number.
    pub number: u32,
    /// The page at which the entries start and the frames end.
    pub entries_page: u32,
    /// The number of entries.
    pub entry_count: u32,
    /// CRC-32C of the entries' bytes.
    pub entries_checksum: Checksum,
}

/// Size of a footer with this number of entries, including the trailer.
pub fn footer_bytes(entry_count: usize) -> u64 {
    page_aligned(entry_count as u64 * ENTRY_BYTES as u64) + PAGE_BYTES as u64
}

/// Builds a footer: the encoded entries, padding, trailer.
///
/// # Panics
/// If there are more entries than a segment can hold.
pub fn encode_footer(
    encoded_entries: &[u8],
    segment_id: RandomId,
    number: u32,
    entries_page: u32,
) -> Vec<u8> {
    let count = encoded_entries.len() / ENTRY_BYTES;
    let length = usize::try_from(footer_bytes(count)).expect("a footer fits in memory");
    let mut bytes = vec![0; length];
    bytes[..encoded_entries.len()].copy_from_slice(encoded_entries);
    let trailer = SegmentTrailer {
        segment_id,
        number,
        entries_page,
        entry_count: u32::try_from(count).expect("a segment holds fewer blocks than pages"),
        entries_checksum: checksum(encoded_entries),
    };
    trailer.encode(&mut bytes[length - PAGE_BYTES..]);
    bytes
}

impl SegmentTrailer {
    fn encode(&self, page: &mut [u8]) {
        let mut writer = begin_page(&mut page[..PAGE_BYTES], MAGIC);
        writer
            .bytes(&self.segment_id)
            .u32(self.number)
            .u32(self.entries_page)
            .u32(self.entry_count)
            .u32(self.entries_checksum);
        finish_page(page);
    }

    /// Decodes the last page of a file of `file_bytes`.
    pub fn decode(page: &[u8], file_bytes: u64) -> Result<Self, FormatError> {
        let mut reader = open_page(page, MAGIC)?;
        let trailer = Self {
            segment_id: reader.array(),
            number: reader.u32(),
            entries_page: reader.u32(),
            entry_count: reader.u32(),
            entries_checksum: reader.u32(),
        };
        let end = u64::from(trailer.entries_page) * PAGE_BYTES as u64
            + footer_bytes(trailer.entry_count as usize);
        // Page 0 is the header, so no frame ends before page 1.
        if end != file_bytes || trailer.entries_page < pages_of(1) {
            return Err(FormatError::Invalid("a trailer that does not fit its file"));
        }
        Ok(trailer)
    }
}

/// Encodes entries without gaps.
pub fn encode_entries(entries: &[RecordEntry]) -> Vec<u8> {
    let mut encoded = vec![0; entries.len() * ENTRY_BYTES];
    for (slot, entry) in encoded.chunks_mut(ENTRY_BYTES).zip(entries) {
        entry.encode(slot);
    }
    encoded
}

/// Decodes entries without gaps after checking their checksum.
pub fn decode_entries(bytes: &[u8], sum: Checksum) -> Result<Vec<RecordEntry>, FormatError> {
    if checksum(bytes) != sum {
        return Err(FormatError::Checksum);
    }
    bytes.chunks(ENTRY_BYTES).map(RecordEntry::decode).collect()
}
