//! A frame: one page of entries, then the payloads of its blocks, each on its own pages.
//!
//! One write contains one or more frames. A frame's page contains the random ID of its segment and
//! its own position, so that neither a stale tail nor a payload that looks like a frame is mistaken
//! for a frame.

use super::fields::{begin_page, finish_page, open_page};
use super::{ENTRY_BYTES, EntryKind, FormatError, PAGE_BYTES, RandomId, RecordEntry, pages_of};
use crate::place::Place as _;

const MAGIC: [u8; 8] = *b"CSCFRAME";
const FIELDS_END: usize = 48;

/// Maximum number of entries in a frame.
pub const ENTRIES_PER_FRAME: usize = (PAGE_BYTES - FIELDS_END - 4) / ENTRY_BYTES;

/// A frame's header page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentFrame {
    /// The segment ID.
    pub segment_id: RandomId,
    /// The page of the segment at which the frame starts.
    pub page: u32,
    /// Its length in pages, header and payloads.
    pub page_count: u32,
    /// Its entries, in the order of the payloads.
    pub entries: Vec<RecordEntry>,
}

impl SegmentFrame {
    /// Encodes the header page into the first 4 KiB of `page`.
    ///
    /// # Panics
    /// If there are more than [`ENTRIES_PER_FRAME`] entries.
    pub fn encode(&self, page: &mut [u8]) {
        assert!(self.entries.len() <= ENTRIES_PER_FRAME, "a frame's entries fit its page");
        let count = u16::try_from(self.entries.len()).expect("a frame holds few entries");
        let mut writer = begin_page(&mut page[..PAGE_BYTES], MAGIC);
        writer.bytes(&self.segment_id).u32(self.page).u32(self.page_count).u16(count);
        for (slot, entry) in self.entries.iter().enumerate() {
            entry.encode(&mut page[FIELDS_END + slot * ENTRY_BYTES..]);
        }
        finish_page(page);
    }

    /// Decodes the header page at `at_page` of the segment with this number and ID.
    pub fn decode(
        page: &[u8],
        segment_id: &RandomId,
        number: u32,
        at_page: u32,
    ) -> Result<Self, FormatError> {
        let mut reader = open_page(page, MAGIC)?;
        let frame_segment: RandomId = reader.array();
        let (own_page, page_count, count) = (reader.u32(), reader.u32(), reader.u16());
        // Rejects old contents of reused disk blocks, copied frames, and payloads that look like a
        // frame.
        if &frame_segment != segment_id || own_page != at_page {
            return Err(FormatError::Invalid("a frame of another segment or position"));
        }
        if usize::from(count) > ENTRIES_PER_FRAME {
            return Err(FormatError::Invalid("a frame with too many entries"));
        }
        let entries = (0..usize::from(count))
            .map(|slot| RecordEntry::decode(&page[FIELDS_END + slot * ENTRY_BYTES..]))
            .collect::<Result<Vec<_>, _>>()?;
        let frame = Self { segment_id: frame_segment, page: own_page, page_count, entries };
        frame.check_payload_pages(number)?;
        Ok(frame)
    }

    /// Decodes the header page of a segment's first frame if no other structure gives the segment's
    /// ID.
    pub fn decode_first(page: &[u8], number: u32) -> Result<Self, FormatError> {
        let segment_id: RandomId = open_page(page, MAGIC)?.array();
        Self::decode(page, &segment_id, number, 1)
    }

    /// Checks that the payloads follow each other from the page after the header and fill the
    /// frame.
    fn check_payload_pages(&self, number: u32) -> Result<(), FormatError> {
        // The numbers come from the file, so the sums may overflow.
        let mut next = self.page.checked_add(1);
        for entry in self.entries.iter().filter(|entry| entry.kind == EntryKind::Block) {
            if entry.address.segment() != number || Some(entry.address.page()) != next {
                return Err(FormatError::Invalid("a payload outside its frame"));
            }
            let pages = pages_of(u64::from(entry.meta.bytes));
            next = next.and_then(|page| page.checked_add(pages));
        }
        if next != self.page.checked_add(self.page_count) {
            return Err(FormatError::Invalid("a frame with another length than its payloads"));
        }
        Ok(())
    }
}
