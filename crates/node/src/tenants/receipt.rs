//! The receipt of a `forget` command: what was removed, what was zeroed, what remains and why.

use cascade_runtime::{Clock as _, SystemClock};
use cascade_store::{EraseReport, NotErased, TierEraseReport};
use serde::{Deserialize, Serialize};

/// The result of forgetting a tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receipt {
    /// The tenant.
    pub tenant: String,
    /// Whether nothing remains.
    pub is_complete: bool,
    /// Start time in milliseconds since 1970.
    pub began_unix_ms: u64,
    /// End time in milliseconds since 1970.
    pub ended_unix_ms: u64,
    /// What was removed from each tier, fast to slow.
    pub tiers: Vec<TierReceipt>,
    /// The tenant's pool.
    pub memory: MemoryReceipt,
    /// What remains, and why.
    pub left: Vec<Leftover>,
}

/// What was removed from one tier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierReceipt {
    /// The tier.
    pub tier: String,
    /// Removed blocks.
    pub blocks: u64,
    /// Their bytes; equal contents count once.
    pub bytes: u64,
    /// Files that were overwritten, synced and removed.
    pub files_removed: u64,
    /// Overwritten bytes of these files.
    pub overwritten_bytes: u64,
}

/// The state of the tenant's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryReceipt {
    /// Zeroed bytes.
    pub zeroed_bytes: u64,
    /// Bytes that clients still hold; they are zeroed when released.
    pub held_bytes: u64,
    /// Free bytes that were not zeroed before the time-out.
    pub left_bytes: u64,
}

/// Something that could not be erased.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leftover {
    /// A file, a tier or memory.
    pub what: String,
    /// Why it remains, and what happens to it.
    pub why: String,
}

impl Receipt {
    pub(super) fn new(tenant: &str, began_unix_ms: u64, erased: EraseReport) -> Self {
        let is_complete = erased.is_complete();
        let tier = |it: &TierEraseReport| TierReceipt {
            tier: it.tier.to_owned(),
            blocks: it.blocks,
            bytes: it.bytes,
            files_removed: it.files_removed,
            overwritten_bytes: it.overwritten_bytes,
        };
        let memory = MemoryReceipt {
            zeroed_bytes: erased.memory.zeroed_bytes as u64,
            held_bytes: erased.memory.held_bytes as u64,
            left_bytes: erased.memory.unwiped_bytes as u64,
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
                .map(|NotErased { what, why }| Leftover { what, why })
                .collect(),
        }
    }
}
