//! What comes back from a store: a result per block, and errors by what the caller can do.

use std::sync::Arc;

use cascade_block::{BlockKey, NamespaceId};
use cascade_memory::{MemoryError, Slab, SlabMut};
use thiserror::Error;

use crate::PipelineError;

/// The name of a tier in results and statistics: `dram`, `files`, or a stage's own.
pub type TierName = &'static str;

/// One block to store.
#[derive(Debug, Clone, Copy)]
pub struct Put<'a> {
    /// Its name.
    pub key: BlockKey,
    /// Its bytes.
    pub bytes: &'a [u8],
    /// The block before it in its chain.
    pub parent: Option<BlockKey>,
    /// The namespace that the key is rooted in, stored with the data.
    pub namespace: NamespaceId,
    /// Whether it belongs to a protected prefix.
    pub is_prefix: bool,
    /// Whether it is a request's last, partly filled block.
    pub is_partial: bool,
    /// Milliseconds until it expires.
    pub ttl_ms: Option<u64>,
}

impl<'a> Put<'a> {
    /// A block without parent, protection or time limit.
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

/// One block that its caller wrote in place, into a slab from `Store::reserve`.
#[derive(Debug)]
pub struct PutSlab {
    /// Its name.
    pub key: BlockKey,
    /// Its bytes.
    pub slab: SlabMut,
    /// The block before it in its chain.
    pub parent: Option<BlockKey>,
    /// The namespace that the key is rooted in, stored with the data.
    pub namespace: NamespaceId,
    /// Whether it belongs to a protected prefix.
    pub is_prefix: bool,
    /// Whether it is a request's last, partly filled block.
    pub is_partial: bool,
    /// Milliseconds until it expires.
    pub ttl_ms: Option<u64>,
}

impl PutSlab {
    /// A block without parent, protection or time limit.
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

/// Why a block was not taken although nothing failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeclineReason {
    /// A request's last partial block; such blocks are almost never asked for again.
    Partial,
    /// Larger than a tier of the pipeline can hold.
    TooLarge,
    /// Everything resident is pinned or held by views.
    Full,
    /// Everything resident is worth more, and there is no tier below.
    WorthLess,
    /// The pipeline stores nothing.
    Empty,
}

/// What became of one block of a put.
#[derive(Debug)]
pub enum PutOutcome {
    /// Its bytes are in the first tier.
    Stored,
    /// Equal bytes were there under another key; nothing was copied.
    Deduplicated,
    /// This key was there already, with the same bytes.
    Present,
    /// This key is there with other bytes, which stay.
    Conflict,
    /// Not taken.
    Declined(DeclineReason),
    /// Failed.
    Failed(StoreError),
}

/// What a store says to a block before its bytes are there: where to write them, if anywhere.
#[derive(Debug)]
pub enum Prepared {
    /// Write the block here, then give it to `Store::put_slabs`.
    Slab(SlabMut),
    /// Nothing is to be written.
    Settled(PutOutcome),
    /// The key is there; compare the bytes of `Store::inspect`, and say what came of it by
    /// `Store::count_settled`.
    Compare,
    /// Settle what was prepared first, then ask again.
    Later,
}

/// What became of one block of a copying get.
#[derive(Debug)]
pub enum GetOutcome {
    /// That many bytes are at the start of the caller's buffer.
    Hit {
        /// Bytes written.
        bytes: usize,
        /// Where they were found.
        tier: TierName,
    },
    /// Not here, or no longer right.
    Miss,
    /// The buffer is too short; nothing was written.
    TooShort {
        /// Bytes that the block needs.
        needed_bytes: usize,
    },
    /// Failed.
    Failed(StoreError),
}

/// What became of one block of a view.
#[derive(Debug)]
pub enum ViewOutcome {
    /// The block's bytes, which stay as they are until the slab is dropped.
    Hit {
        /// The bytes.
        slab: Slab,
        /// Where they were found.
        tier: TierName,
    },
    /// Not here, or no longer right.
    Miss,
    /// Failed.
    Failed(StoreError),
}

/// How much of a chain is here.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PrefixMatch {
    /// Leading blocks that are available, and the fastest tier of each.
    pub tiers: Vec<TierName>,
}

/// A failure, by what the caller can do about it.
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The call's deadline passed. Retry later, or compute.
    #[error("{operation} did not finish within {timeout_ms} ms; the block counts as a miss")]
    Timeout {
        /// What was under way.
        operation: &'static str,
        /// The deadline that passed.
        timeout_ms: u64,
    },
    /// Too much waits to be written down. Retry later.
    #[error("{pending_bytes} bytes wait to be written to {tier}; retry later or raise the limit")]
    Busy {
        /// The tier that is behind.
        tier: TierName,
        /// How far it is behind.
        pending_bytes: u64,
    },
    /// Every byte of DRAM is pinned or held by views. Drop some, ask for less at once, or give the
    /// store more.
    #[error("no room for {needed_bytes} bytes: all of DRAM is pinned or held by views")]
    NoRoom {
        /// Length of the block.
        needed_bytes: usize,
    },
    /// The client has all that it may have of something that the clients of a store share. Give
    /// some back: drop views, unpin blocks, make fewer calls at a time.
    #[error("this client has all that it may have: {most} {limit}; give some back first")]
    Limit {
        /// What it has too much of.
        limit: &'static str,
        /// How much of it one client may have now.
        most: u64,
    },
    /// A tier failed. Compute.
    #[error("tier {tier} failed to {operation}")]
    Tier {
        /// The tier.
        tier: TierName,
        /// What it could not do.
        operation: &'static str,
        /// Why.
        #[source]
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// The pipeline makes no sense.
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
    /// A setting makes no sense.
    #[error("{setting}: {reason}")]
    Config {
        /// The setting's name.
        setting: &'static str,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// The pool could not be made.
    #[error("cannot make the DRAM tier")]
    Memory(#[source] Arc<MemoryError>),
    /// A thread could not be started.
    #[error("cannot start the store's threads")]
    Threads {
        /// What the kernel said.
        #[source]
        source: Arc<std::io::Error>,
    },
    /// Everything in the store is being erased. Retry when that has ended.
    #[error("everything in the store is being erased; retry when that has ended")]
    Erasing,
    /// The store was closed.
    #[error("the store is closed")]
    Closed,
    /// The node that keeps the blocks is away. Compute; the client connects again by itself.
    #[error("the node at {socket} is away: {reason}")]
    Away {
        /// Where it should be.
        socket: String,
        /// What was seen last.
        reason: String,
    },
    /// The node refuses this client. Change what it presents.
    #[error("the node at {socket} refuses this client: {reason}")]
    Refused {
        /// Where the node is.
        socket: String,
        /// Why, in the node's words.
        reason: String,
    },
}
