//! The bytes of segments, block files and checkpoints: pure functions, no I/O.
//!
//! `docs/segment-format.md` draws what is built here. Everything is little endian. A page of
//! 4 KiB is the unit of everything: headers fill one, payloads start on one.

mod checkpoint;
mod entry;
mod fields;
mod footer;
mod frame;
mod header;

use thiserror::Error;

pub use checkpoint::{Checkpoint, CheckpointHead, CoveredSegment};
pub use entry::{ENTRY_BYTES, EntryKind, RecordEntry};
pub use fields::page_checksum;
pub use footer::{SegmentTrailer, decode_entries, encode_entries, encode_footer, footer_bytes};
pub use frame::{ENTRIES_PER_FRAME, SegmentFrame};
pub use header::{SegmentHeader, WriterName};

/// The unit of the format: alignment of records and of `O_DIRECT` transfers.
pub const PAGE_BYTES: usize = 4096;

/// The version that this code writes; the only one that it reads.
pub const FORMAT_VERSION: u16 = 1;

/// Sixteen random bytes that name one segment or one store.
pub type RandomId = [u8; 16];

/// Why bytes are not what they should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FormatError {
    /// Nothing was ever written here, or something else was.
    #[error("no magic number")]
    NoMagic,
    /// Written by another version.
    #[error("format version {found}, this program knows {FORMAT_VERSION}")]
    Version {
        /// The version that the bytes name.
        found: u16,
    },
    /// The bytes do not match their checksum.
    #[error("checksum mismatch")]
    Checksum,
    /// The checksum is right but the content contradicts itself or its place.
    #[error("{0}")]
    Invalid(&'static str),
    /// Fewer bytes than the structure needs.
    #[error("truncated")]
    Truncated,
}

/// Bytes rounded up to whole pages.
pub const fn page_aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(PAGE_BYTES as u64)
}

/// Pages that bytes fill.
///
/// # Panics
/// From 16 TiB on; segments are smaller.
pub fn pages_of(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(PAGE_BYTES as u64)).expect("segments are below 16 TiB")
}
