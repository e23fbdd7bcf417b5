//! The lock of a writer's name in a directory: exclusive, and released when its process ends.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cascade_runtime::Deadline;
use rustix::process::{Pid, test_kill_process};

use crate::io::{FileIo, FileOperations, OpenMode};
use crate::{DiskError, FileTierConfig, WriterName};

/// After a `kill -9` the kernel may release the lock only after the process is gone, because it
/// first completes `io_uring` operations in flight. An opening waits up to ten seconds for the lock
/// of a dead process.
const DEAD_OWNER_RETRIES: u32 = 1000;
/// A process that forks shares its open files with the child until the child's `exec`. A lock that
/// was just released may therefore be held for a moment under the ID of a living process.
const LIVING_OWNER_RETRIES: u32 = 50;
const RETRY_PAUSE: Duration = Duration::from_millis(10);
/// Maximum length of a process ID as text, with the end of its line.
const PID_BYTES_MAX: usize = 16;

/// A writer's lock, held as long as this value lives. The kernel releases it when the process dies.
#[derive(Debug)]
pub(crate) struct DirectoryLock {
    directory: PathBuf,
    writer: WriterName,
    /// Identity of the directory that was opened: another directory may be mounted or renamed over
    /// its path later.
    opened: FileIdentity,
    /// Permissions of the directory at opening.
    mode: u32,
    lock_file: Mutex<LockFile>,
}

/// The open lock file.
#[derive(Debug)]
struct LockFile {
    _file: File,
    identity: FileIdentity,
}

/// Identity of a file, independent of its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileIdentity {
    device: u64,
    inode: u64,
}

impl FileIdentity {
    fn of(found: &Metadata) -> Self {
        Self { device: found.dev(), inode: found.ino() }
    }
}

impl DirectoryLock {
    /// Creates the directory if it is missing and takes the lock of the writer.
    pub(crate) fn acquire(
        io: &FileIo,
        config: &FileTierConfig,
        deadline: Deadline,
    ) -> Result<Arc<Self>, DiskError> {
        let (directory, writer) = (config.directory.clone(), config.writer.clone());
        io.call("lock", &config.directory, deadline, move |files| {
            files.make_directory(&directory)?;
            let found = files.metadata(&directory)?;
            Ok(lock_writer(files, &directory, &writer).map(|lock_file| {
                let (opened, mode) = (FileIdentity::of(&found), found.mode());
                Arc::new(Self { directory, writer, opened, mode, lock_file: Mutex::new(lock_file) })
            }))
        })?
    }

    /// A problem of the directory's permissions at opening, if there is one.
    pub(crate) fn permission_problem(&self) -> Option<String> {
        let (path, mode) = (self.directory.display(), self.mode & 0o777);
        (mode & 0o077 != 0)
            .then(|| format!("{path} is open to other users (mode {mode:04o}); chmod 700 {path}"))
    }

    /// Returns an error if the path no longer leads to the directory that was opened. May hang.
    pub(crate) fn check_directory(&self, files: &dyn FileOperations) -> io::Result<()> {
        if FileIdentity::of(&files.metadata(&self.directory)?) == self.opened {
            return Ok(());
        }
        Err(io::Error::other(
            "not the directory that was opened; check that its file system is still mounted",
        ))
    }

    /// [`Self::check_directory`], and a check that the lock is still held. A removed lock file is
    /// created and locked again: without it another process could take the writer's name.
    pub(crate) fn check_or_relock(&self, files: &dyn FileOperations) -> io::Result<()> {
        self.check_directory(files)?;
        let path = lock_path(&self.directory, &self.writer);
        let mut lock_file = self.lock_file.lock().unwrap_or_else(PoisonError::into_inner);
        match files.metadata(&path) {
            Ok(found) if FileIdentity::of(&found) == lock_file.identity => return Ok(()),
            // `lock_writer` sets the directory aside.
            Ok(found) if found.is_dir() => {}
            Ok(_) => {
                return Err(io::Error::other(format!(
                    "{} was replaced, so this process no longer holds the lock; another process \
                     may write to the directory",
                    path.display()
                )));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        *lock_file = lock_writer(files, &self.directory, &self.writer).map_err(io::Error::other)?;
        Ok(())
    }
}

fn lock_path(directory: &Path, writer: &WriterName) -> PathBuf {
    directory.join(format!("{writer}.lock"))
}

/// Takes the lock of a writer. The error names the process that holds it.
fn lock_writer(
    files: &dyn FileOperations,
    directory: &Path,
    writer: &WriterName,
) -> Result<LockFile, DiskError> {
    let path = lock_path(directory, writer);
    let failed = |source| DiskError::from_io("lock", &path, source);
    // Not truncated before it is locked: the file names the process that holds the lock.
    let open = || files.open(&path, OpenMode::WriteOrCreate, false);
    let opened = match open() {
        Err(error) if error.kind() == io::ErrorKind::IsADirectory => {
            files.set_aside(&path).and_then(|_| open())
        }
        opened => opened,
    };
    let file = opened.map_err(failed)?;
    let mut retries = 0;
    loop {
        match files.try_lock(&file) {
            Ok(()) => break,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                // Read in each round, because another process may have taken the lock meanwhile.
                let pid = lock_owner_pid(files, &file);
                let is_living = pid.is_none_or(is_alive);
                let limit = if is_living { LIVING_OWNER_RETRIES } else { DEAD_OWNER_RETRIES };
                if retries >= limit {
                    return Err(DiskError::Locked { path, pid });
                }
                retries += 1;
                std::thread::park_timeout(RETRY_PAUSE);
            }
            Err(error) => return Err(failed(error)),
        }
    }
    // Only the holder of the lock gets here, so the file names the holder.
    let pid = format!("{}\n", std::process::id());
    files
        .truncate(&file, 0)
        .and_then(|()| files.write(&file, 0, pid.as_bytes()))
        .map_err(failed)?;
    let identity = FileIdentity::of(&files.file_metadata(&file).map_err(failed)?);
    Ok(LockFile { _file: file, identity })
}

/// The process that the lock file names, if the file can be read.
fn lock_owner_pid(files: &dyn FileOperations, file: &File) -> Option<u32> {
    let mut text = [0; PID_BYTES_MAX];
    let read = files.read(file, 0, &mut text).ok()?;
    std::str::from_utf8(&text[..read]).ok()?.trim().parse().ok()
}

fn is_alive(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    // Every other error, such as `EPERM`, means that the process exists.
    pid.is_none_or(|pid| test_kill_process(pid) != Err(rustix::io::Errno::SRCH))
}
