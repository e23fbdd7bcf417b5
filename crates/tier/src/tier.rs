//! The tiers below DRAM in a pipeline, behind one small trait.
//!
//! A tier keeps bytes at its own addresses and answers in batches. The store decides which blocks
//! are stored, kept and removed. To add a tier: implement [`Tier`], run
//! [`crate::conformance::tier`] over it, register it in the `StageRegistry` of the store.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use cascade_block::{BlockKey, Digest, Manifest, Namespace, NamespaceId};
use cascade_memory::{DeviceError, Slab, SlabMut};
use cascade_runtime::Deadline;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::TierName;

/// A block's properties besides its bytes; a persistent tier returns them after a restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockFacts {
    /// Its key.
    pub key: BlockKey,
    /// The digest of its bytes, when content hashing is on.
    pub digest: Option<Digest>,
    /// The previous block of its chain.
    pub parent: Option<BlockKey>,
    /// The namespace that its key is rooted in.
    pub namespace: NamespaceId,
    /// Its length in bytes.
    pub bytes: u32,
    /// Whether it belongs to a protected prefix.
    pub is_prefix: bool,
    /// When its tier wrote it, in milliseconds since 1970; 0 before that.
    pub written_unix_ms: u64,
    /// When it expires, in milliseconds since 1970.
    pub expires_unix_ms: Option<u64>,
}

impl BlockFacts {
    /// Whether the block has expired.
    pub fn has_expired(&self, now_unix_ms: u64) -> bool {
        self.expires_unix_ms.is_some_and(|expires| expires <= now_unix_ms)
    }
}

/// One block to read, and the slab to read it into.
#[derive(Debug)]
pub struct Load {
    /// The block that the store expects at the address; the tier checks it.
    pub key: BlockKey,
    /// Where it is stored.
    pub address: Address,
    /// Where to read it to; as long as the block.
    pub slab: SlabMut,
}

/// Result of loading one block.
#[derive(Debug)]
pub enum LoadOutcome {
    /// The slab holds the block's bytes, checked.
    Hit(SlabMut),
    /// The tier no longer has it: reclaimed, or it keeps only names.
    Gone,
    /// The block is damaged: the store forgets the address and counts it.
    Damaged,
    /// The tier failed; it may still have the block.
    Failed(TierError),
}

/// The blocks of one load, from the store to a tier and back.
///
/// The tier takes the next block when it has capacity, and gives each back as it ends, while
/// others are in flight. The store can thus copy a block while the tier reads the next ones. All
/// methods are called in the thread that called [`Tier::load_each`], with no lock held that any
/// call to the tier takes.
pub trait LoadQueue {
    /// Returns the next block to load with the store's number for it, or `None` if there is none
    /// now. There may be more after a load has ended.
    fn next_load(&mut self) -> Option<(usize, Load)>;

    /// Reports the result of the block with this number. A number is used again after that.
    fn ended(&mut self, number: usize, outcome: LoadOutcome);

    /// All blocks that were taken are being loaded, and the tier would wait. Does a short piece of
    /// other work, such as a copy of a block from DRAM, or returns false if there is none. There
    /// may be another block to load afterwards.
    fn idle(&mut self) -> bool {
        false
    }
}

/// Maximum number of blocks that [`Tier::load`] gets at once from a queue.
const LOADS_PER_CALL: usize = 512;

/// Takes blocks from a queue for one call.
pub fn next_loads(queue: &mut dyn LoadQueue) -> (Vec<usize>, Vec<Load>) {
    let next = std::iter::from_fn(|| queue.next_load());
    next.take(LOADS_PER_CALL).unzip()
}

/// Loads a list of blocks through a queue, such as with [`Tier::load_each`]; one result for each,
/// in order. Blocks that `load_each` does not take have timed out.
pub fn load_list(batch: Vec<Load>, load_each: impl FnOnce(&mut dyn LoadQueue)) -> Vec<LoadOutcome> {
    struct List {
        waiting: std::iter::Enumerate<std::vec::IntoIter<Load>>,
        outcomes: Vec<Option<LoadOutcome>>,
    }
    impl LoadQueue for List {
        fn next_load(&mut self) -> Option<(usize, Load)> {
            self.waiting.next()
        }

        fn ended(&mut self, number: usize, outcome: LoadOutcome) {
            self.outcomes[number] = Some(outcome);
        }
    }
    let outcomes = batch.iter().map(|_| None).collect();
    let mut list = List { waiting: batch.into_iter().enumerate(), outcomes };
    load_each(&mut list);
    let timed_out = || LoadOutcome::Failed(TierError::Timeout);
    list.outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(timed_out)).collect()
}

/// An error of a tier. The variants differ in how the store reacts.
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum TierError {
    /// No room: the store makes room and retries.
    #[error("the stage is full")]
    Full,
    /// The tier can never store this block.
    #[error("the stage does not accept a block of {bytes} bytes")]
    Declined {
        /// Length of the block.
        bytes: u32,
    },
    /// The block's bytes in memory do not match their recorded checksum, so it was not stored.
    #[error("the bytes of the block changed in memory since they were put")]
    ChangedInMemory,
    /// The tier needs the block's bytes, and its slab is in device memory. The store copies such
    /// blocks to host memory before it calls the tier, so only other callers get this.
    #[error(
        "the block is in device memory, which the stage cannot read or write; copy it to host \
         memory first"
    )]
    NotHostMemory,
    /// The block could not be copied from or to device memory.
    #[error("the block could not be copied from or to device memory")]
    Device(#[source] DeviceError),
    /// The tier panicked, or returned no result for the block.
    #[error("the stage returned no result")]
    NoResult,
    /// The tier does not support erasing.
    #[error("the stage cannot erase its blocks")]
    CannotErase,
    /// The tier's capacity cannot change.
    #[error("the stage has a fixed capacity")]
    CannotResize,
    /// The tier was closed.
    #[error("the stage is closed")]
    Closed,
    /// The deadline passed.
    #[error("the stage did not answer in time")]
    Timeout,
    /// The circuit is open after errors or hung calls, until a probe succeeds.
    #[error("the stage's circuit is open after errors; it closes when a probe succeeds")]
    CircuitOpen,
    /// Any other error.
    #[error("the stage failed")]
    Failed(#[source] Arc<dyn Error + Send + Sync>),
}

/// Result of making room.
#[derive(Debug, Clone, Default)]
pub struct MakeRoomOutcome {
    /// Blocks that were kept and moved: key, old address, new address.
    pub moved: Vec<(BlockKey, Address, Address)>,
    /// Blocks that were dropped.
    pub dropped: Vec<(BlockKey, Address)>,
    /// Bytes freed.
    pub freed_bytes: u64,
}

/// Statistics of a tier.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierStats {
    /// Bytes in use.
    pub used_bytes: u64,
    /// Most bytes that it may use.
    pub capacity_bytes: u64,
    /// Number of files or other containers.
    pub files: u64,
    /// Damaged blocks found.
    pub damaged_blocks: u64,
    /// Damaged headers, footers and other structures of files found.
    pub damaged_structures: u64,
    /// How its blocks are encrypted, and the key of new ones; none if they are not.
    #[serde(default)]
    pub encryption: Option<String>,
    /// Notes for operators, such as a fallback in use.
    pub notes: Vec<String>,
}

/// Result of erasing a tier.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EraseOutcome {
    /// Files or other containers removed.
    pub files_removed: u64,
    /// Bytes overwritten in them.
    pub overwritten_bytes: u64,
    /// What could not be erased.
    pub left: Vec<NotErased>,
}

/// A place below DRAM that keeps blocks.
///
/// Calls come from several threads. Every call returns by its deadline: unfinished work then fails
/// with [`TierError::Timeout`], and slabs still in flight stay with the tier until they are free.
/// A tier that exceeds its deadlines costs the store a thread for each hung call, up to a limit;
/// callers of the store do not wait beyond the deadline.
pub trait Tier: Send + Sync + fmt::Debug {
    /// The tier's name in results and statistics.
    fn name(&self) -> TierName;

    /// Whether it keeps names without bytes, so that a load never finds a block.
    fn keeps_names_only(&self) -> bool {
        false
    }

    /// Whether a load returns by its deadline even while the device hangs in the kernel. The store
    /// then loads in the caller's thread, which saves two thread wake-ups per call; if such a tier
    /// hangs, its callers hang, too.
    fn keeps_deadlines(&self) -> bool {
        false
    }

    /// Whether `store` compares each slab with its recorded checksum before it writes the bytes,
    /// and fails with [`TierError::ChangedInMemory`] if they differ. The store compares the slabs
    /// of other tiers itself, before the call.
    fn checks_slabs(&self) -> bool {
        false
    }

    /// Stores blocks; one result for each, in order. Returns an address only when all of a block's
    /// bytes are written.
    fn store(
        &self,
        batch: Vec<(BlockFacts, Slab)>,
        deadline: Deadline,
    ) -> Vec<Result<Address, TierError>>;

    /// Loads blocks; one result for each, in order.
    fn load(&self, batch: Vec<Load>, deadline: Deadline) -> Vec<LoadOutcome>;

    /// As [`Self::load`], for blocks of a queue, until it is empty or the deadline passes. Gives
    /// each block that it takes back once, before it returns; the others stay in the queue.
    ///
    /// Worth implementing for a tier that can give back a block while it reads the next ones.
    fn load_each(&self, queue: &mut dyn LoadQueue, deadline: Deadline) {
        loop {
            let (numbers, batch) = next_loads(queue);
            if batch.is_empty() {
                return;
            }
            let mut outcomes = self.load(batch, deadline).into_iter();
            for number in numbers {
                let missing = || LoadOutcome::Failed(TierError::NoResult);
                queue.ended(number, outcomes.next().unwrap_or_else(missing));
            }
        }
    }

    /// Adds another name for stored bytes, kept over restarts if the tier is persistent. Ignores a
    /// name for an address without bytes.
    fn alias(&self, batch: Vec<(BlockFacts, Address)>, deadline: Deadline)
    -> Result<(), TierError>;

    /// Removes names; the bytes are removed with their last name.
    fn remove(&self, batch: &[(BlockKey, Address)], deadline: Deadline) -> Result<(), TierError>;

    /// Frees space, oldest blocks first. Keeps blocks for which `keep` returns true, if possible.
    fn make_room(
        &self,
        keep: &mut dyn FnMut(&BlockKey, Address) -> bool,
        deadline: Deadline,
    ) -> Result<MakeRoomOutcome, TierError>;

    /// Changes the most bytes that it may use. What it holds above that, it gives back in later
    /// calls of `make_room`, a part in each; until then it is shrinking.
    fn resize(&self, _capacity_bytes: u64, _deadline: Deadline) -> Result<(), TierError> {
        Err(TierError::CannotResize)
    }

    /// Whether it holds more than its capacity, because that was reduced. The store then calls
    /// `make_room` until it does not. Returns at once.
    fn is_shrinking(&self) -> bool {
        false
    }

    /// Ends what the tier has registered of the pool's memory with the kernel or a device. Called
    /// before free memory of the pool is given back to the system: such a registration would keep
    /// its pages, which the pool does not have any more. Returns at once.
    fn release_pool(&self) {}

    /// Returns the blocks of earlier runs, once. All names of the same bytes have one address, if
    /// the tier knows that they do.
    fn recover(&self) -> Vec<(BlockFacts, Address)>;

    /// Returns once all stored blocks would survive a restart, if the tier is persistent.
    fn flush(&self, deadline: Deadline) -> Result<(), TierError>;

    /// Stores a namespace's manifest beside its blocks, if the tier is persistent.
    fn register(&self, _namespace: &Namespace, _deadline: Deadline) -> Result<(), TierError> {
        Ok(())
    }

    /// The stored manifests.
    fn manifests(&self, _deadline: Deadline) -> Result<Vec<(NamespaceId, Manifest)>, TierError> {
        Ok(Vec::new())
    }

    /// Accesses the device as a store and a load would, without changing any block. Called while
    /// the tier is idle, and while its write circuit is open: success closes the circuit. A full
    /// device responds, so it passes the probe.
    fn probe(&self, _deadline: Deadline) -> Result<(), TierError> {
        Ok(())
    }

    /// As `probe`, with reads only: called while the read circuit is open. Tiers with separate
    /// probes stay readable while they cannot write.
    fn probe_reads(&self, deadline: Deadline) -> Result<(), TierError> {
        self.probe(deadline)
    }

    /// Number of its own calls still running after their deadline.
    fn stuck_calls(&self) -> u64 {
        0
    }

    /// Erases everything stored: bytes, names and manifests. The tier is empty and usable
    /// afterwards. No other call is in flight.
    fn erase(&self, _deadline: Deadline) -> Result<EraseOutcome, TierError> {
        Err(TierError::CannotErase)
    }

    /// Releases resources, such as a directory's lock. Later calls fail.
    fn close(&self) {}

    /// Its statistics.
    fn stats(&self) -> TierStats;
}

/// Where a tier below DRAM keeps a block; only that tier understands it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address(pub u64);

/// Something that was not erased.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotErased {
    /// A file, a tier, or memory.
    pub what: String,
    /// The reason.
    pub why: String,
}
