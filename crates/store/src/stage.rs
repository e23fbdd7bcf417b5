//! Stages: what stands below DRAM in a pipeline, behind one small trait.
//!
//! A stage keeps bytes at addresses of its own and answers in batches. It decides nothing: which
//! blocks come, stay and go is the store's business. Anyone can add one: implement [`Stage`],
//! run [`conformance`] over it, register it in a [`Registry`].

mod call_threads;
pub mod conformance;
pub(crate) mod encrypted;
mod fake;
mod files;
pub(crate) mod guarded;
mod records;
mod registry;

use serde::{Deserialize, Serialize};
use std::error::Error;
use std::fmt;
use std::sync::Arc;

use cascade_block::{BlockKey, Deadline, Digest, Manifest, Namespace, NamespaceId};
use cascade_memory::{Slab, SlabMut};
use thiserror::Error;

use crate::TierName;
pub use crate::catalog::Address;
pub use crate::erase::Left;
pub use encrypted::EncryptedStage;
pub use fake::FakeStage;
pub use files::FilesStage;
pub use records::{RecordAnswer, RecordBuffer, RecordCall, RecordStage, Records, UnsealedRecord};
pub use registry::{Registry, StageContext, StageFactory};

/// What a stage is told of a block besides its bytes, and tells back after a restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockFacts {
    /// Its name.
    pub key: BlockKey,
    /// The name of its bytes, when content hashing is on.
    pub digest: Option<Digest>,
    /// The block before it in its chain.
    pub parent: Option<BlockKey>,
    /// The namespace that its key is rooted in.
    pub namespace: NamespaceId,
    /// Its length in bytes.
    pub bytes: u32,
    /// Whether it belongs to a protected prefix.
    pub is_prefix: bool,
    /// When it expires, in milliseconds since 1970.
    pub expires_unix_ms: Option<u64>,
}

/// One block to read, and the slab to read it into.
#[derive(Debug)]
pub struct Load {
    /// What the store believes is at the address; the stage checks it.
    pub key: BlockKey,
    /// Where.
    pub address: Address,
    /// As long as the block.
    pub slab: SlabMut,
}

/// What became of one block of a load.
#[derive(Debug)]
pub enum Loaded {
    /// The slab holds the block's bytes, checked.
    Hit(SlabMut),
    /// It is no longer there (reclaimed, or only its name was kept).
    Gone,
    /// It is there, but damaged; the store forgets the address and counts it.
    Damaged,
    /// The stage failed; the block may still be there.
    Failed(StageError),
}

/// A stage's failure, by what the store does about it.
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum StageError {
    /// No room: the store makes room and tries again.
    #[error("the stage is full")]
    Full,
    /// This block can never be kept here.
    #[error("the stage does not take a block of {bytes} bytes")]
    Declined {
        /// Length of the block.
        bytes: u32,
    },
    /// The stage panicked, or did not say what became of the block.
    #[error("the stage gave no answer")]
    NoAnswer,
    /// The stage has no way to erase what it keeps.
    #[error("the stage cannot erase what it keeps")]
    CannotErase,
    /// The stage was closed.
    #[error("the stage is closed")]
    Closed,
    /// The deadline passed.
    #[error("the stage did not answer in time")]
    Timeout,
    /// It failed lately, or all its calls hang, and it is left alone until it answers a probe.
    #[error("the stage is left alone until it answers a probe, because it failed lately")]
    Shed,
    /// Anything else.
    #[error("the stage failed")]
    Failed(#[source] Arc<dyn Error + Send + Sync>),
}

/// What making room did.
#[derive(Debug, Clone, Default)]
pub struct Room {
    /// Blocks that were kept but moved: key, old address, new address.
    pub moved: Vec<(BlockKey, Address, Address)>,
    /// Blocks that are gone.
    pub dropped: Vec<(BlockKey, Address)>,
    /// Bytes that can be used again.
    pub freed_bytes: u64,
}

/// What a stage holds and did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageStats {
    /// Bytes in use.
    pub used_bytes: u64,
    /// Bytes it may use.
    pub capacity_bytes: u64,
    /// Files or other containers now.
    pub files: u64,
    /// Blocks that were found damaged.
    pub damaged_blocks: u64,
    /// Headers, footers and other structures of files that were found damaged.
    #[serde(default)]
    pub damaged_structures: u64,
    /// What an operator should know, such as a fallback that was taken.
    pub notes: Vec<String>,
}

/// What erasing a stage did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StageErased {
    /// Files or other containers that are gone.
    pub files_removed: u64,
    /// Bytes of them that were overwritten.
    pub overwritten_bytes: u64,
    /// What resisted.
    pub left: Vec<Left>,
}

/// A place below DRAM that keeps blocks.
///
/// Calls come from several threads. Every call returns by its deadline; what is unfinished then
/// fails with [`StageError::Timeout`], and slabs still in flight stay with the stage until free.
/// A stage that does not keep to that costs the store a thread for each call that hangs, up to a
/// bound, and nobody waits for it beyond the deadline.
pub trait Stage: Send + Sync + fmt::Debug {
    /// The tier's name in results and statistics.
    fn name(&self) -> TierName;

    /// Whether it keeps names without bytes, so that a load never finds anything.
    fn keeps_names_only(&self) -> bool {
        false
    }

    /// Whether a load returns by its deadline even while the device below hangs in the kernel. The
    /// store then loads in the caller's thread, which saves two wake-ups a call; a stage that says
    /// yes and hangs takes its callers with it.
    fn keeps_deadlines(&self) -> bool {
        false
    }

    /// Keeps blocks; one result for each, in order. An address is returned only when all of a
    /// block's bytes are where they belong.
    fn store(
        &self,
        batch: Vec<(BlockFacts, Slab)>,
        deadline: Deadline,
    ) -> Vec<Result<Address, StageError>>;

    /// Reads blocks; one result for each, in order.
    fn load(&self, batch: Vec<Load>, deadline: Deadline) -> Vec<Loaded>;

    /// Keeps another name for bytes that it has, over restarts too where it survives them.
    fn alias(
        &self,
        batch: Vec<(BlockFacts, Address)>,
        deadline: Deadline,
    ) -> Result<(), StageError>;

    /// Forgets names; the bytes go with their last name.
    fn remove(&self, batch: &[(BlockKey, Address)], deadline: Deadline) -> Result<(), StageError>;

    /// Gives space back, oldest first. Blocks for which `keep` says yes stay, if they can.
    fn make_room(
        &self,
        keep: &mut dyn FnMut(&BlockKey, Address) -> bool,
        deadline: Deadline,
    ) -> Result<Room, StageError>;

    /// Hands over what survived from an earlier run, once.
    fn recover(&self) -> Vec<(BlockFacts, Address)>;

    /// Returns once all that was stored would survive a restart, where the stage survives them.
    fn flush(&self, deadline: Deadline) -> Result<(), StageError>;

    /// Keeps a namespace's manifest beside its blocks, where the stage survives restarts.
    fn register(&self, _namespace: &Namespace, _deadline: Deadline) -> Result<(), StageError> {
        Ok(())
    }

    /// The manifests that are kept there.
    fn manifests(&self, _deadline: Deadline) -> Result<Vec<(NamespaceId, Manifest)>, StageError> {
        Ok(Vec::new())
    }

    /// Goes to the device and back, as a store and a load would, without changing any block. Asked
    /// while the stage is idle, and while its circuit for writes is open: when this succeeds,
    /// blocks are stored there again. A device that is full answers, and so is not broken.
    fn probe(&self, _deadline: Deadline) -> Result<(), StageError> {
        Ok(())
    }

    /// As `probe`, as a load alone would: asked while the circuit for reads is open. A stage that
    /// can tell keeps its blocks readable while it takes no writes.
    fn probe_reads(&self, deadline: Deadline) -> Result<(), StageError> {
        self.probe(deadline)
    }

    /// Calls of its own that go on although their deadline passed.
    fn stuck_calls(&self) -> u64 {
        0
    }

    /// Does away with everything that is kept, bytes and names and manifests, and is empty and
    /// usable afterwards. No other call is under way.
    fn erase(&self, _deadline: Deadline) -> Result<StageErased, StageError> {
        Err(StageError::CannotErase)
    }

    /// Lets go of what others may want, such as a directory. Later calls fail.
    fn close(&self) {}

    /// What it holds and did.
    fn stats(&self) -> StageStats;
}
