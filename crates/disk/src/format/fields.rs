//! Encodes and decodes fields at fixed positions, and checksummed pages.

use cascade_block::{Checksum, checksum};

use super::{FORMAT_VERSION, FormatError, PAGE_BYTES};

/// Position of a page's checksum over all its other bytes.
const CHECKSUM_AT: usize = PAGE_BYTES - 4;

/// Position of a page's format version, in every version.
const VERSION_AT: usize = 8;

/// Writes fields in order. The caller sized the target.
pub(super) struct FieldWriter<'a> {
    target: &'a mut [u8],
    at: usize,
}

impl<'a> FieldWriter<'a> {
    pub(super) fn new(target: &'a mut [u8]) -> Self {
        Self { target, at: 0 }
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.target[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
        self
    }

    pub(super) fn u8(&mut self, value: u8) -> &mut Self {
        self.bytes(&[value])
    }

    pub(super) fn u16(&mut self, value: u16) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(super) fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(super) fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }
}

/// Reads fields in order. The caller checked the length.
pub(super) struct FieldReader<'a> {
    source: &'a [u8],
}

impl<'a> FieldReader<'a> {
    pub(super) fn new(source: &'a [u8]) -> Self {
        Self { source }
    }

    pub(super) fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (head, rest) = self.source.split_at(count);
        self.source = rest;
        head
    }

    pub(super) fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(N));
        array
    }

    pub(super) fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    pub(super) fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    pub(super) fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    pub(super) fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }
}

/// Starts a page with magic number, version and six reserved bytes. Fields follow at byte 16.
pub(super) fn begin_page(page: &mut [u8], magic: [u8; 8]) -> FieldWriter<'_> {
    page.fill(0);
    let mut writer = FieldWriter::new(page);
    writer.bytes(&magic).u16(FORMAT_VERSION).bytes(&[0; 6]);
    writer
}

/// Computes the checksum for the last four bytes of a page: CRC-32C of all bytes before.
///
/// # Panics
/// If there are fewer bytes than a page.
pub fn page_checksum(page: &[u8]) -> Checksum {
    checksum(&page[..CHECKSUM_AT])
}

/// Writes the checksum into the last four bytes of a page.
pub(super) fn finish_page(page: &mut [u8]) {
    let sum = page_checksum(page);
    page[CHECKSUM_AT..PAGE_BYTES].copy_from_slice(&sum.to_le_bytes());
}

/// Checks magic number, version and checksum of a page. Returns a reader for its fields from byte
/// 16 on.
pub(super) fn open_page(page: &[u8], magic: [u8; 8]) -> Result<FieldReader<'_>, FormatError> {
    let page = page.get(..PAGE_BYTES).ok_or(FormatError::Truncated)?;
    if page[..8] != magic {
        return Err(FormatError::NoMagic);
    }
    let mut reader = FieldReader::new(&page[VERSION_AT..]);
    let found = reader.u16();
    let stored = FieldReader::new(&page[CHECKSUM_AT..]).u32();
    if found != FORMAT_VERSION {
        return Err(other_version_error(page, found, stored));
    }
    if page_checksum(page) != stored {
        return Err(FormatError::Checksum);
    }
    reader.bytes(6);
    Ok(reader)
}

/// Distinguishes a page of another version from a damaged one: pages of all versions end with the
/// same checksum.
fn other_version_error(page: &[u8], found: u16, stored: u32) -> FormatError {
    if page_checksum(page) == stored {
        FormatError::Version { found }
    } else {
        FormatError::Checksum
    }
}
