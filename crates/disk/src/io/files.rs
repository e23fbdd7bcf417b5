//! File operations that are not transfers: creating, listing, replacing, removing.

mod own_file;
mod system_lock;

use std::fmt;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, OFlags, SeekFrom, fallocate, seek};

use super::FileHandle;
use crate::format::PAGE_BYTES;
pub(crate) use own_file::is_not_own;

/// Bytes overwritten per call.
const OVERWRITE_BYTES: usize = 1 << 20;
/// Distinguishes the temporary files of this process.
static TEMPORARY: AtomicU64 = AtomicU64::new(0);
/// Maximum number of files that are set aside for one name.
const SET_ASIDE_MAX: u32 = 100;

/// How a file is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpenMode {
    /// An existing file, for reading.
    Read,
    /// A new file, for reading and writing. An error if it exists.
    Create {
        /// Bytes to allocate immediately. They read as zeroes.
        allocate_bytes: u64,
    },
    /// An existing file, for reading and writing.
    Write,
}

/// Identity of a file or a directory, independent of its path. Two that exist at the same time have
/// different ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileIdentity {
    /// The file system.
    pub device: u64,
    /// The file in it.
    pub inode: u64,
}

/// An exclusive lock, held until this value is dropped or the process ends.
pub trait HeldLock: Send + Sync + fmt::Debug {
    /// Whether the path of the lock still leads to what is locked.
    ///
    /// False if nothing has the path any longer, or a directory has it. The caller then locks the
    /// path again, which succeeds even while this value lives, and drops this value after that.
    ///
    /// # Errors
    /// If another file has the path, since another process may hold a lock of that one, and if the
    /// path cannot be checked. The probe of the tier then fails.
    fn is_current(&self) -> io::Result<bool>;
}

/// Why a lock was refused: another process holds it. This is the inner error of the `WouldBlock`
/// that [`FileOperations::lock_file`] returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("another process holds the lock")]
pub struct LockedBy {
    /// The ID of that process, if it is known.
    pub pid: Option<u32>,
}

impl LockedBy {
    /// The holder of the lock, if `error` is a refused lock.
    pub fn of(error: &io::Error) -> Option<Self> {
        let inner = error.get_ref().and_then(|inner| inner.downcast_ref().copied());
        let is_refused = error.kind() == io::ErrorKind::WouldBlock;
        inner.or(is_refused.then_some(Self { pid: None }))
    }
}

impl From<LockedBy> for io::Error {
    fn from(holder: LockedBy) -> Self {
        Self::new(io::ErrorKind::WouldBlock, holder)
    }
}

/// The file operations that the file tier needs beside transfers, which are the part of a
/// [`super::TransferEngine`].
///
/// [`SystemFiles`] implements them for the file systems of this machine, [`super::fault`] injects
/// faults into any other implementation, and a simulator has one of its own. The two sides of a
/// [`super::FileIo`] belong together: its engine gets the [`FileHandle`]s that its file operations
/// opened.
///
/// What every implementation has to keep to:
/// - Calls come from several threads at once, on the worker threads of [`super::FileIo`]. A call
///   may block for as long as it likes: its caller stops waiting at a deadline of its own, and the
///   call then has its effect late.
/// - Effects are visible to all later calls and transfers at once, and after a crash of the process
///   too. After a power failure only that is certain which a `sync_directory`, a
///   [`super::TransferKind::Sync`] or one of the methods that say so has put on stable storage.
/// - The kind of an error decides what the file tier does. `NotFound`, `NotADirectory` and
///   `IsADirectory` concern one path; `AlreadyExists` a name that is taken; `StorageFull`,
///   `QuotaExceeded` and `FileTooLarge` space. `TimedOut` is a deadline that passed. Every other
///   kind is a failure of the device.
/// - A handle of another implementation is refused with `Unsupported`.
pub trait FileOperations: Send + Sync + fmt::Debug {
    /// Opens a file for this user alone. With `direct` it bypasses the page cache: offsets, lengths
    /// and addresses of its transfers are multiples of [`PAGE_BYTES`].
    ///
    /// # Errors
    /// `InvalidInput` if the file system does not support `direct`. `IsADirectory` for a directory,
    /// in every mode. `PermissionDenied`, and `is_not_own`, for a symbolic link and everything
    /// else that is not a regular file, and for a file to write that another user owns or that has
    /// another hard link. `AlreadyExists` if the file to create exists; a file that was created but
    /// whose bytes could not be allocated is removed again.
    fn open(&self, path: &Path, mode: OpenMode, direct: bool) -> io::Result<FileHandle>;

    /// Sets the length of a file; an extension reads as zeroes.
    fn truncate(&self, file: &FileHandle, bytes: u64) -> io::Result<()>;

    /// Returns the length of a file.
    fn length(&self, file: &FileHandle) -> io::Result<u64>;

    /// Whether an open file still has a name. Without one it is lost once its handle is dropped. An
    /// implementation whose files nobody but the tier removes keeps this default.
    fn has_name(&self, file: &FileHandle) -> io::Result<bool> {
        let _ = file;
        Ok(true)
    }

    /// Reads up to the end of the buffer or of the file. Returns the number of bytes read, which is
    /// less than the length of the buffer only at the end of the file.
    ///
    /// Files opened with `direct` are read from page boundaries into page-aligned buffers of whole
    /// pages.
    fn read(&self, file: &FileHandle, offset: u64, buffer: &mut [u8]) -> io::Result<usize>;

    /// Returns the first offset at or after `offset` that may contain data, or `None` if only a
    /// hole follows. An implementation that does not know returns `offset`, at the end of the file
    /// too.
    fn next_data(&self, file: &FileHandle, offset: u64) -> io::Result<Option<u64>>;

    /// Replaces a file atomically: writes a new temporary file `<path>.<unique>.tmp`, syncs it,
    /// renames it and syncs the directory. After a crash or a power failure the path has the old or
    /// the new content, never a part of it, also if other processes replace it at the same time. A
    /// directory with the name of the file is set aside.
    fn replace(&self, path: &Path, bytes: &[u8]) -> io::Result<()>;

    /// Overwrites all data of a file with zeroes and syncs it. Returns the number of bytes
    /// overwritten.
    ///
    /// # Errors
    /// As [`Self::open`] for a file to write: nothing of another file is overwritten.
    fn overwrite(&self, path: &Path) -> io::Result<u64>;

    /// Renames whatever has this name to `<name>.set-aside-<n>`, so that the name is free and
    /// nothing is lost. Returns the new path.
    fn set_aside(&self, path: &Path) -> io::Result<PathBuf>;

    /// Removes a file; fails with `IsADirectory` for a directory. Open handles of the file stay
    /// usable.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Creates a directory and its parents, accessible to this user alone. Succeeds if it exists,
    /// or if a symbolic link leads to one.
    ///
    /// # Errors
    /// `AlreadyExists` if something else has its name, `NotADirectory` if something else has a
    /// parent's.
    fn make_directory(&self, path: &Path) -> io::Result<()>;

    /// Returns the identity of the directory that a path leads to. It changes when another
    /// directory is mounted there or renamed to the path.
    fn directory_identity(&self, directory: &Path) -> io::Result<FileIdentity>;

    /// Returns the permission bits of a directory. If other users have any, the tier reports it as
    /// a problem. An implementation without users keeps this default: no other user has any.
    ///
    /// # Errors
    /// `PermissionDenied`, and `is_not_own`, for a directory of another user, and for one in
    /// which all users may create files.
    fn check_directory(&self, directory: &Path) -> io::Result<u32> {
        let _ = directory;
        Ok(0o700)
    }

    /// Checks that a path does not lead to another directory. An implementation without symbolic
    /// links keeps this default.
    ///
    /// # Errors
    /// `PermissionDenied`, and `is_not_own`, for a symbolic link; `NotFound` if there is nothing.
    fn check_not_link(&self, path: &Path) -> io::Result<()> {
        let _ = path;
        Ok(())
    }

    /// Takes the exclusive lock of a path: no other process, and no other call in this process,
    /// gets it while the result lives. A file is created under the path if there is none. A
    /// directory with its name is set aside.
    ///
    /// Waits a while for a lock that another process is about to release, such as one that was
    /// killed.
    ///
    /// # Errors
    /// [`LockedBy`], which converts into an [`io::Error`] of the kind `WouldBlock`, if another
    /// holds the lock.
    fn lock_file(&self, path: &Path) -> io::Result<Box<dyn HeldLock>>;

    /// Syncs creations, renames and removals in a directory to stable storage.
    fn sync_directory(&self, path: &Path) -> io::Result<()>;

    /// Lists the paths of what is in a directory, in any order. Fails with `NotFound` if there is
    /// no such directory, and with `NotADirectory` for a file.
    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>>;
}

/// The file systems of this machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemFiles;

impl FileOperations for SystemFiles {
    fn open(&self, path: &Path, mode: OpenMode, direct: bool) -> io::Result<FileHandle> {
        let mut flags = match mode {
            OpenMode::Read => OFlags::RDONLY,
            OpenMode::Create { .. } => OFlags::RDWR | OFlags::CREATE | OFlags::EXCL,
            OpenMode::Write => OFlags::RDWR,
        };
        flags.set(OFlags::DIRECT, direct);
        let file = own_file::open(path, flags)?;
        if let OpenMode::Create { allocate_bytes } = mode {
            allocate(path, &file, allocate_bytes)?;
        }
        Ok(file.into())
    }

    fn truncate(&self, file: &FileHandle, bytes: u64) -> io::Result<()> {
        file.system()?.set_len(bytes)
    }

    fn length(&self, file: &FileHandle) -> io::Result<u64> {
        Ok(file.system()?.metadata()?.len())
    }

    fn has_name(&self, file: &FileHandle) -> io::Result<bool> {
        Ok(file.system()?.metadata()?.nlink() > 0)
    }

    fn read(&self, file: &FileHandle, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let file = file.system()?;
        let mut filled = 0;
        while filled < buffer.len() {
            match file.read_at(&mut buffer[filled..], offset + filled as u64) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(filled)
    }

    fn next_data(&self, file: &FileHandle, offset: u64) -> io::Result<Option<u64>> {
        next_data(file.system()?, offset)
    }

    fn replace(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let (temporary, mut file) = create_temporary(path)?;
        // The order matters: synced before the rename, so that after a crash the file under the
        // name is complete. The directory last, so that the rename lasts.
        let written = file.write_all(bytes).and_then(|()| file.sync_all());
        let rename = || fs::rename(&temporary, path);
        let renamed = written
            .and_then(|()| rename())
            .or_else(|error| retry_after_set_aside(*self, path, error, rename));
        if renamed.is_err() {
            // Best effort: the next opening removes what is left.
            let removed = fs::remove_file(&temporary);
            drop(removed);
        }
        renamed?;
        path.parent().map_or(Ok(()), |directory| self.sync_directory(directory))
    }

    fn set_aside(&self, path: &Path) -> io::Result<PathBuf> {
        for number in 0..SET_ASIDE_MAX {
            let mut name = path.as_os_str().to_owned();
            name.push(format!(".set-aside-{number}"));
            let target = PathBuf::from(name);
            match fs::symlink_metadata(&target) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return fs::rename(path, &target).map(|()| target);
                }
                Err(error) => return Err(error),
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }

    fn overwrite(&self, path: &Path) -> io::Result<u64> {
        let file = own_file::open(path, OFlags::WRONLY)?;
        let length = file.metadata()?.len();
        let zeroes = vec![0; OVERWRITE_BYTES];
        let (mut at, mut overwritten) = (0, 0);
        // Always forward: `next_data` rounds down to a page, and a file system with smaller blocks
        // has holes inside a page.
        let next = |at| Ok::<_, io::Error>(next_data(&file, at)?.map(|start| start.max(at)));
        while let Some(start) = next(at)?.filter(|start| *start < length) {
            let end = match seek(&file, SeekFrom::Hole(start)) {
                Ok(hole) if hole > start => hole.min(length),
                // The file system does not report holes: everything up to the end is data.
                Ok(_) | Err(_) => length,
            };
            at = start;
            while at < end {
                let step = usize::try_from(end - at)
                    .map_or(OVERWRITE_BYTES, |left| left.min(OVERWRITE_BYTES));
                file.write_all_at(&zeroes[..step], at)?;
                at += step as u64;
            }
            overwritten += end - start;
        }
        // Before the caller removes the file: zeroes that are not written by then may never be.
        file.sync_all()?;
        Ok(overwritten)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn make_directory(&self, path: &Path) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(path)
    }

    fn directory_identity(&self, directory: &Path) -> io::Result<FileIdentity> {
        Ok(system_lock::identity_of(&fs::metadata(directory)?))
    }

    fn check_directory(&self, directory: &Path) -> io::Result<u32> {
        own_file::check_directory(directory)
    }

    fn check_not_link(&self, path: &Path) -> io::Result<()> {
        own_file::check_not_link(path)
    }

    fn lock_file(&self, path: &Path) -> io::Result<Box<dyn HeldLock>> {
        system_lock::lock(path)
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        fs::read_dir(path)?.map(|entry| Ok(entry?.path())).collect()
    }
}

/// [`FileOperations::next_data`] of the system.
fn next_data(file: &File, offset: u64) -> io::Result<Option<u64>> {
    match seek(file, SeekFrom::Data(offset)) {
        Ok(at) => Ok(Some(at / PAGE_BYTES as u64 * PAGE_BYTES as u64)),
        // Only a hole follows.
        Err(rustix::io::Errno::NXIO) => Ok(None),
        // The file system does not report holes, so all of it may be data.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => Ok(Some(offset)),
        Err(error) => Err(error.into()),
    }
}

/// Reads a whole file. Returns `None` if it does not exist, and an error if it is longer than
/// `bytes_max`.
pub(crate) fn read_whole(
    files: &dyn FileOperations,
    path: &Path,
    bytes_max: u64,
) -> io::Result<Option<Vec<u8>>> {
    let file = match files.open(path, OpenMode::Read, false) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let length = files.length(&file)?;
    // Checked before memory of this length is allocated.
    if length > bytes_max {
        let why = format!("the file has {length} bytes; a valid one has at most {bytes_max}");
        return Err(io::Error::other(why));
    }
    let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    let read = files.read(&file, 0, &mut bytes)?;
    bytes.truncate(read);
    Ok(Some(bytes))
}

/// Retries an operation that failed because a directory has the file's name, after setting the
/// directory aside.
fn retry_after_set_aside<T>(
    files: SystemFiles,
    path: &Path,
    error: io::Error,
    retry: impl FnOnce() -> io::Result<T>,
) -> io::Result<T> {
    if error.kind() != io::ErrorKind::IsADirectory {
        return Err(error);
    }
    files.set_aside(path)?;
    retry()
}

/// Creates a directory of the tier's own below the tier's directory. If a file has its name, the
/// file is set aside.
pub(crate) fn make_tier_directory(files: &dyn FileOperations, path: &Path) -> io::Result<()> {
    match files.make_directory(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            files.set_aside(path)?;
            files.make_directory(path)
        }
        made => made.and_then(|()| files.check_not_link(path)),
    }
}

/// Creates a temporary file beside a file that it will replace. Another process that replaces the
/// same file has another one.
fn create_temporary(path: &Path) -> io::Result<(PathBuf, File)> {
    loop {
        // Relaxed: the number orders nothing else.
        let number = TEMPORARY.fetch_add(1, Ordering::Relaxed);
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{}-{number}.tmp", std::process::id()));
        let temporary = PathBuf::from(name);
        match own_file::open(&temporary, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL) {
            // Of a process on another host, or of one that was killed.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            opened => return Ok((temporary, opened?)),
        }
    }
}

/// Allocates the space of a file now. A full disk is thus detected before blocks are written, and
/// direct writes need not extend the file.
fn allocate(path: &Path, file: &File, bytes: u64) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let allocated = match fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Ok(()) => return Ok(()),
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => file.set_len(bytes),
        Err(error) => Err(error.into()),
    };
    if allocated.is_err() {
        // Best effort: the next opening finds and removes an empty file.
        let removed = fs::remove_file(path);
        drop(removed);
    }
    allocated
}
