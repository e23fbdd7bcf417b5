//! Decodes a segment from its footer, or frame by frame.
//!
//! Nothing here trusts a byte before it was checked; a fuzz target feeds it arbitrary bytes.

use std::cell::RefCell;
use std::io;
use std::path::Path;

use cascade_block::checksum;

use crate::format::{
    CoveredSegment, ENTRY_BYTES, EntryKind, FormatError, PAGE_BYTES, RandomId, RecordEntry,
    SegmentFrame, SegmentHeader, SegmentTrailer, decode_entries, page_aligned, pages_of,
};
use crate::io::{FileHandle, FileOperations, PageBuffer};
use crate::place::Place as _;

/// The bytes of a segment.
pub trait SegmentSource {
    /// The number of bytes.
    fn length(&self) -> io::Result<u64>;

    /// Reads from a page boundary up to the end of the buffer or of the bytes. Returns the number
    /// of bytes read.
    fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize>;

    /// The first page at or after `offset` that may contain anything but zeroes.
    fn next_data(&self, offset: u64) -> io::Result<Option<u64>>;
}

/// Options for reading a segment.
#[derive(Debug, Clone, Copy)]
pub struct ScanOptions<'a> {
    /// The segment number in the file's name.
    pub number: u32,
    /// The part of the segment that a checkpoint covers. A footer that is covered completely is not
    /// read, and covered payloads are not verified because they were synced.
    pub covered: Option<&'a CoveredSegment>,
    /// Whether payloads of scanned frames are verified, so that torn ones are omitted.
    pub verify_scanned: bool,
}

/// The decoded content of a segment.
#[derive(Debug, Clone, Default)]
pub struct SegmentContent {
    /// Its header, if it is intact.
    pub header: Option<SegmentHeader>,
    /// Its trailer, if the segment is sealed and the footer is intact.
    pub trailer: Option<SegmentTrailer>,
    /// Its entries in the order of writing. Empty if a checkpoint covers the whole footer.
    pub entries: Vec<RecordEntry>,
    /// The page after its last frame.
    pub end_page: u32,
    /// The segment ID from its first frame, if neither header nor trailer gives one.
    pub first_frame_id: Option<RandomId>,
    /// Length of the file.
    pub file_bytes: u64,
    /// Blocks whose payload is incomplete.
    pub torn_records: u64,
    /// Headers, frames and footers that are damaged.
    pub damaged_structures: u64,
    /// Pages that the device could not read.
    pub unreadable_pages: u64,
    /// Whether the segment was scanned frame by frame.
    pub was_scanned: bool,
}

impl SegmentContent {
    /// The segment ID, if any structure contains it.
    pub fn segment_id(&self) -> Option<RandomId> {
        let of_header = self.header.as_ref().map(|header| header.segment_id);
        of_header.or(self.trailer.map(|trailer| trailer.segment_id)).or(self.first_frame_id)
    }

    /// Reads a part of the segment. An unreadable sector counts as damage of that part, not as an
    /// error.
    fn read(
        &mut self,
        source: &dyn SegmentSource,
        offset: u64,
        buffer: &mut [u8],
    ) -> io::Result<usize> {
        match source.read(offset, buffer) {
            Err(error) if error.kind() != io::ErrorKind::TimedOut => {
                self.unreadable_pages += 1;
                Ok(0)
            }
            read => read,
        }
    }
}

/// Why a segment cannot be read.
#[derive(Debug)]
pub enum ScanError {
    /// Reading the bytes failed.
    Io(io::Error),
    /// It has another format version.
    Version(u16),
}

impl From<io::Error> for ScanError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Decodes a segment. Damage is counted and is not an error.
pub fn read_segment(
    source: &dyn SegmentSource,
    options: ScanOptions<'_>,
) -> Result<SegmentContent, ScanError> {
    let mut content = SegmentContent { end_page: 1, ..SegmentContent::default() };
    content.file_bytes = source.length()?;
    let mut page = PageBuffer::zeroed(PAGE_BYTES);
    let read = content.read(source, 0, page.bytes_mut())?;
    match SegmentHeader::decode(&page.bytes()[..read]) {
        // A header with another number is that of another file.
        Ok(header) if header.number == options.number => content.header = Some(header),
        Err(FormatError::Version { found }) => return Err(ScanError::Version(found)),
        Ok(_) | Err(_) => content.damaged_structures += 1,
    }
    if let Some(trailer) = read_trailer(source, &mut content, options.number)? {
        // The segment got no frame after the checkpoint, so the checkpoint has all its live
        // entries.
        let is_covered = options.covered.is_some_and(|covered| {
            covered.segment_id == trailer.segment_id && covered.covered_page == trailer.entries_page
        });
        content.end_page = trailer.entries_page;
        let entries = if is_covered {
            Some(Vec::new())
        } else {
            read_footer(source, &trailer, &mut content)?
        };
        if let Some(entries) = entries {
            content.entries = entries;
            content.trailer = Some(trailer);
            return Ok(content);
        }
        content.damaged_structures += 1;
        scan(source, options, trailer.segment_id, trailer.entries_page, &mut content)?;
        // The trailer is intact, so it determines where the frames end even if some are damaged.
        content.end_page = trailer.entries_page;
        content.first_frame_id = Some(trailer.segment_id);
        return Ok(content);
    }
    if content.header.is_none() {
        content.first_frame_id = first_frame_id(source, &mut content, options)?;
    }
    if let Some(id) = content.segment_id() {
        let pages = u32::try_from(content.file_bytes.div_ceil(PAGE_BYTES as u64));
        scan(source, options, id, pages.unwrap_or(u32::MAX), &mut content)?;
    }
    Ok(content)
}

/// Scans the frames of a segment with a damaged footer, up to the page where they end.
pub(crate) fn read_frames(
    source: &dyn SegmentSource,
    number: u32,
    id: RandomId,
    end_page: u32,
) -> io::Result<SegmentContent> {
    let mut content = SegmentContent { file_bytes: source.length()?, ..SegmentContent::default() };
    let options = ScanOptions { number, covered: None, verify_scanned: false };
    scan(source, options, id, end_page, &mut content)?;
    Ok(content)
}

/// The segment ID if both header and trailer are missing: from the first frame, which always
/// follows the header, otherwise from the checkpoint.
fn first_frame_id(
    source: &dyn SegmentSource,
    content: &mut SegmentContent,
    options: ScanOptions<'_>,
) -> Result<Option<RandomId>, ScanError> {
    let mut page = PageBuffer::zeroed(PAGE_BYTES);
    let read = content.read(source, PAGE_BYTES as u64, page.bytes_mut())?;
    let bytes = &page.bytes()[..read];
    match SegmentFrame::decode_first(bytes, options.number) {
        Ok(frame) => return Ok(Some(frame.segment_id)),
        // The page is never payload, so this is a segment of that version and not damage.
        Err(FormatError::Version { found }) => return Err(ScanError::Version(found)),
        Err(_) if bytes.iter().all(|byte| *byte == 0) => {}
        // With the ID of the checkpoint, `scan` reads the frame again and counts its damage.
        Err(_) if options.covered.is_some() => {}
        Err(_) => content.damaged_structures += 1,
    }
    Ok(options.covered.map(|covered| covered.segment_id))
}

fn read_trailer(
    source: &dyn SegmentSource,
    content: &mut SegmentContent,
    number: u32,
) -> io::Result<Option<SegmentTrailer>> {
    let length = content.file_bytes;
    // A sealed file has at least a header and a trailer, and consists of whole pages.
    if length < 2 * PAGE_BYTES as u64 || !length.is_multiple_of(PAGE_BYTES as u64) {
        return Ok(None);
    }
    let mut page = PageBuffer::zeroed(PAGE_BYTES);
    let read = content.read(source, length - PAGE_BYTES as u64, page.bytes_mut())?;
    let bytes = &page.bytes()[..read];
    let decoded = SegmentTrailer::decode(bytes, length);
    let header_id = content.header.as_ref().map(|header| header.segment_id);
    let is_ours = |trailer: &SegmentTrailer| {
        trailer.number == number && header_id.is_none_or(|id| id == trailer.segment_id)
    };
    match decoded {
        Ok(trailer) if is_ours(&trailer) => Ok(Some(trailer)),
        // An open segment ends with pages that have not been written yet.
        Err(_) if bytes.iter().all(|byte| *byte == 0) => Ok(None),
        Ok(_) | Err(_) => {
            content.damaged_structures += 1;
            Ok(None)
        }
    }
}

/// The entries of a footer, or `None` if they are damaged.
fn read_footer(
    source: &dyn SegmentSource,
    trailer: &SegmentTrailer,
    content: &mut SegmentContent,
) -> io::Result<Option<Vec<RecordEntry>>> {
    let bytes = trailer.entry_count as usize * ENTRY_BYTES;
    let mut pages = PageBuffer::zeroed(bytes);
    let offset = u64::from(trailer.entries_page) * PAGE_BYTES as u64;
    let read = content.read(source, offset, pages.bytes_mut())?;
    if read < bytes {
        return Ok(None);
    }
    let entries = decode_entries(&pages.bytes()[..bytes], trailer.entries_checksum).ok();
    Ok(entries.filter(|entries| {
        // The checksum alone is not trusted: no address may lead outside the frames.
        let is_inside = |entry: &RecordEntry| {
            entry.kind != EntryKind::Block
                || (entry.address.segment() == trailer.number
                    && entry.address.page() < trailer.entries_page)
        };
        entries.iter().all(is_inside)
    }))
}

/// Scans for frames and skips pages that are not a frame.
fn scan(
    source: &dyn SegmentSource,
    options: ScanOptions<'_>,
    id: RandomId,
    end_page: u32,
    content: &mut SegmentContent,
) -> io::Result<()> {
    content.was_scanned = true;
    let source = &ReadAhead::new(source);
    // A checkpoint covers only the file with the same ID.
    let covered = options.covered.filter(|covered| covered.segment_id == id);
    let covered_page = covered.map_or(0, |covered| covered.covered_page);
    let (mut page, mut frame_end) = (1, 1);
    let mut buffer = PageBuffer::zeroed(PAGE_BYTES);
    while page < end_page {
        let offset = u64::from(page) * PAGE_BYTES as u64;
        let read = content.read(source, offset, buffer.bytes_mut())?;
        match SegmentFrame::decode(&buffer.bytes()[..read], &id, options.number, page) {
            Ok(frame) => {
                let verify = options.verify_scanned && page >= covered_page;
                // Always forward, whatever the frame contains.
                page = page.saturating_add(frame.page_count.max(1));
                let kept = complete_entries(source, frame, verify, content)?;
                content.entries.extend(kept);
                content.end_page = page.min(end_page);
                frame_end = page;
            }
            Err(error) => {
                // A frame is followed by the next one or by unwritten pages: anything else there is
                // damage. Elsewhere the scan may be inside a payload, and any page without a magic
                // number is skipped.
                let is_blank = buffer.bytes()[..read].iter().all(|byte| *byte == 0);
                if error != FormatError::NoMagic || (page == frame_end && !is_blank) {
                    content.damaged_structures += 1;
                }
                // Skips holes: an open segment is preallocated, and its end may never have been
                // written.
                let Some(next) = source.next_data(offset + PAGE_BYTES as u64)? else { break };
                let next = u32::try_from(next / PAGE_BYTES as u64).unwrap_or(u32::MAX);
                page = next.max(page + 1);
            }
        }
    }
    Ok(())
}

/// The entries of a frame, without those whose payload is incomplete or damaged.
fn complete_entries(
    source: &dyn SegmentSource,
    frame: SegmentFrame,
    verify: bool,
    content: &mut SegmentContent,
) -> io::Result<Vec<RecordEntry>> {
    let mut kept = Vec::with_capacity(frame.entries.len());
    for entry in frame.entries {
        let is_complete = entry.kind != EntryKind::Block
            || match payload_is_intact(source, &entry, content.file_bytes, verify) {
                Err(error) if error.kind() != io::ErrorKind::TimedOut => {
                    content.unreadable_pages += 1;
                    false
                }
                is_right => is_right?,
            };
        if is_complete {
            kept.push(entry);
        } else {
            content.torn_records += 1;
        }
    }
    Ok(kept)
}

/// Whether a block's payload is inside the file and, with `verify`, matches its checksum.
pub(crate) fn payload_is_intact(
    source: &dyn SegmentSource,
    entry: &RecordEntry,
    file_bytes: u64,
    verify: bool,
) -> io::Result<bool> {
    let bytes = u64::from(entry.meta.bytes);
    let offset = entry.address.byte_offset();
    // The entry is not trusted, so the sum may overflow.
    if offset.checked_add(page_aligned(bytes)).is_none_or(|end| end > file_bytes) {
        return Ok(false);
    }
    if !verify {
        return Ok(true);
    }
    debug_assert!(pages_of(bytes) > 0);
    let bytes = entry.meta.bytes as usize;
    let mut payload = PageBuffer::zeroed(bytes);
    let read = source.read(offset, payload.bytes_mut())?;
    Ok(read >= bytes && checksum(&payload.bytes()[..bytes]) == entry.payload_checksum)
}

/// A segment in memory.
impl SegmentSource for &[u8] {
    fn length(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(self.len());
        let count = buffer.len().min(self.len() - start);
        buffer[..count].copy_from_slice(&self[start..start + count]);
        Ok(count)
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<u64>> {
        Ok((offset < self.len() as u64).then_some(offset))
    }
}

/// A segment in a file, read through [`FileOperations`].
pub(crate) struct FileSource<'a> {
    pub(crate) files: &'a dyn FileOperations,
    pub(crate) file: &'a FileHandle,
}

impl SegmentSource for FileSource<'_> {
    fn length(&self) -> io::Result<u64> {
        self.files.length(self.file)
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        self.files.read(self.file, offset, buffer)
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<u64>> {
        self.files.next_data(self.file, offset)
    }
}

/// Serves many small sequential reads from few large ones.
struct ReadAhead<'a> {
    inner: &'a dyn SegmentSource,
    window: RefCell<ReadAheadWindow>,
}

struct ReadAheadWindow {
    offset: u64,
    filled: usize,
    pages: PageBuffer,
}

const WINDOW_BYTES: usize = 1 << 20;

impl<'a> ReadAhead<'a> {
    fn new(inner: &'a dyn SegmentSource) -> Self {
        let pages = PageBuffer::zeroed(WINDOW_BYTES);
        Self { inner, window: RefCell::new(ReadAheadWindow { offset: 0, filled: 0, pages }) }
    }
}

impl SegmentSource for ReadAhead<'_> {
    fn length(&self) -> io::Result<u64> {
        self.inner.length()
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        // A large payload would use the window only once.
        if buffer.len() > WINDOW_BYTES / 2 {
            return self.inner.read(offset, buffer);
        }
        let mut window = self.window.borrow_mut();
        let end = offset.saturating_add(buffer.len() as u64);
        if offset < window.offset || end > window.offset + window.filled as u64 {
            window.offset = offset;
            // If the read below fails, the window holds nothing.
            window.filled = 0;
            match self.inner.read(offset, window.pages.bytes_mut()) {
                Ok(filled) => window.filled = filled,
                // A part may be readable: read only what was requested.
                Err(_) => return self.inner.read(offset, buffer),
            }
        }
        let start = usize::try_from(offset - window.offset).expect("inside the window");
        let count = buffer.len().min(window.filled.saturating_sub(start));
        buffer[..count].copy_from_slice(&window.pages.bytes()[start..start + count]);
        Ok(count)
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<u64>> {
        self.inner.next_data(offset)
    }
}

/// The writer and the segment number in the name of a segment file.
pub(crate) fn segment_name(path: &Path) -> Option<(&str, u32)> {
    let name = path.file_name()?.to_str()?;
    let (writer, digits) = name.strip_suffix(".segment")?.rsplit_once('-')?;
    let number = u32::from_str_radix(digits, 16).ok()?;
    // Other spellings of a number, such as upper case, are not written here: two files of one
    // number would be taken for one segment. `u32::MAX` is reserved.
    (format!("{number:08x}") == digits && number < u32::MAX).then_some((writer, number))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files with two spellings of a number were opened as one segment.
    #[test]
    fn a_segment_number_has_one_spelling() {
        let parsed = |name: &str| segment_name(Path::new(name)).map(|(_, number)| number);
        assert_eq!(parsed("w0-0000001a.segment"), Some(26));
        assert_eq!(parsed("w0-fffffffe.segment"), Some(u32::MAX - 1));
        for other in ["w0-0000001A", "w0-+000001a", "w0-1a", "w0-00000001a", "w0-ffffffff"] {
            assert_eq!(parsed(&format!("{other}.segment")), None, "{other}");
        }
    }
}
