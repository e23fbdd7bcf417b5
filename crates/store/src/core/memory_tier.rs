//! What the store knows of a tier that is memory of its own: which blocks to evict, and how many
//! bytes they take. Each such tier evicts by itself.

use cascade_block::BlockKey;
use cascade_tier::TierName;

use crate::core::eviction::Eviction;
use crate::core::queue::Queue;

/// A tier whose blocks are in slabs of a pool.
#[derive(Debug)]
pub(crate) struct MemoryTier {
    /// Its name in results and statistics.
    pub(crate) name: TierName,
    /// Whether the pipeline keeps blocks in it. Otherwise only blocks in flight are there.
    pub(crate) keeps_blocks: bool,
    /// Which of its blocks to evict.
    pub(crate) eviction: Eviction,
    /// Bytes of its blocks.
    pub(crate) used_bytes: u64,
    /// Slabs of puts and loads in flight.
    pub(crate) slabs_in_flight: u64,
    /// Prefetched blocks that are protected from eviction until their first use, oldest first, with
    /// their bytes.
    pub(crate) prefetched: Queue<(BlockKey, u64)>,
    pub(crate) prefetched_bytes: u64,
    /// Empty between calls; kept to save allocations of [`crate::shared::StoreCore`].
    pub(crate) released: Vec<usize>,
}

impl MemoryTier {
    pub(crate) fn new(name: TierName, keeps_blocks: bool, eviction: Eviction) -> Self {
        Self {
            name,
            keeps_blocks,
            eviction,
            used_bytes: 0,
            slabs_in_flight: 0,
            prefetched: Queue::default(),
            prefetched_bytes: 0,
            released: Vec::new(),
        }
    }
}
