//! What a stage has yet to write.

use cascade_block::BlockKey;
use cascade_tier::tier::{Address, BlockFacts};

use crate::core::catalog::ContentIndex;

/// A block queued to be written to a lower stage.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PendingWrite {
    pub(crate) facts: BlockFacts,
    pub(crate) content: ContentIndex,
    pub(crate) generation: u32,
    /// How often the stage failed to store it.
    pub(crate) tries: u8,
}

/// An additional or removed key of a content that a stage has. Only the mover of the stage sends
/// these changes, in their order and before later blocks: a key that is removed and added again
/// must end up present.
#[derive(Debug, Clone, Copy)]
pub(crate) enum KeyChange {
    /// Another key of the content.
    Add(BlockFacts, Address),
    /// A key that is no longer valid.
    Remove(BlockKey, Address),
}

/// Progress of a queue. To wait for everything that is queued now, remember `pushed` and wait until
/// `settled` reaches it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tickets {
    pub(crate) pushed: u64,
    pub(crate) settled: u64,
}
