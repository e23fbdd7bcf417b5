//! The Unix socket's file and lock: created with their permissions, removed when the node stops.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, chown};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use cascade_memory::LockedFile;
use rustix::fs::{Mode, OFlags, fchmod};
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::geteuid;

use crate::error::NodeError;
use crate::socket_place::{self, SocketPathState, SocketPlaceError};

/// Connections that the kernel holds until the node accepts them; `net.core.somaxconn` caps it.
const BACKLOG: i32 = 4096;
/// How often a lock is taken again after another node has removed its file.
const LOCK_ATTEMPTS: usize = 16;

/// A socket's file and the lock of the node that serves it. Both files are removed on drop.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    lock_path: PathBuf,
    _lock: LockedFile,
}

impl SocketFile {
    /// Listens at a path. A stale socket file is replaced; that of a running node is an error.
    ///
    /// The members of `group` can connect: they get access to the socket, and to its directory if
    /// this creates it.
    pub(crate) fn listen(
        path: &Path,
        mode: u32,
        group: Option<u32>,
    ) -> Result<(UnixListener, Self), NodeError> {
        let path_error = |source| NodeError::Place { path: path.to_owned(), source };
        let failed = |operation: &'static str| {
            move |source| NodeError::Socket { path: path.to_owned(), operation, source }
        };
        let new_directory = path.parent().filter(|directory| !directory.exists());
        let found = socket_place::create_directory_and_examine(path, geteuid().as_raw());
        let found = found.map_err(path_error)?;
        let mut lock_path = path.as_os_str().to_owned();
        lock_path.push(".lock");
        let lock_path = PathBuf::from(lock_path);
        // Two nodes that start at the same time can both find the path free. The lock decides.
        let lock = lock(&lock_path).map_err(failed("lock the lock file of the socket"))?;
        let Some(lock) = lock else {
            return Err(path_error(SocketPlaceError::Taken { path: path.to_owned() }));
        };
        if found == SocketPathState::Stale {
            fs::remove_file(path).map_err(failed("remove the stale socket"))?;
        }
        // Only the owner may connect until the permissions below are set.
        let listener = bind_private(path).map_err(failed("create the socket"))?;
        if let Some(group) = group {
            let grant = |path: &Path, mode| {
                chown(path, None, Some(group))?;
                fs::set_permissions(path, fs::Permissions::from_mode(mode))
            };
            let directory = new_directory.map_or(Ok(()), |directory| grant(directory, 0o710));
            let granted = directory.and_then(|()| grant(path, mode | 0o060));
            granted.map_err(failed(
                "give admin_group access to the socket (the node's user must be a member)",
            ))?;
        } else {
            let permissions = fs::Permissions::from_mode(mode);
            fs::set_permissions(path, permissions)
                .map_err(failed("set the socket's permissions"))?;
        }
        Ok((listener, Self { path: path.to_owned(), lock_path, _lock: lock }))
    }
}

/// Makes a listening socket whose file has the mode 0600 from the start.
///
/// Linux gives the file the mode of the socket itself. The umask is no alternative: all threads of
/// the process share it, so files made meanwhile would get the wrong mode, and two sockets made at
/// the same time could leave it changed.
fn bind_private(path: &Path) -> io::Result<UnixListener> {
    let socket =
        net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    net::listen(&socket, BACKLOG)?;
    Ok(UnixListener::from(socket))
}

/// Locks a lock file; nothing if another node has the lock.
fn lock(path: &Path) -> io::Result<Option<LockedFile>> {
    for _ in 0..LOCK_ATTEMPTS {
        let Ok(lock) = LockedFile::try_lock(open_lock(path)?)? else { break };
        // Otherwise a node that ends has removed this file, and a new node would lock another one.
        if lock.is_at(path)? {
            return Ok(Some(lock));
        }
    }
    Ok(None)
}

fn open_lock(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).write(true).mode(0o600);
    // Without NONBLOCK, opening a named pipe would wait for its other end.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    options.custom_flags(flags.bits().cast_signed()).open(path)
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        for path in [&self.path, &self.lock_path] {
            if let Err(error) = fs::remove_file(path) {
                tracing::debug!(path = %path.display(), %error, "cannot remove a socket file");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn a_stale_socket_is_replaced_and_a_served_one_is_an_error() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("deep/cascade.sock");
        let (listener, file) = SocketFile::listen(&path, 0o600, None).expect("the path is free");
        let mode = fs::metadata(&path).expect("the socket exists").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let error = SocketFile::listen(&path, 0o600, None).expect_err("it is served");
        assert!(matches!(error, NodeError::Place { .. }), "{error}");
        drop((listener, file));
        assert!(!path.exists());
        drop(UnixListener::bind(&path).expect("the path is free again"));
        SocketFile::listen(&path, 0o660, None).expect("the socket is stale");
    }

    /// A node could lock a file that its last owner had just removed. Another node then locked a
    /// new file of that name, and both served the path.
    #[test]
    fn of_nodes_that_come_and_go_one_at_a_time_has_the_lock() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("cascade.sock");
        let (holders, taken) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let Ok(Some(lock)) = lock(&path) else { continue };
                        assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0, "it has two owners");
                        std::thread::yield_now();
                        holders.fetch_sub(1, Ordering::SeqCst);
                        taken.fetch_add(1, Ordering::SeqCst);
                        fs::remove_file(&path).expect("its owner removes it");
                        drop(lock);
                    }
                });
            }
        });
        assert!(taken.into_inner() > 0);
    }

    /// The umask was changed around each bind. Two binds at the same time could leave it at 0177,
    /// and every directory that the process made from then on was unusable.
    #[test]
    fn sockets_made_at_the_same_time_do_not_change_the_modes_of_other_files() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let make = |name: String| {
            let path = directory.path().join(name);
            fs::create_dir(&path).expect("a directory");
            fs::metadata(&path).expect("its metadata").permissions().mode()
        };
        let before = make("before".into());
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let path = directory.path().join(format!("{thread}.sock"));
                scope.spawn(move || {
                    for _ in 0..200 {
                        drop(SocketFile::listen(&path, 0o600, None).expect("the path is free"));
                    }
                });
            }
            for number in 0..200 {
                assert_eq!(make(format!("during-{number}")), before);
            }
        });
        assert_eq!(make("after".into()), before);
    }

    #[test]
    fn a_socket_is_its_owners_alone_from_the_start() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("cascade.sock");
        let _listener = bind_private(&path).expect("the path is free");
        let mode = fs::metadata(&path).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
