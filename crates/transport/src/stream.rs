//! Connections over a stream socket: TCP between hosts, a Unix socket within one.

mod accept;
mod client;
mod handshake;
mod incoming;
mod outgoing;
mod server;
mod socket;

pub(crate) use accept::{Accepting, listen_tcp, listen_unix};
pub(crate) use client::StreamConnection;
pub(crate) use socket::Socket;
