//! The process: configuration, wiring, sockets, metrics, admin and shutdown.

mod admin;
pub mod calls;
pub mod config;
pub mod doctor;
mod node;
pub mod notify;
pub mod process;
mod server;
mod socket;
pub mod socket_place;
pub mod status;
pub mod tenants;

pub use config::NodeConfig;
pub use node::{Node, NodeError, Phase};
pub use server::{Server, SessionFacts};
