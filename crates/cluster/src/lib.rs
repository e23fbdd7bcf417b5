//! Other nodes as a source of blocks: who they are, what they have, and how their blocks get here.
//!
//! A [`Cluster`] is one node's side. Its [`Source`](cascade_tier::source::Source) asks all nodes
//! that it knows which blocks they have in DRAM, and fetches blocks straight into the slabs of the
//! store; its [`Owner`] answers the same questions of the others. There is no master and nothing to
//! agree on: what a node says is a hint, and each block is compared with the checksum that was
//! stated for it.
#![warn(clippy::disallowed_types)]

mod cluster;
mod error;
mod hosts;
mod link;
mod message;
mod owner;
mod round;
mod source;

pub use cluster::{Cluster, ClusterConfig};
pub use error::ClusterError;
pub use hosts::{Host, HostsError, parse_hosts};
pub use link::{NodeState, NodeStatus};
pub use message::Contents;
pub use owner::{LocalBlocks, Owner};
