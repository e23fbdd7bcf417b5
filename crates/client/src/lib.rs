//! The client library of a worker process: maps the node's pool and calls the node.
//!
//! A [`Client`] answers the calls of [`cascade_tier::BlockStore`] as an embedded store does.
//! Payload never crosses a socket: it is copied between the caller's memory and the mapped pool.
//! While the node is unavailable, every call returns at once with a miss or
//! [`cascade_tier::StoreError::Unavailable`]. The client reconnects by itself.

mod administrator;
mod batches;
mod chains;
mod client;
mod connection;
mod live_sessions;
mod session;
mod socket;
mod tasks;
mod trace;

pub use administrator::{AdminError, Administrator};
pub use cascade_wire::{Access, SOCKET_PATH_BYTES_MAX, TraceContext};
pub use client::{Client, ConnectOptions};
pub use socket::{default_socket, socket_of_process};
pub use trace::{TraceScope, replace as replace_trace};
