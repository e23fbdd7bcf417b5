//! The lock of a writer's name in a directory: exclusive, and released when its process ends.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

use cascade_runtime::{Deadline, Mutex};

use crate::io::{FileIdentity, FileIo, FileOperations, HeldLock, LockedBy};
use crate::{DiskError, FilesConfig, WriterName};

/// A writer's lock, held as long as this value lives, and no longer than the process.
#[derive(Debug)]
pub(crate) struct DirectoryLock {
    directory: PathBuf,
    writer: WriterName,
    /// Identity of the directory that was opened: another directory may be mounted or renamed over
    /// its path later.
    opened: FileIdentity,
    /// Permissions of the directory at opening.
    mode: u32,
    held: Mutex<Box<dyn HeldLock>>,
}

impl DirectoryLock {
    /// Creates the directory if it is missing and takes the lock of the writer.
    pub(crate) fn acquire(
        io: &FileIo,
        config: &FilesConfig,
        deadline: Deadline,
    ) -> Result<Arc<Self>, DiskError> {
        let (directory, writer) = (config.directory.clone(), config.writer.clone());
        io.call("lock", &config.directory, deadline, move |files| {
            make_durable(files, &directory)?;
            let opened = files.directory_identity(&directory)?;
            let mode = files.check_directory(&directory)?;
            Ok(lock_writer(files, &directory, &writer).map(|held| {
                Arc::new(Self { directory, writer, opened, mode, held: Mutex::new(held) })
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
        if files.directory_identity(&self.directory)? == self.opened {
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
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if !held.is_current()? {
            // The old lock is dropped only now, so that there is no moment without a lock.
            *held = lock_writer(files, &self.directory, &self.writer).map_err(io::Error::other)?;
        }
        Ok(())
    }
}

/// Creates a directory and its parents unless they exist, and syncs the names that are new: a power
/// loss that removed one of them would remove all blocks.
fn make_durable(files: &dyn FileOperations, directory: &Path) -> io::Result<()> {
    let mut missing = Vec::new();
    for path in directory.ancestors().take_while(|path| path.file_name().is_some()) {
        match files.directory_identity(path) {
            Ok(_) => break,
            Err(error) if error.kind() == io::ErrorKind::NotFound => missing.push(path),
            Err(error) => return Err(error),
        }
    }
    files.make_directory(directory)?;
    for path in missing {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        files.sync_directory(parent.unwrap_or(Path::new(".")))?;
    }
    Ok(())
}

fn lock_path(directory: &Path, writer: &WriterName) -> PathBuf {
    directory.join(format!("{writer}.lock"))
}

/// Takes the lock of a writer. The error names the process that holds it.
fn lock_writer(
    files: &dyn FileOperations,
    directory: &Path,
    writer: &WriterName,
) -> Result<Box<dyn HeldLock>, DiskError> {
    let path = lock_path(directory, writer);
    files.lock_file(&path).map_err(|error| match LockedBy::of(&error) {
        Some(LockedBy { pid }) => DiskError::Locked { path, pid },
        None => DiskError::from_io("lock", &path, error),
    })
}
