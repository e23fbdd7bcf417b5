//! Connections over a stream: TCP between hosts, with TLS or without, a Unix socket within one.

mod accept;
mod byte_stream;
mod chunk;
mod client;
mod handshake;
mod incoming;
mod kernel;
mod kernel_tls;
mod outgoing;
mod server;
#[cfg(feature = "simulated")]
mod simulated;
mod socket;
mod socket_file;
mod tls;

use cascade_runtime::Deadline;

use crate::TransportError;

pub(crate) use accept::{Accepting, listen_tcp, listen_unix};
pub(crate) use client::{Standing, StreamConnection, Until};
#[cfg(feature = "simulated")]
pub use simulated::{Conditions, Dialled, Network};
pub(crate) use socket::{Socket, refused};
pub(crate) use socket_file::SocketFile;
pub(crate) use tls::ClientTls;

/// Opens another stream to the same peer.
pub(crate) type Open = dyn Fn(Deadline) -> Result<StreamConnection, TransportError> + Send + Sync;
