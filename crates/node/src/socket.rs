//! The Unix socket's file: made with its permissions, taken over from a node that died, removed.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, chown};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::process::{geteuid, umask};

use crate::NodeError;
use crate::socket_place::{self, Occupant, SocketPlaceError};

/// A socket's file, and the lock that says whose it is. Both go when this is dropped.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    lock_path: PathBuf,
    _lock: File,
}

impl SocketFile {
    /// Listens at a path. A file that a dead node left there is taken over; a living node's is
    /// not.
    ///
    /// A group that may administer can connect, also through a directory that this makes.
    pub(crate) fn listen(
        path: &Path,
        mode: u32,
        group: Option<u32>,
    ) -> Result<(UnixListener, Self), NodeError> {
        let misplaced = |source| NodeError::Place { path: path.to_owned(), source };
        let failed = |operation: &'static str| {
            move |source| NodeError::Socket { path: path.to_owned(), operation, source }
        };
        let directory = path.parent().filter(|directory| !directory.exists());
        let occupant = socket_place::prepare(path, geteuid().as_raw()).map_err(misplaced)?;
        let mut lock_path = path.as_os_str().to_owned();
        lock_path.push(".lock");
        let lock_path = PathBuf::from(lock_path);
        let lock = open_lock(&lock_path).map_err(failed("lock the socket"))?;
        // Two nodes that start at once may both have found the place free.
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(misplaced(SocketPlaceError::Taken { path: path.to_owned() }));
        }
        if occupant == Occupant::Stale {
            fs::remove_file(path).map_err(failed("remove a dead node's socket"))?;
        }
        // With tight permissions from the first moment, and only then what was asked for.
        let before = umask(Mode::from_bits_truncate(0o177));
        let listener = UnixListener::bind(path);
        umask(before);
        let listener = listener.map_err(failed("make the socket"))?;
        if let Some(group) = group {
            let give = |path: &Path, mode| {
                chown(path, None, Some(group))?;
                fs::set_permissions(path, fs::Permissions::from_mode(mode))
            };
            let shown = directory.map_or(Ok(()), |directory| give(directory, 0o710));
            let given = shown.and_then(|()| give(path, mode | 0o060));
            given.map_err(failed(
                "give the socket to admin_group, of which the node's user has to be a member,",
            ))?;
        } else {
            let permissions = fs::Permissions::from_mode(mode);
            fs::set_permissions(path, permissions)
                .map_err(failed("set the socket's permissions"))?;
        }
        Ok((listener, Self { path: path.to_owned(), lock_path, _lock: lock }))
    }
}

fn open_lock(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).write(true).mode(0o600);
    options.custom_flags(OFlags::NOFOLLOW.bits().cast_signed()).open(path)
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        for path in [&self.path, &self.lock_path] {
            if let Err(error) = fs::remove_file(path) {
                tracing::debug!(path = %path.display(), %error, "cannot remove a file of ours");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_nodes_socket_is_taken_over_and_a_living_ones_is_not() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("deep/cascade.sock");
        let (listener, file) = SocketFile::listen(&path, 0o600, None).expect("nothing is there");
        let mode = fs::metadata(&path).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let error = SocketFile::listen(&path, 0o600, None).expect_err("it is served");
        assert!(matches!(error, NodeError::Place { .. }), "{error}");
        drop((listener, file));
        assert!(!path.exists());
        drop(UnixListener::bind(&path).expect("a dead node's file stays behind"));
        SocketFile::listen(&path, 0o660, None).expect("nobody serves there");
    }
}
