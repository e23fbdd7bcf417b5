//! What orders are answered with, as JSON.

use serde::{Deserialize, Serialize};

use crate::status::NodeState;

/// Who answers, and whom.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The node's version.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Where it is in its life.
    pub state: NodeState,
    /// Its socket.
    pub socket: String,
    /// The wire protocol that it speaks.
    pub protocol: u16,
    /// The tenant for which the caller asks.
    pub tenant: String,
    /// Whether the caller administers the node.
    pub is_administrator: bool,
}

/// Keys that begin with some digits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// The keys, 64 hexadecimal digits each.
    pub keys: Vec<String>,
}

/// What a flush did for one tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flushed {
    /// The tenant.
    pub tenant: String,
    /// Why not everything was written; nothing if it was.
    pub error: Option<String>,
    /// Bytes that still wait to be written.
    pub pending_bytes: u64,
}

/// Which blocks were deleted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deleted {
    /// The tenant whose they were.
    pub tenant: String,
    /// Their keys.
    pub keys: Vec<String>,
    /// For each, whether it was there.
    pub was_here: Vec<bool>,
}

/// What was cleared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cleared {
    /// The tenant.
    pub tenant: String,
    /// Blocks that it had.
    pub blocks: u64,
    /// Their bytes, equal contents counted once.
    pub bytes: u64,
}

/// What a configuration that was read again changes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reloaded {
    /// Settings that changed and are in force.
    pub changed: Vec<String>,
    /// Settings that differ from those that the node runs with until it is started again.
    pub needs_restart: Vec<String>,
}

/// A setting that changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changed {
    /// Its key.
    pub key: String,
    /// Its value before.
    pub before: Option<String>,
    /// Its value now.
    pub now: Option<String>,
}

/// How far a node is drained.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drained {
    /// Where the node is in its life now.
    pub state: NodeState,
    /// Its process.
    pub pid: u32,
    /// Whether everything is written, so that it may be stopped without a loss.
    pub is_written: bool,
    /// What the flush of each tenant did.
    pub tenants: Vec<Flushed>,
    /// Clients that are connected still. They may read.
    pub clients: usize,
    /// Whether the node was told to end.
    pub is_ending: bool,
}
