//! The process: configuration, wiring, sockets, metrics, admin and shutdown.

pub mod config;
mod history;
pub mod http;
pub mod metrics;
mod node;
mod own_process;
pub mod status;
pub mod telemetry;
pub mod traffic;

pub use config::NodeConfig;
pub use node::{Node, NodeError};
