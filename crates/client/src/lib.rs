//! What a worker process links: maps the node's pool and talks to the node.
//!
//! A [`Client`] answers the calls of [`cascade_store::BlockStore`] as an embedded store does.
//! Payload never crosses a socket: it is copied between the caller's memory and the mapped pool.
//! While the node is away every call is answered at once, by a miss or by
//! [`cascade_store::StoreError::Away`]; the client connects again by itself.

mod administrator;
mod batches;
mod chains;
mod client;
mod keeper;
mod line;
mod living;
mod session;
mod trace;

pub use administrator::{Administrator, AskError};
pub use cascade_wire::{Access, TraceContext};
pub use client::{Client, ConnectOptions};
pub use trace::{TraceScope, replace as replace_trace};
