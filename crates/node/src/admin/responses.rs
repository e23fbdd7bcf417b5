//! The responses to admin commands, serialized as JSON.

use serde::{Deserialize, Serialize};

use crate::status::NodeState;

/// Response to `version`: the node, and the caller's identity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeIdentity {
    /// The node's version.
    pub version: String,
    /// The node's process id.
    pub pid: u32,
    /// The node's state.
    pub state: NodeState,
    /// The path of the node's Unix socket.
    pub socket: String,
    /// The version of the wire protocol.
    pub protocol: u16,
    /// The caller's tenant.
    pub tenant: String,
    /// Whether the caller may administer the node.
    pub is_administrator: bool,
}

/// Response to `find`: the block keys with a given prefix.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoundKeys {
    /// The keys, 64 hexadecimal digits each.
    pub keys: Vec<String>,
}

/// Response to `keys`: a page of the keys of a tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyListing {
    /// The tenant.
    pub tenant: String,
    /// The keys. There may be none although pages follow.
    pub keys: Vec<KeyRow>,
    /// The cursor of the next page; none on the last one.
    pub next: Option<String>,
}

/// A key, and its block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyRow {
    /// The key, 64 hexadecimal digits.
    pub key: String,
    /// Length.
    pub bytes: u32,
    /// The tiers that have it, fast to slow. None if only tiers with an open circuit have it.
    pub tiers: Vec<String>,
    /// Seconds since it was put. `None` for a block from before the last start.
    pub age_s: Option<u64>,
    /// Seconds since it was last read.
    pub idle_s: Option<u64>,
    /// Number of reads.
    pub uses: u16,
}

/// The result of flushing one tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlushResult {
    /// The tenant.
    pub tenant: String,
    /// Why blocks are not yet written; none if all are.
    pub error: Option<String>,
    /// Bytes that are not yet written.
    pub pending_bytes: u64,
    /// Blocks that no tier keeps when the node stops: the tenant has none below DRAM.
    pub unkept_blocks: u64,
}

/// Response to `delete`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeleteResult {
    /// The tenant.
    pub tenant: String,
    /// The keys of the request, in full.
    pub keys: Vec<String>,
    /// For each key, whether the block was present.
    pub was_here: Vec<bool>,
}

/// Response to `clear`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClearResult {
    /// The tenant.
    pub tenant: String,
    /// Number of removed blocks.
    pub blocks: u64,
    /// Their bytes; equal contents count once.
    pub bytes: u64,
}

/// Response to `reload`: the keys of the settings that differ.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReloadResult {
    /// Settings that changed and are in force.
    pub changed: Vec<String>,
    /// Settings that take effect when the node is restarted.
    pub needs_restart: Vec<String>,
}

/// Response to `config-set`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SettingChange {
    /// The setting's key.
    pub key: String,
    /// Its previous value.
    pub before: Option<String>,
    /// Its value now.
    pub now: Option<String>,
    /// What goes on in the background after the change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// Response to `drain`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainResult {
    /// The node's state now.
    pub state: NodeState,
    /// The node's process id.
    pub pid: u32,
    /// Whether every block is written: a stop of the node then loses none.
    pub is_written: bool,
    /// The result of each tenant's flush.
    pub tenants: Vec<FlushResult>,
    /// Number of clients that are still connected. They can still read.
    pub clients: usize,
    /// Whether the node is shutting down.
    pub is_ending: bool,
}
