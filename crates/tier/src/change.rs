//! Values of the change log: changes, and the position of a follower.

use cascade_block::BlockKey;

/// Encodes a complete scan in the bytes of a cursor.
const NO_SCAN: u32 = u32::MAX;

/// One change of the set of blocks that a store has in any tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Change {
    /// The store has this block now.
    Stored(BlockKey),
    /// The store does not have this block any more. A follower can get this for a block that it
    /// does not know.
    Removed(BlockKey),
    /// The store has no blocks any more.
    Cleared,
}

/// The position of a follower in the changes of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ChangeCursor {
    /// Identifies the log; differs after every start.
    pub epoch: u64,
    /// Number of changes before the next one.
    pub sequence: u64,
    /// Index of the next entry to scan; `None` once the scan is complete.
    pub scan: Option<u32>,
}

impl ChangeCursor {
    /// Length of a cursor as bytes.
    pub const BYTES: usize = 20;

    /// Encodes the cursor, to store or send it.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..].copy_from_slice(&self.scan.unwrap_or(NO_SCAN).to_le_bytes());
        bytes
    }

    /// Decodes a cursor. Any bytes are valid; for a cursor that did not come from this store,
    /// `Store::changes` returns `is_lost`.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        let word = |first: usize| u64::from_le_bytes(std::array::from_fn(|at| bytes[first + at]));
        let scan = u32::from_le_bytes(std::array::from_fn(|at| bytes[16 + at]));
        Self { epoch: word(0), sequence: word(8), scan: (scan != NO_SCAN).then_some(scan) }
    }
}

/// Result of `Store::changes`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changes {
    /// The cursor for the next call.
    pub next: ChangeCursor,
    /// Whether the changes since the cursor are no longer in the log, or the cursor is of another
    /// run. The changes start with all keys again: empty the set before applying them.
    pub is_lost: bool,
    /// Whether the set is exact after these changes: the blocks that the store had at one time
    /// during this call. Otherwise call again at once.
    pub is_current: bool,
    /// The changes, in their order.
    pub changes: Vec<Change>,
}
