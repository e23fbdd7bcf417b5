//! The pool: hands out slabs of one region and takes them back.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use thiserror::Error;

use crate::{Region, SlabMut};

/// Whether the pool asks for huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HugePages {
    /// Use them where the machine gives them.
    #[default]
    Auto,
    /// Ordinary pages.
    Never,
}

/// How to make a pool.
#[derive(Debug, Clone)]
pub struct PoolConfig {
    /// Size of the region.
    pub capacity_bytes: usize,
    /// Whether to ask for huge pages.
    pub huge_pages: HugePages,
    /// Whether to touch every page now rather than at first use.
    pub populate: bool,
}

/// What the pool holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolStats {
    /// Size of the region.
    pub capacity_bytes: usize,
    /// Bytes that slabs asked for.
    pub requested_bytes: usize,
    /// Bytes that slabs hold, rounding included.
    pub reserved_bytes: usize,
    /// Bytes backed by huge pages.
    pub huge_bytes: usize,
}

/// Why a pool could not be made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The kernel refused the mapping.
    #[error("cannot map a pool of {bytes} bytes of shared memory")]
    Map {
        /// Size that was asked for.
        bytes: usize,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

/// Hands out slabs. Clones share the same memory.
#[derive(Debug, Clone)]
pub struct Pool(Arc<PoolInner>);

#[derive(Debug)]
pub(crate) struct PoolInner {
    pub(crate) region: Region,
    free: Mutex<FreeSpace>,
}

#[derive(Debug, Default)]
struct FreeSpace {
    next: usize,
    recycled: HashMap<usize, Vec<usize>>,
    reserved: usize,
}

impl Pool {
    /// Maps a region and prepares it.
    pub fn new(config: &PoolConfig) -> Result<Self, MemoryError> {
        let bytes = config.capacity_bytes;
        let region = Region::map(bytes).map_err(|source| MemoryError::Map { bytes, source })?;
        Ok(Self(Arc::new(PoolInner { region, free: Mutex::default() })))
    }

    /// A slab of that many bytes, or nothing when no free piece is large enough.
    pub fn allocate(&self, bytes: usize) -> Option<SlabMut> {
        let reserved = bytes.max(1).next_multiple_of(4096);
        let offset = self.0.take(reserved)?;
        Some(SlabMut { pool: Arc::clone(&self.0), offset, len: bytes, reserved })
    }

    /// The region that all slabs lie in, to register it with the kernel.
    pub fn region(&self) -> &Region {
        &self.0.region
    }

    /// What the pool holds now.
    pub fn stats(&self) -> PoolStats {
        let free = self.0.free.lock().unwrap_or_else(PoisonError::into_inner);
        PoolStats {
            capacity_bytes: self.0.region.bytes(),
            requested_bytes: free.reserved,
            reserved_bytes: free.reserved,
            huge_bytes: 0,
        }
    }
}

impl PoolInner {
    fn take(&self, reserved: usize) -> Option<usize> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let recycled = free.recycled.get_mut(&reserved).and_then(Vec::pop);
        let offset = match recycled {
            Some(offset) => offset,
            None if free.next + reserved <= self.region.bytes() => {
                free.next += reserved;
                free.next - reserved
            }
            None => return None,
        };
        free.reserved += reserved;
        Some(offset)
    }

    pub(crate) fn release(&self, offset: usize, reserved: usize) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.recycled.entry(reserved).or_default().push(offset);
        free.reserved -= reserved;
    }
}
