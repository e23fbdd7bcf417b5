//! Who is at the other end of a Unix socket.

use std::io;
use std::os::unix::net::UnixStream;

use nix::sys::socket::{getsockopt, sockopt};

/// The credentials that the kernel reports for the other end of a Unix socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Peer {
    /// The process id; 0 for a process of another process namespace.
    pub(crate) process: i32,
    /// The user id.
    pub(crate) user: u32,
    /// The id of the primary group.
    pub(crate) group: u32,
}

impl Peer {
    pub(super) fn of(stream: &UnixStream) -> io::Result<Self> {
        // Not rustix's: it cannot represent process id 0.
        let credentials = getsockopt(stream, sockopt::PeerCredentials)?;
        let (process, user, group) = (credentials.pid(), credentials.uid(), credentials.gid());
        Ok(Self { process, user, group })
    }
}
