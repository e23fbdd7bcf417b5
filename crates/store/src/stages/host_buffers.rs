//! Buffers in host memory for blocks in flight: records, which are a block behind its header, and
//! copies of blocks in device memory.

use std::sync::Arc;

use cascade_memory::{
    DIRECT_ALIGN, HostSlabMut, HugePages, MemoryError, Pool, PoolConfig, SlabMut,
};
use cascade_tier::StoreError;
use cascade_tier::tier::TierError;

/// A share of DRAM within these bounds; memory is committed as it is used.
const SHARE: u64 = 8;
const BYTES_MIN: usize = 8 << 20;
const BYTES_MAX: usize = 64 << 20;

/// Reusable buffers.
#[derive(Debug)]
pub(super) struct HostBuffers(Pool);

impl HostBuffers {
    pub(super) fn new(dram_bytes: u64) -> Result<Self, StoreError> {
        let bytes = usize::try_from(dram_bytes / SHARE).unwrap_or(usize::MAX);
        let pool = pool(bytes.clamp(BYTES_MIN, BYTES_MAX));
        pool.map(Self).map_err(|error| StoreError::Memory(Arc::new(error)))
    }

    /// A buffer; from a separate pool if it is too large or all buffers are in use.
    pub(super) fn take(&self, bytes: usize) -> Result<HostSlabMut, TierError> {
        let in_host_memory = |slab: SlabMut| slab.into_host().map_err(|_| TierError::NotHostMemory);
        if let Some(buffer) = self.0.allocate(bytes) {
            return in_host_memory(buffer);
        }
        let own = pool(bytes).map_err(|error| TierError::Failed(Arc::new(error)))?;
        let buffer = own.allocate(bytes);
        in_host_memory(buffer.expect("a pool that was made for one buffer has room for it"))
    }
}

fn pool(bytes: usize) -> Result<Pool, MemoryError> {
    let capacity_bytes = bytes.next_multiple_of(DIRECT_ALIGN);
    Pool::new(&PoolConfig { capacity_bytes, huge_pages: HugePages::Never, populate: false })
}
