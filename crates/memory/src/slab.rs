//! Slabs: pieces of the pool. One writer while open, any number of readers once sealed.
#![expect(unsafe_code, reason = "turns offsets of the region into slices")]

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::pool::PoolInner;

/// A piece of the pool with one owner, who may write it. Goes back to the pool when dropped.
#[derive(Debug)]
pub struct SlabMut {
    pub(crate) pool: Arc<PoolInner>,
    pub(crate) offset: usize,
    /// Bytes asked for; the visible length.
    pub(crate) len: usize,
    /// Bytes taken from the pool.
    pub(crate) reserved: usize,
}

/// A sealed piece of the pool: never changes again, shared by all who hold a clone.
#[derive(Debug, Clone)]
pub struct Slab(Arc<SlabMut>);

impl SlabMut {
    /// Ends writing: from now on the bytes do not change.
    pub fn seal(self) -> Slab {
        Slab(Arc::new(self))
    }

    /// Where the slab starts in the pool's region, in bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The first byte, for handing to the kernel; valid as long as the slab is held.
    pub fn pointer(&self) -> NonNull<u8> {
        // SAFETY: the pool hands out only offsets inside the mapping.
        unsafe { self.pool.region.base().add(self.offset) }
    }
}

impl Deref for SlabMut {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the pool gave this range to this slab alone, mapped and initialised (the kernel
        // zeroes it), until it is dropped; writers need `&mut self`.
        unsafe { std::slice::from_raw_parts(self.pointer().as_ptr(), self.len) }
    }
}

impl DerefMut for SlabMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` excludes every other slice of this slab.
        unsafe { std::slice::from_raw_parts_mut(self.pointer().as_ptr(), self.len) }
    }
}

impl Drop for SlabMut {
    fn drop(&mut self) {
        self.pool.release(self.offset, self.reserved);
    }
}

impl Slab {
    /// Where the slab starts in the pool's region, in bytes.
    pub fn offset(&self) -> usize {
        self.0.offset
    }

    /// The first byte, for handing to the kernel; valid as long as the slab is held.
    pub fn pointer(&self) -> NonNull<u8> {
        self.0.pointer()
    }

    /// How many clones of this slab are held, this one included.
    pub fn holders(&self) -> usize {
        Arc::strong_count(&self.0)
    }
}

impl Deref for Slab {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}
