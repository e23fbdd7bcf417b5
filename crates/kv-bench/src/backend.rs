//! What the workload needs of a store: memory for a block, a put, a read. Tests plant faults here.

use cascade_block::BlockKey;
use cascade_memory::{Slab, SlabMut};
use serde::Serialize;

/// Where a block was when it was read, in the original's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KvTier {
    /// Memory of a GPU. Simulated in host memory.
    Gpu,
    /// DRAM.
    Cpu,
    /// Files.
    Storage,
}

impl KvTier {
    /// All tiers from fast to slow.
    pub const ALL: [Self; 3] = [Self::Gpu, Self::Cpu, Self::Storage];

    /// Its position in [`Self::ALL`].
    pub fn index(self) -> usize {
        match self {
            Self::Gpu => 0,
            Self::Cpu => 1,
            Self::Storage => 2,
        }
    }

    /// Its name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gpu => "gpu",
            Self::Cpu => "cpu",
            Self::Storage => "storage",
        }
    }
}

/// Memory that a new block is written into.
#[derive(Debug)]
pub enum Space {
    /// A slab of the store, written in place.
    Slab(SlabMut),
    /// Memory of the caller.
    Owned(Vec<u8>),
}

impl Space {
    /// The bytes to write. Empty if the memory is not the host's.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Slab(slab) => slab.host_mut().unwrap_or_default(),
            Self::Owned(bytes) => bytes,
        }
    }
}

/// A block to store.
#[derive(Debug)]
pub struct NewBlock {
    /// Its key.
    pub key: BlockKey,
    /// The block before it in its chain.
    pub parent: Option<BlockKey>,
    /// Its bytes.
    pub space: Space,
}

/// The bytes of a block that was read.
#[derive(Debug)]
pub enum Held {
    /// A view of the store's memory.
    Slab(Slab),
    /// A copy.
    Owned(Vec<u8>),
}

impl Held {
    /// The bytes. Empty if the memory is not the host's.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Slab(slab) => slab.host().unwrap_or_default(),
            Self::Owned(bytes) => bytes,
        }
    }
}

/// Outcome of a put.
#[derive(Debug)]
pub enum Stored {
    /// The block is stored.
    Yes,
    /// It was there already, so nothing was written.
    Present,
    /// It is not stored, for this reason.
    No(String),
}

/// Outcome of a read.
#[derive(Debug)]
pub enum Read {
    /// The block, and where it was.
    Hit {
        /// Its bytes.
        held: Held,
        /// The tier that had it.
        tier: KvTier,
    },
    /// No tier has the block, or what it had failed its check.
    Miss,
    /// The read failed, for this reason.
    Failed(String),
}

/// A store under test. Calls come from many threads.
pub trait Backend: Sync {
    /// Memory for a block of this length. Waits while the store writes its backlog.
    ///
    /// # Errors
    /// The reason, if there is none within the timeout of the store.
    fn reserve(&self, bytes: usize) -> Result<Space, String>;

    /// Stores blocks, an outcome for each. Returns once they are in the file tier, if there is one.
    fn put(&self, blocks: Vec<NewBlock>) -> Vec<Stored>;

    /// Reads blocks, an outcome for each.
    fn read(&self, keys: &[BlockKey]) -> Vec<Read>;

    /// Removes every block.
    fn clear(&self);
}
