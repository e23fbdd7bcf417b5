//! The kernel's description of a piece of memory.

/// The kernel's `struct iovec`.
#[repr(C)]
pub(super) struct IoVec {
    pub(super) base: *mut u8,
    pub(super) bytes: usize,
}

impl IoVec {
    pub(super) fn to_read(piece: &mut [u8]) -> Self {
        Self { base: piece.as_mut_ptr(), bytes: piece.len() }
    }

    pub(super) fn to_write(piece: &[u8]) -> Self {
        Self { base: piece.as_ptr().cast_mut(), bytes: piece.len() }
    }
}
