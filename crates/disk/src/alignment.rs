//! Which bytes of a slab are transferred directly and which through an aligned copy.
//!
//! Direct I/O transfers whole pages from and to page boundaries. The whole pages of a slab that
//! starts on a page boundary are transferred directly. The rest, and all of an unaligned slab, is
//! copied.

use cascade_memory::{HostSlab, HostSlabMut};

use crate::format::PAGE_BYTES;
use crate::io::{Buffer, PageBuffer, Transfer};

/// Number of leading bytes of a block that can be transferred directly.
fn direct_bytes(block: &[u8]) -> usize {
    let is_aligned = block.as_ptr().addr().is_multiple_of(PAGE_BYTES);
    if is_aligned { block.len() / PAGE_BYTES * PAGE_BYTES } else { 0 }
}

/// The buffers to write a block from, padded with zeroes to whole pages.
pub(crate) fn write_buffers(slab: HostSlab) -> Vec<Buffer> {
    let direct = direct_bytes(&slab);
    let rest = (direct < slab.len()).then(|| PageBuffer::copied(&slab[direct..]));
    let aligned = (direct > 0).then(|| Buffer::Sealed(slab, 0..direct));
    aligned.into_iter().chain(rest.map(Buffer::Pages)).collect()
}

/// The buffers to read a block of exactly the slab's length into, padded to whole pages.
pub(crate) fn read_buffers(slab: HostSlabMut) -> Vec<Buffer> {
    let (direct, length) = (direct_bytes(&slab), slab.len());
    // Also with an empty range: the transfer owns the slab until it ends.
    let mut buffers = vec![Buffer::Open(slab, 0..direct)];
    if direct < length {
        buffers.push(Buffer::Pages(PageBuffer::zeroed(length - direct)));
    }
    buffers
}

/// The slab of a completed read, with the copied part filled in.
pub(crate) fn slab_from_read(transfer: Transfer, payload_bytes: usize) -> HostSlabMut {
    let mut slab = None;
    let mut rest = None;
    for buffer in transfer.buffers {
        match buffer {
            Buffer::Open(open, range) => slab = Some((open, range.end)),
            Buffer::Pages(pages) => rest = Some(pages),
            Buffer::Sealed(..) => {}
        }
    }
    let (mut slab, direct) = slab.expect("`read_buffers` made the transfer with an open slab");
    if let Some(rest) = rest {
        slab[direct..payload_bytes].copy_from_slice(&rest.bytes()[..payload_bytes - direct]);
    }
    slab
}
