//! Which bytes of a slab the kernel touches itself, and which go through a copy.
//!
//! Direct I/O moves whole pages from and to page boundaries. A slab on a page boundary gives its
//! whole pages to the kernel; the rest of it, or all of a slab off a page, is copied.

use cascade_memory::{Slab, SlabMut};

use crate::format::PAGE_BYTES;
use crate::io::{Buffer, PageBuffer, Transfer};

/// How many bytes of a block the kernel may move straight.
fn direct_bytes(block: &[u8]) -> usize {
    let is_aligned = block.as_ptr().addr().is_multiple_of(PAGE_BYTES);
    if is_aligned { block.len() / PAGE_BYTES * PAGE_BYTES } else { 0 }
}

/// A block's bytes, padded with zeroes to whole pages.
pub(crate) fn write_buffers(slab: Slab) -> Vec<Buffer> {
    let direct = direct_bytes(&slab);
    let rest = (direct < slab.len()).then(|| PageBuffer::copied(&slab[direct..]));
    let straight = (direct > 0).then(|| Buffer::Sealed(slab, 0..direct));
    straight.into_iter().chain(rest.map(Buffer::Pages)).collect()
}

/// Room for a block of exactly the slab's length, padded to whole pages.
pub(crate) fn read_buffers(slab: SlabMut) -> Vec<Buffer> {
    let (direct, length) = (direct_bytes(&slab), slab.len());
    let mut buffers = vec![Buffer::Open(slab, 0..direct)];
    if direct < length {
        buffers.push(Buffer::Pages(PageBuffer::zeroed(length - direct)));
    }
    buffers
}

/// The slab of a finished read, complete.
pub(crate) fn slab_from_read(transfer: Transfer, payload_bytes: usize) -> SlabMut {
    let mut slab = None;
    let mut rest = None;
    for buffer in transfer.buffers {
        match buffer {
            Buffer::Open(open, range) => slab = Some((open, range.end)),
            Buffer::Pages(pages) => rest = Some(pages),
            Buffer::Sealed(..) => {}
        }
    }
    let (mut slab, direct) = slab.expect("the transfer was made with an open slab");
    if let Some(rest) = rest {
        slab[direct..payload_bytes].copy_from_slice(&rest.bytes()[..payload_bytes - direct]);
    }
    slab
}
