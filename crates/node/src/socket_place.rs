//! The path of the Unix socket: whether a node may listen there, and whether one already does.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use thiserror::Error;

/// Permissions of a directory with which other users can replace files in it.
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// With the sticky bit, only a file's owner can replace it.
const STICKY: u32 = 0o1000;

/// What exists at the socket's path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketPathState {
    /// Nothing.
    Free,
    /// A socket that no process serves: it may be removed.
    Stale,
}

/// Why a node cannot listen at a path.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SocketPlaceError {
    /// The directory cannot be created or read.
    #[error("cannot create or read the directory {}", directory.display())]
    Directory {
        /// The directory.
        directory: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Another user could replace the socket, and receive what clients send.
    #[error(
        "the directory {} belongs to user {owner} and has permissions {mode:04o}: another user \
         could replace the socket",
        directory.display()
    )]
    Unsafe {
        /// The directory.
        directory: PathBuf,
        /// Its owner.
        owner: u32,
        /// Its permissions.
        mode: u32,
    },
    /// Another process listens at the path.
    #[error("another process listens at {}", path.display())]
    Taken {
        /// The socket's path.
        path: PathBuf,
    },
    /// A file of another kind exists at the path.
    #[error("{} exists and is no socket", path.display())]
    NoSocket {
        /// The socket's path.
        path: PathBuf,
    },
    /// The check failed: whether a process listens is unknown.
    #[error("cannot check whether a process listens at {}", path.display())]
    Unclear {
        /// The socket's path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// Creates the socket's directory if it is missing (permissions 0700), then checks the path.
///
/// # Errors
/// Why a node of `user` must not listen there.
pub fn create_directory_and_examine(
    path: &Path,
    user: u32,
) -> Result<SocketPathState, SocketPlaceError> {
    let directory = directory_of(path);
    let made = DirBuilder::new().recursive(true).mode(0o700).create(directory);
    made.map_err(|source| SocketPlaceError::Directory { directory: directory.into(), source })?;
    examine(path, user)
}

/// Checks whether a node of `user` may listen at the path. Changes nothing.
///
/// # Errors
/// Why the node must not listen there.
pub fn examine(path: &Path, user: u32) -> Result<SocketPathState, SocketPlaceError> {
    let directory = directory_of(path);
    let facts = fs::metadata(directory)
        .map_err(|source| SocketPlaceError::Directory { directory: directory.into(), source })?;
    let (owner, mode) = (facts.uid(), facts.mode() & 0o7777);
    let is_shared = mode & WRITABLE_BY_OTHERS != 0 && mode & STICKY == 0;
    if (owner != user && owner != 0) || is_shared {
        return Err(SocketPlaceError::Unsafe { directory: directory.into(), owner, mode });
    }
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(SocketPathState::Free),
        Err(source) => Err(SocketPlaceError::Unclear { path: path.into(), source }),
        Ok(facts) if !facts.file_type().is_socket() => {
            Err(SocketPlaceError::NoSocket { path: path.into() })
        }
        Ok(_) => match try_connect(path) {
            // A process that is stopped, or whose accept queue is full, listens as well.
            Ok(()) | Err(Errno::AGAIN | Errno::INPROGRESS) => {
                Err(SocketPlaceError::Taken { path: path.into() })
            }
            Err(Errno::CONNREFUSED) => Ok(SocketPathState::Stale),
            Err(error) => {
                Err(SocketPlaceError::Unclear { path: path.into(), source: error.into() })
            }
        },
    }
}

/// Connects without waiting: the socket is non-blocking.
fn try_connect(path: &Path) -> rustix::io::Result<()> {
    connected(path).map(drop)
}

/// A connection to a socket, without waiting for the process that serves it.
pub(crate) fn connected(path: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// The directory of a path.
pub(crate) fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::UnixListener;

    use super::*;

    fn own_user() -> u32 {
        rustix::process::geteuid().as_raw()
    }

    #[test]
    fn a_missing_directory_is_created_for_its_user_alone() {
        let directory = tempfile::TempDir::new().unwrap();
        let path = directory.path().join("cascade-1/cascade.sock");
        assert_eq!(create_directory_and_examine(&path, own_user()).unwrap(), SocketPathState::Free);
        let mode = fs::metadata(path.parent().unwrap()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn a_served_socket_a_stale_socket_and_a_file_are_distinguished() {
        let directory = tempfile::TempDir::new().unwrap();
        let path = directory.path().join("cascade.sock");
        let listener = UnixListener::bind(&path).unwrap();
        assert!(matches!(examine(&path, own_user()), Err(SocketPlaceError::Taken { .. })));
        // The check does not block when the accept queue is full.
        rustix::net::listen(&listener, 1).unwrap();
        let answers: Vec<_> = (0..8).map(|_| try_connect(&path)).collect();
        assert!(answers.contains(&Err(Errno::AGAIN)), "{answers:?}");
        assert!(matches!(examine(&path, own_user()), Err(SocketPlaceError::Taken { .. })));
        drop(listener);
        assert_eq!(examine(&path, own_user()).unwrap(), SocketPathState::Stale);
        fs::remove_file(&path).unwrap();
        fs::write(&path, "").unwrap();
        assert!(matches!(examine(&path, own_user()), Err(SocketPlaceError::NoSocket { .. })));
    }

    #[test]
    fn a_directory_that_others_can_write_is_refused() {
        let directory = tempfile::TempDir::new().unwrap();
        let path = directory.path().join("cascade.sock");
        let set = |mode| {
            fs::set_permissions(directory.path(), fs::Permissions::from_mode(mode)).unwrap();
        };
        set(0o777);
        let error = create_directory_and_examine(&path, own_user()).unwrap_err().to_string();
        assert!(error.contains("0777"), "{error}");
        // With the sticky bit, as in /tmp, users cannot remove each other's files.
        set(0o1777);
        assert!(create_directory_and_examine(&path, own_user()).is_ok());
        set(0o700);
        if own_user() != 0 {
            return;
        }
        std::os::unix::fs::chown(directory.path(), Some(4711), None).unwrap();
        let error = create_directory_and_examine(&path, 1000).unwrap_err().to_string();
        assert!(error.contains("user 4711"), "{error}");
    }
}
