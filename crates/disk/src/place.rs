//! The meaning of a tier's address in files: a page of a segment.

use cascade_tier::tier::Address;

use crate::format::PAGE_BYTES;

/// An address as a place in files. `u64::MAX` is never used.
///
/// An address is valid until the block is removed or moved. Reads of an invalid address return
/// `Gone`.
pub(crate) trait Place: Sized {
    /// The address of a payload that starts at a page of a segment.
    fn in_segment(segment: u32, page: u32) -> Self;

    /// The segment's number.
    fn segment(self) -> u32;

    /// The page of the segment at which the payload starts.
    fn page(self) -> u32;

    /// The byte of the segment at which the payload starts.
    fn byte_offset(self) -> u64;
}

impl Place for Address {
    fn in_segment(segment: u32, page: u32) -> Self {
        Address(u64::from(segment) << 32 | u64::from(page))
    }

    fn segment(self) -> u32 {
        (self.0 >> 32) as u32
    }

    fn page(self) -> u32 {
        (self.0 & 0xffff_ffff) as u32
    }

    fn byte_offset(self) -> u64 {
        u64::from(self.page()) * PAGE_BYTES as u64
    }
}
