//! Results of store calls: one outcome for each block.

use cascade_block::{BlockKey, NamespaceId};
use cascade_memory::{Slab, SlabMut};

use crate::{StoreError, TierName};

/// One block to store.
#[derive(Debug, Clone, Copy)]
pub struct Put<'a> {
    /// Key of the block.
    pub key: BlockKey,
    /// Bytes of the block.
    pub bytes: &'a [u8],
    /// The preceding block of its chain.
    pub parent: Option<BlockKey>,
    /// The namespace of the key, stored with the block.
    pub namespace: NamespaceId,
    /// Whether the block belongs to a protected prefix.
    pub is_prefix: bool,
    /// Whether the block is the last, partly filled block of a request.
    pub is_partial: bool,
    /// Time to live in milliseconds. `None`: the block does not expire.
    pub ttl_ms: Option<u64>,
}

impl<'a> Put<'a> {
    /// A block without parent, protection or time to live.
    pub fn new(key: BlockKey, bytes: &'a [u8]) -> Self {
        Self {
            key,
            bytes,
            parent: None,
            namespace: NamespaceId::default(),
            is_prefix: false,
            is_partial: false,
            ttl_ms: None,
        }
    }
}

/// One block that the caller wrote in place, into a slab from `Store::reserve` or
/// `Store::prepare`.
#[derive(Debug)]
pub struct PutSlab {
    /// Key of the block.
    pub key: BlockKey,
    /// Bytes of the block.
    pub slab: SlabMut,
    /// The preceding block of its chain.
    pub parent: Option<BlockKey>,
    /// The namespace of the key, stored with the block.
    pub namespace: NamespaceId,
    /// Whether the block belongs to a protected prefix.
    pub is_prefix: bool,
    /// Whether the block is the last, partly filled block of a request.
    pub is_partial: bool,
    /// Time to live in milliseconds. `None`: the block does not expire.
    pub ttl_ms: Option<u64>,
}

impl PutSlab {
    /// A block without parent, protection or time to live.
    pub fn new(key: BlockKey, slab: SlabMut) -> Self {
        Self {
            key,
            slab,
            parent: None,
            namespace: NamespaceId::default(),
            is_prefix: false,
            is_partial: false,
            ttl_ms: None,
        }
    }
}

/// Why a block was declined although nothing failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeclineReason {
    /// The last partial block of a request: such blocks are almost never requested again.
    Partial,
    /// Larger than a tier of the pipeline can hold.
    TooLarge,
    /// Every resident block is pinned or held by a view.
    Full,
    /// The eviction policy values every resident block more, and there is no tier below.
    WorthLess,
    /// The pipeline has no tier that keeps blocks.
    Empty,
}

/// Outcome of the put of one block.
#[derive(Debug)]
pub enum PutOutcome {
    /// The bytes were stored in the first tier.
    Stored,
    /// Equal bytes were already present under another key; nothing was copied.
    Deduplicated,
    /// The key was already present with the same bytes.
    Present,
    /// The key is present with other bytes; those stay.
    Conflict,
    /// The store declined the block.
    Declined(DeclineReason),
    /// The put failed.
    Failed(StoreError),
}

/// Outcome of the first phase of a two-phase put, for one block.
#[derive(Debug)]
pub enum PrepareOutcome {
    /// Write the block into this slab, then pass it to `Store::put_slabs`.
    Slab(SlabMut),
    /// The put of this block is complete; there is nothing to write.
    Settled(PutOutcome),
    /// The key is present. Compare its bytes, from `Store::peek`, and report the
    /// result to `Store::count_completed_puts`.
    Compare,
    /// Complete the puts of the blocks before this one, then prepare it again.
    Deferred,
}

/// Outcome of the copying get of one block.
#[derive(Debug)]
pub enum GetOutcome {
    /// The block was copied to the start of the caller's buffer.
    Hit {
        /// Bytes written.
        bytes: usize,
        /// The tier that had the block.
        tier: TierName,
    },
    /// The block is not in the store, or failed its check.
    Miss,
    /// The buffer is too short; nothing was written.
    TooShort {
        /// Length of the block.
        needed_bytes: usize,
    },
    /// The read failed.
    Failed(StoreError),
}

/// Outcome of the view of one block.
#[derive(Debug)]
pub enum ViewOutcome {
    /// The bytes of the block; they do not change until the slab is dropped.
    Hit {
        /// The bytes.
        slab: Slab,
        /// The tier that had the block.
        tier: TierName,
    },
    /// The block is not in the store, or failed its check.
    Miss,
    /// The read failed.
    Failed(StoreError),
}

/// The leading blocks of a chain that the store has.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PrefixMatch {
    /// The fastest tier of each matched block, root first.
    pub tiers: Vec<TierName>,
}
