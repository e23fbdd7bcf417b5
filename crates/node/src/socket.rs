//! The Unix socket's file: made with its permissions, taken over from a node that died, removed.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, flock};
use rustix::process::umask;

use crate::NodeError;

/// Longest path that a Unix socket's address has room for.
const PATH_BYTES_MAX: usize = 107;

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
    pub(crate) fn listen(path: &Path, mode: u32) -> Result<(UnixListener, Self), NodeError> {
        let refused =
            |reason: String| NodeError::Socket { path: path.display().to_string(), reason };
        let failed = |what: &str, error: io::Error| refused(format!("cannot {what}: {error}"));
        let bytes = path.as_os_str().len();
        if bytes > PATH_BYTES_MAX {
            return Err(refused(format!(
                "the path has {bytes} bytes, a socket's address takes {PATH_BYTES_MAX}; choose a \
                 shorter one with --socket"
            )));
        }
        if let Some(directory) = path.parent().filter(|directory| !directory.exists()) {
            fs::create_dir_all(directory)
                .and_then(|()| fs::set_permissions(directory, fs::Permissions::from_mode(0o700)))
                .map_err(|error| failed("make its directory", error))?;
        }
        let mut lock_path = path.as_os_str().to_owned();
        lock_path.push(".lock");
        let lock_path = PathBuf::from(lock_path);
        let mut options = OpenOptions::new();
        options.create(true).truncate(false).write(true).mode(0o600);
        let lock = options.custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed());
        let lock = lock.open(&lock_path).map_err(|error| failed("open its lock", error))?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(refused(
                "another node serves there; stop it, or choose another path \
                                with --socket"
                    .to_owned(),
            ));
        }
        match fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => {
                return Err(refused("there is a file that is no socket; move it away".to_owned()));
            }
            // Some other program may serve there without our lock.
            Ok(_) if UnixStream::connect(path).is_ok() => {
                return Err(refused("another program serves there".to_owned()));
            }
            Ok(_) => {
                fs::remove_file(path).map_err(|error| failed("remove a dead node's", error))?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed("look there", error)),
        }
        // With the right permissions from the first moment, and only then what was asked for.
        let before = umask(Mode::from_bits_truncate(0o177));
        let listener = UnixListener::bind(path);
        umask(before);
        let listener = listener.map_err(|error| failed("make the socket", error))?;
        fs::set_permissions(path, fs::Permissions::from_mode(mode))
            .map_err(|error| failed("set its permissions", error))?;
        Ok((listener, Self { path: path.to_owned(), lock_path, _lock: lock }))
    }
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
        let (listener, file) = SocketFile::listen(&path, 0o600).expect("nothing is there");
        let mode = fs::metadata(&path).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let error = SocketFile::listen(&path, 0o600).expect_err("it is served");
        assert!(error.to_string().contains("another node serves there"), "{error}");
        drop((listener, file));
        assert!(!path.exists());
        drop(UnixListener::bind(&path).expect("a dead node's file stays behind"));
        SocketFile::listen(&path, 0o660).expect("nobody serves there");
    }

    #[test]
    fn what_is_no_socket_is_left_alone() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("notes.txt");
        fs::write(&path, "precious").expect("it can be written");
        let error = SocketFile::listen(&path, 0o600).expect_err("it is no socket");
        assert!(error.to_string().contains("no socket"), "{error}");
        assert_eq!(fs::read(&path).expect("it is still there"), b"precious");
        let long = directory.path().join("x".repeat(120));
        let error = SocketFile::listen(&long, 0o600).expect_err("too long");
        assert!(error.to_string().contains("107"), "{error}");
    }
}
