//! The metadata and the address of a stored block.

use std::fmt;

use cascade_block::{BlockKey, Digest, NamespaceId};

use crate::format::PAGE_BYTES;

/// The metadata stored with a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordMeta {
    /// The block's key.
    pub key: BlockKey,
    /// The digest of its bytes, if content is hashed.
    pub digest: Option<Digest>,
    /// The key of the preceding block of its chain.
    pub parent: Option<BlockKey>,
    /// The namespace of the key.
    pub namespace: NamespaceId,
    /// Length of the block, at least 1.
    pub payload_bytes: u32,
    /// Whether it belongs to a protected prefix.
    pub is_prefix: bool,
    /// When it was stored, in milliseconds since 1970 UTC.
    pub written_unix_ms: u64,
    /// When it expires, in milliseconds since 1970 UTC.
    pub expires_unix_ms: Option<u64>,
}

impl RecordMeta {
    /// Whether the block has expired.
    pub fn has_expired(&self, now_unix_ms: u64) -> bool {
        self.expires_unix_ms.is_some_and(|expires| expires <= now_unix_ms)
    }
}

/// Where a block is stored in the file tier. Opaque to callers; `u64::MAX` is never used.
///
/// An address is valid until the block is removed or moved. Reads of an invalid address return
/// `Gone`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileAddress(u64);

/// Write numbers of block files have 63 bits.
const NONCE_MAX: u64 = u64::MAX >> 1;

impl FileAddress {
    /// The address that [`FileAddress::to_u64`] converted to `number`.
    pub const fn from_u64(number: u64) -> Self {
        Self(number)
    }

    /// The address as a number, to store in a catalog.
    pub const fn to_u64(self) -> u64 {
        self.0
    }

    /// The address of a payload that starts at a page of a segment.
    pub(crate) const fn in_segment(segment: u32, page: u32) -> Self {
        Self((segment as u64) << 32 | page as u64)
    }

    /// The segment's number.
    pub(crate) const fn segment(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The page of the segment at which the payload starts.
    pub(crate) const fn page(self) -> u32 {
        (self.0 & 0xffff_ffff) as u32
    }

    /// The byte of the segment at which the payload starts.
    pub(crate) const fn byte_offset(self) -> u64 {
        self.page() as u64 * PAGE_BYTES as u64
    }

    /// The address of a block with a file of its own: the number of its write.
    pub(crate) const fn of_write(nonce: u64) -> Self {
        Self(nonce & NONCE_MAX)
    }

    /// Whether this is a valid write number.
    pub(crate) const fn is_write(self) -> bool {
        self.0 <= NONCE_MAX
    }
}

impl fmt::Debug for FileAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FileAddress({:#018x})", self.0)
    }
}
