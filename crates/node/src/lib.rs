//! The process: configuration, wiring, sockets, metrics, admin and shutdown.

pub mod config;
mod node;
pub mod status;

pub use config::NodeConfig;
pub use node::{Node, NodeError};
