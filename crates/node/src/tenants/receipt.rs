//! The receipt of a forgotten tenant: what was removed, what was zeroed, and what resisted.

use cascade_block::{Clock as _, SystemClock};
use cascade_store::{Erased, Left, TierErased};
use serde::{Deserialize, Serialize};

/// What forgetting a tenant did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receipt {
    /// Whose blocks they were.
    pub tenant: String,
    /// Whether nothing is left.
    pub is_complete: bool,
    /// When it began, in milliseconds since 1970.
    pub began_unix_ms: u64,
    /// When it ended.
    pub ended_unix_ms: u64,
    /// What each tier had, fast to slow.
    pub tiers: Vec<TierReceipt>,
    /// The tenant's pool.
    pub memory: MemoryReceipt,
    /// What is left, and why.
    pub left: Vec<Leftover>,
}

/// What one tier had and lost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierReceipt {
    /// The tier.
    pub tier: String,
    /// Blocks removed from it.
    pub blocks: u64,
    /// Their bytes, equal contents counted once.
    pub bytes: u64,
    /// Files that were overwritten, synced and removed.
    pub files_removed: u64,
    /// Bytes of them that were overwritten.
    pub overwritten_bytes: u64,
}

/// What became of the tenant's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryReceipt {
    /// Bytes that hold zeroes now.
    pub zeroed_bytes: u64,
    /// Bytes that clients still hold; zeroed when they come back.
    pub held_bytes: u64,
    /// Free bytes that there was no time to zero.
    pub left_bytes: u64,
}

/// Something that resisted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leftover {
    /// What: a file, a tier, memory.
    pub what: String,
    /// Why, and what becomes of it.
    pub why: String,
}

impl Receipt {
    pub(super) fn new(tenant: &str, began_unix_ms: u64, erased: Erased) -> Self {
        let is_complete = erased.is_complete();
        let tier = |it: &TierErased| TierReceipt {
            tier: it.tier.to_owned(),
            blocks: it.blocks,
            bytes: it.bytes,
            files_removed: it.files_removed,
            overwritten_bytes: it.overwritten_bytes,
        };
        let memory = MemoryReceipt {
            zeroed_bytes: erased.memory.zeroed_bytes as u64,
            held_bytes: erased.memory.held_bytes as u64,
            left_bytes: erased.memory.left_bytes as u64,
        };
        Self {
            tenant: tenant.to_owned(),
            is_complete,
            began_unix_ms,
            ended_unix_ms: SystemClock.unix_ms(),
            tiers: erased.tiers.iter().map(tier).collect(),
            memory,
            left: erased
                .left
                .into_iter()
                .map(|Left { what, why }| Leftover { what, why })
                .collect(),
        }
    }
}
