//! The header page of a segment: its identity and its writer.

use std::fmt;

use super::fields::{begin_page, finish_page, open_page};
use super::{FormatError, PAGE_BYTES, RandomId};

const MAGIC: [u8; 8] = *b"CSCSEGMT";
const NAME_BYTES: usize = 32;

/// The name of one of the writers of a directory: 1 to 32 of `a-z`, `0-9`, `_`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WriterName(String);

impl WriterName {
    /// Returns the name, or `None` if it is invalid.
    pub fn new(name: &str) -> Option<Self> {
        let allowed = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_');
        let fits = (1..=NAME_BYTES).contains(&name.len()) && name.bytes().all(allowed);
        fits.then(|| Self(name.to_owned()))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for WriterName {
    fn default() -> Self {
        Self("w0".to_owned())
    }
}

impl fmt::Debug for WriterName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WriterName({})", self.0)
    }
}

impl fmt::Display for WriterName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The header page of a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentHeader {
    /// The segment ID, unique for this file. Every frame repeats it.
    pub segment_id: RandomId,
    /// The ID of the store that wrote it.
    pub store_id: RandomId,
    /// The segment number: the order of the writer's segments.
    pub number: u32,
    /// The writer.
    pub writer: WriterName,
    /// The maximum size of the file.
    pub capacity_bytes: u64,
    /// When it was created, in milliseconds since 1970 UTC.
    pub created_unix_ms: u64,
}

impl SegmentHeader {
    /// Encodes the header into the first 4 KiB of `page`.
    pub fn encode(&self, page: &mut [u8]) {
        let mut name = [0; NAME_BYTES];
        name[..self.writer.0.len()].copy_from_slice(self.writer.0.as_bytes());
        let mut writer = begin_page(&mut page[..PAGE_BYTES], MAGIC);
        writer
            .bytes(&self.segment_id)
            .bytes(&self.store_id)
            .u64(self.capacity_bytes)
            .u64(self.created_unix_ms)
            .u32(self.number)
            .bytes(&name);
        finish_page(page);
    }

    /// Decodes a header page.
    pub fn decode(page: &[u8]) -> Result<Self, FormatError> {
        let mut reader = open_page(page, MAGIC)?;
        let segment_id = reader.array();
        let store_id = reader.array();
        let capacity_bytes = reader.u64();
        let created_unix_ms = reader.u64();
        let number = reader.u32();
        let name: [u8; NAME_BYTES] = reader.array();
        let length = name.iter().position(|&byte| byte == 0).unwrap_or(NAME_BYTES);
        let writer = std::str::from_utf8(&name[..length])
            .ok()
            .and_then(WriterName::new)
            .ok_or(FormatError::Invalid("an invalid writer name"))?;
        // With this number an address could be `u64::MAX`, which is never used.
        if number == u32::MAX {
            return Err(FormatError::Invalid("a reserved segment number"));
        }
        Ok(Self { segment_id, store_id, number, writer, capacity_bytes, created_unix_ms })
    }
}
