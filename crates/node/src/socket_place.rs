//! Where the Unix socket lies: whether a node may listen there, and what is there already.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use thiserror::Error;

/// Permissions that let others replace what lies in a directory.
const WRITABLE_BY_OTHERS: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// What is at the socket's path now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Occupant {
    /// Nothing.
    Nobody,
    /// The socket of a node that is gone: it may be removed.
    Stale,
}

/// Why a node cannot listen at a path.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SocketPlaceError {
    /// The directory cannot be made or looked into.
    #[error("cannot use the directory {}", directory.display())]
    Directory {
        /// Which.
        directory: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Others could put a socket of their own there, and get what clients send.
    #[error(
        "{} belongs to user {owner} and has permissions {mode:04o}: another user could replace \
         the socket in it",
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
    /// A node listens there.
    #[error("another process listens at {}", path.display())]
    Taken {
        /// Where.
        path: PathBuf,
    },
    /// Something that is no socket lies there.
    #[error("{} exists and is no socket", path.display())]
    NoSocket {
        /// Where.
        path: PathBuf,
    },
    /// The path can be neither connected to nor called free.
    #[error("cannot tell whether a node listens at {}", path.display())]
    Unclear {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Makes the socket's directory where it is missing (permissions 0700) and examines the place.
///
/// # Errors
/// Why a node of `user` must not listen there.
pub fn prepare(path: &Path, user: u32) -> Result<Occupant, SocketPlaceError> {
    let directory = directory_of(path);
    let made = DirBuilder::new().recursive(true).mode(0o700).create(directory);
    made.map_err(|source| SocketPlaceError::Directory { directory: directory.into(), source })?;
    examine(path, user)
}

/// Whether a node of `user` may listen there, and what is there. Changes nothing.
///
/// # Errors
/// Why it must not.
pub fn examine(path: &Path, user: u32) -> Result<Occupant, SocketPlaceError> {
    let directory = directory_of(path);
    let facts = fs::metadata(directory)
        .map_err(|source| SocketPlaceError::Directory { directory: directory.into(), source })?;
    let (owner, mode) = (facts.uid(), facts.mode() & 0o7777);
    let is_shared = mode & WRITABLE_BY_OTHERS != 0 && mode & STICKY == 0;
    if (owner != user && owner != 0) || is_shared {
        return Err(SocketPlaceError::Unsafe { directory: directory.into(), owner, mode });
    }
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Occupant::Nobody),
        Err(source) => Err(SocketPlaceError::Unclear { path: path.into(), source }),
        Ok(facts) if !facts.file_type().is_socket() => {
            Err(SocketPlaceError::NoSocket { path: path.into() })
        }
        Ok(_) => match try_connect(path) {
            // A node that is stopped, or whose queue is full, is there too.
            Ok(()) | Err(Errno::AGAIN | Errno::INPROGRESS) => {
                Err(SocketPlaceError::Taken { path: path.into() })
            }
            Err(Errno::CONNREFUSED) => Ok(Occupant::Stale),
            Err(error) => {
                Err(SocketPlaceError::Unclear { path: path.into(), source: error.into() })
            }
        },
    }
}

/// Does not wait, whatever is at the other end.
fn try_connect(path: &Path) -> rustix::io::Result<()> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)
}

fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::UnixListener;

    use super::*;

    fn me() -> u32 {
        rustix::process::geteuid().as_raw()
    }

    #[test]
    fn a_missing_directory_is_made_for_its_user_alone() {
        let directory = tempfile::TempDir::new().unwrap();
        let path = directory.path().join("cascade-1/cascade.sock");
        assert_eq!(prepare(&path, me()).unwrap(), Occupant::Nobody);
        let mode = fs::metadata(path.parent().unwrap()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn what_is_there_is_told_apart() {
        let directory = tempfile::TempDir::new().unwrap();
        let path = directory.path().join("cascade.sock");
        let listener = UnixListener::bind(&path).unwrap();
        assert!(matches!(examine(&path, me()), Err(SocketPlaceError::Taken { .. })));
        // Its queue is full and nobody takes from it: the answer comes all the same.
        rustix::net::listen(&listener, 1).unwrap();
        let answers: Vec<_> = (0..8).map(|_| try_connect(&path)).collect();
        assert!(answers.contains(&Err(Errno::AGAIN)), "{answers:?}");
        assert!(matches!(examine(&path, me()), Err(SocketPlaceError::Taken { .. })));
        drop(listener);
        assert_eq!(examine(&path, me()).unwrap(), Occupant::Stale);
        fs::remove_file(&path).unwrap();
        fs::write(&path, "").unwrap();
        assert!(matches!(examine(&path, me()), Err(SocketPlaceError::NoSocket { .. })));
    }

    #[test]
    fn a_directory_that_others_can_write_is_refused() {
        let directory = tempfile::TempDir::new().unwrap();
        let path = directory.path().join("cascade.sock");
        let set = |mode| {
            fs::set_permissions(directory.path(), fs::Permissions::from_mode(mode)).unwrap();
        };
        set(0o777);
        let error = prepare(&path, me()).unwrap_err().to_string();
        assert!(error.contains("0777"), "{error}");
        // As in /tmp: nobody can remove what belongs to another.
        set(0o1777);
        assert!(prepare(&path, me()).is_ok());
        set(0o700);
        if me() != 0 {
            return;
        }
        std::os::unix::fs::chown(directory.path(), Some(4711), None).unwrap();
        let error = prepare(&path, 1000).unwrap_err().to_string();
        assert!(error.contains("user 4711"), "{error}");
    }
}
