//! The process: configuration, wiring, sockets, metrics, admin and shutdown.

pub mod config;
pub mod doctor;
mod node;
pub mod notify;
pub mod process;
pub mod socket_place;
pub mod status;

pub use config::NodeConfig;
pub use node::{Node, NodeError};
