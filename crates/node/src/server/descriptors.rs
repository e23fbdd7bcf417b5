//! Passing the pool's file descriptor to a client, together with the welcome message.

use std::fs::File;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use cascade_memory::Region;
use cascade_wire::Access;
use rustix::fs::{Mode, OFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// The descriptor of a pool for a client. In host memory, that of a reader cannot be mapped for
/// writing.
pub(super) fn pool_for_client(pool: &Region, access: Access) -> io::Result<OwnedFd> {
    if let Some(host) = pool.host() {
        return file_for_client(host.file(), access);
    }
    // Clients of memory that cannot be shared are refused before.
    let shared =
        pool.device().and_then(|device| device.shared()).ok_or(io::ErrorKind::Unsupported)?;
    shared.export().map_err(io::Error::other)
}

fn file_for_client(pool: &File, access: Access) -> io::Result<OwnedFd> {
    match access {
        Access::Write => pool.as_fd().try_clone_to_owned(),
        Access::Read | Access::Administer => {
            // A duplicate would share the access mode of the node. Opening the file again gives a
            // descriptor that is read-only.
            let name = format!("/proc/self/fd/{}", pool.as_raw_fd());
            Ok(rustix::fs::open(name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
        }
    }
}

/// Sends a message with a descriptor. The send buffer of a new connection has room for all of it.
pub(super) fn send(
    socket: BorrowedFd<'_>,
    message: &[u8],
    descriptor: BorrowedFd<'_>,
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    let fits = control.push(SendAncillaryMessage::ScmRights(&descriptors));
    debug_assert!(fits, "the space is that of one descriptor");
    let sent = sendmsg(socket, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL)?;
    if sent == message.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}
