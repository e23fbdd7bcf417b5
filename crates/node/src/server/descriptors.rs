//! Passing the pool on: the welcome and, with it, its file descriptor.

use std::fs::File;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use cascade_wire::Access;
use rustix::fs::{Mode, OFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// The pool's descriptor as a client gets it: one that cannot be mapped for writing, if it reads.
pub(super) fn for_client(pool: &File, access: Access) -> io::Result<OwnedFd> {
    match access {
        Access::Write => pool.as_fd().try_clone_to_owned(),
        Access::Read | Access::Administer => {
            let name = format!("/proc/self/fd/{}", pool.as_raw_fd());
            Ok(rustix::fs::open(name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
        }
    }
}

/// Sends a whole message with a descriptor. A fresh connection has room for it.
pub(super) fn send(
    socket: BorrowedFd<'_>,
    message: &[u8],
    descriptor: BorrowedFd<'_>,
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    let fits = control.push(SendAncillaryMessage::ScmRights(&descriptors));
    debug_assert!(fits, "the space was made for one descriptor");
    let sent = sendmsg(socket, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL)?;
    if sent == message.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}
