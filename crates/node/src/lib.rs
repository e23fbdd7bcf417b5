//! The process: configuration, wiring, sockets, metrics, admin and shutdown.

pub mod admin;
mod cluster;
pub mod config;
mod controls;
pub mod doctor;
mod error;
pub mod explain;
mod gpu;
mod gpu_node;
pub mod http;
pub mod metrics;
mod node;
pub mod notify;
pub mod process;
mod process_stats;
mod resize;
mod samples;
mod server;
mod socket;
pub mod socket_place;
pub mod status;
pub mod telemetry;
pub mod tenants;
mod tier_log;
pub mod traffic;

pub use cascade_memory::available_bytes;
pub use cluster::JoinError;
pub use config::NodeConfig;
pub use error::NodeError;
pub use gpu::{GpuError, GpuStatus};
pub use gpu_node::{GpuNodeState, GpuNodeStatus, STOP_WITH_INPUT};
pub use node::Node;
pub use resize::ResizeError;
pub use server::{ClientSnapshot, Server};
