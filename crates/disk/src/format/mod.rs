//! The encoding of segments and checkpoints: pure functions, no I/O.
//!
//! `docs/segment-format.md` specifies it. All integers are little endian. The unit is a page of 4
//! KiB: a header fills one page, and a payload starts on a page boundary.

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

/// The unit of the format: the alignment of records and of `O_DIRECT` transfers.
pub const PAGE_BYTES: usize = 4096;

/// The format version that this code writes and the only one that it reads.
pub const FORMAT_VERSION: u16 = 1;

/// Sixteen random bytes that identify one segment or one store.
pub type RandomId = [u8; 16];

/// Why bytes cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The magic number is missing: nothing was written here, or something else.
    #[error("no magic number")]
    NoMagic,
    /// The format version is another one.
    #[error("format version {found}, this program reads {FORMAT_VERSION}")]
    Version {
        /// The version in the bytes.
        found: u16,
    },
    /// The bytes do not match their checksum.
    #[error("checksum mismatch")]
    Checksum,
    /// The checksum matches, but the content contradicts itself or its location.
    #[error("{0}")]
    Invalid(&'static str),
    /// Fewer bytes than the structure needs.
    #[error("truncated")]
    Truncated,
}

/// Rounds bytes up to whole pages.
pub const fn page_aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(PAGE_BYTES as u64)
}

/// The number of pages that `bytes` occupy.
///
/// # Panics
/// From 16 TiB on; segments are smaller.
pub fn pages_of(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(PAGE_BYTES as u64)).expect("segments are below 16 TiB")
}
