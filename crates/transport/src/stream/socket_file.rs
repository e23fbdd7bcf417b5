//! The file of a Unix socket: made, and removed where it is no other process's.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use cascade_runtime::{Deadline, now};
use rustix::fs::{Mode, fchmod};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, listen, socket_with};

use super::kernel::KernelSocket;

/// Connections that wait until they are accepted.
const BACKLOG: i32 = 128;

/// The file of a Unix socket.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    identity: Identity,
}

/// Tells a file from another one at the same path: device, inode, and time of the last change,
/// because numbers of inodes are used again.
type Identity = (u64, u64, (i64, i64));

impl SocketFile {
    pub(super) fn at(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), identity: identity(path)? })
    }

    /// Removes the file, unless another process has put one in its place.
    pub(crate) fn remove(&self) {
        if identity(&self.path).is_ok_and(|there| there == self.identity) {
            // If it cannot be removed, the next listener at this path replaces it.
            drop(fs::remove_file(&self.path));
        }
    }
}

fn identity(path: &Path) -> io::Result<Identity> {
    let it = fs::symlink_metadata(path)?;
    Ok((it.dev(), it.ino(), (it.ctime(), it.ctime_nsec())))
}

/// Makes a Unix socket that only this user can connect to. Replaces one that a killed process left.
pub(super) fn bind(path: &Path) -> io::Result<UnixListener> {
    let bound = bind_new(path);
    let is_taken = matches!(&bound, Err(error) if error.kind() == io::ErrorKind::AddrInUse);
    if !(is_taken && is_left(path)) {
        return bound;
    }
    fs::remove_file(path)?;
    bind_new(path)
}

fn bind_new(path: &Path) -> io::Result<UnixListener> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // Linux gives the file the mode of the socket, less the umask, so that it is never open to
    // others.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &address)?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// Whether there is a socket on which no process listens. Does not wait for one that is busy.
fn is_left(path: &Path) -> bool {
    // To connect to another kind of file is refused, too.
    let is_socket = fs::symlink_metadata(path).is_ok_and(|it| it.file_type().is_socket());
    let connect = || KernelSocket::connect_unix(path, Deadline::at(now()));
    let is_refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    is_socket && connect().is_err_and(is_refused)
}
