//! File operations that are not transfers: creating, listing, renaming, removing.

use std::fmt;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, FlockOperation, OFlags, SeekFrom, fallocate, flock, seek};

use crate::format::PAGE_BYTES;

/// Bytes overwritten per call.
const OVERWRITE_BYTES: usize = 1 << 20;
/// Maximum number of files that are set aside for one name.
const SET_ASIDE_MAX: u32 = 100;

/// How a file is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpenMode {
    /// For reading.
    Read,
    /// A new file, for reading and writing. An error if it exists.
    Create {
        /// Bytes to allocate immediately.
        allocate_bytes: u64,
    },
    /// An existing file, for reading and writing.
    Write,
    /// An existing or a new file, for reading and writing. Existing content is kept.
    WriteOrCreate,
}

/// The file operations that the file tier needs beside transfers. [`super::fault`] replaces them to
/// inject faults.
pub trait FileOperations: Send + Sync + fmt::Debug {
    /// Opens a file. With `direct` it bypasses the page cache, and fails with `InvalidInput` if the
    /// file system does not support that. A directory fails with `IsADirectory`.
    fn open(&self, path: &Path, mode: OpenMode, direct: bool) -> io::Result<File>;

    /// Sets the length of a file; an extension reads as zeroes.
    fn truncate(&self, file: &File, bytes: u64) -> io::Result<()>;

    /// Returns the metadata of the file that a path leads to.
    fn metadata(&self, path: &Path) -> io::Result<Metadata>;

    /// Returns the metadata of an open file.
    fn file_metadata(&self, file: &File) -> io::Result<Metadata>;

    /// Returns the length of a file.
    fn length(&self, file: &File) -> io::Result<u64> {
        Ok(self.file_metadata(file)?.len())
    }

    /// Takes the exclusive lock of a file, which the kernel releases when the file is closed.
    /// Returns `WouldBlock` if another process holds it.
    fn try_lock(&self, file: &File) -> io::Result<()>;

    /// Reads up to the end of the buffer or of the file. Returns the number of bytes read.
    fn read(&self, file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<usize>;

    /// Writes all bytes to a file.
    fn write(&self, file: &File, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Syncs the data of a file to stable storage.
    fn sync(&self, file: &File) -> io::Result<()>;

    /// Returns the first offset at or after `offset` that may contain data, or `None` if only a
    /// hole follows.
    fn next_data(&self, file: &File, offset: u64) -> io::Result<Option<u64>>;

    /// Replaces a file atomically: writes a temporary file, syncs it and renames it.
    fn replace(&self, path: &Path, bytes: &[u8]) -> io::Result<()>;

    /// Renames a file within its file system and replaces an existing one.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Overwrites all data of a file with zeroes and syncs it. Returns the number of bytes
    /// overwritten.
    fn overwrite(&self, path: &Path) -> io::Result<u64>;

    /// Renames whatever has this name to `<name>.set-aside-<n>`, so that the name is free and
    /// nothing is lost. Returns the new path.
    fn set_aside(&self, path: &Path) -> io::Result<PathBuf>;

    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Creates a directory and its parents, accessible to this user alone. Succeeds if it exists.
    fn make_directory(&self, path: &Path) -> io::Result<()>;

    /// Syncs creations, renames and removals in a directory to stable storage.
    fn sync_directory(&self, path: &Path) -> io::Result<()>;

    /// Lists a directory.
    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>>;
}

/// The file systems of this machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemFiles;

impl FileOperations for SystemFiles {
    fn open(&self, path: &Path, mode: OpenMode, direct: bool) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).mode(0o600);
        match mode {
            OpenMode::Read => {}
            OpenMode::Create { .. } => drop(options.write(true).create_new(true)),
            OpenMode::Write => drop(options.write(true)),
            OpenMode::WriteOrCreate => drop(options.write(true).create(true).truncate(false)),
        }
        if direct {
            options.custom_flags(OFlags::DIRECT.bits().cast_signed());
        }
        let file = match options.open(path) {
            // Opening a directory with `O_DIRECT` fails with the same error.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput && path.is_dir() => {
                return Err(io::ErrorKind::IsADirectory.into());
            }
            opened => opened?,
        };
        // Opening a directory for reading succeeds.
        if self.file_metadata(&file)?.is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        if let OpenMode::Create { allocate_bytes } = mode {
            allocate(path, &file, allocate_bytes)?;
        }
        Ok(file)
    }

    fn truncate(&self, file: &File, bytes: u64) -> io::Result<()> {
        file.set_len(bytes)
    }

    fn metadata(&self, path: &Path) -> io::Result<Metadata> {
        fs::metadata(path)
    }

    fn file_metadata(&self, file: &File) -> io::Result<Metadata> {
        file.metadata()
    }

    fn try_lock(&self, file: &File) -> io::Result<()> {
        Ok(flock(file, FlockOperation::NonBlockingLockExclusive)?)
    }

    fn read(&self, file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
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

    fn write(&self, file: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
        file.write_all_at(bytes, offset)
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        file.sync_data()
    }

    fn next_data(&self, file: &File, offset: u64) -> io::Result<Option<u64>> {
        match seek(file, SeekFrom::Data(offset)) {
            Ok(at) => Ok(Some(at / PAGE_BYTES as u64 * PAGE_BYTES as u64)),
            // Only a hole follows.
            Err(rustix::io::Errno::NXIO) => Ok(None),
            // The file system does not report holes, so all of it may be data.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => Ok(Some(offset)),
            Err(error) => Err(error.into()),
        }
    }

    fn replace(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let mut name = path.as_os_str().to_owned();
        name.push(".tmp");
        let temporary = PathBuf::from(name);
        let create = || {
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(true).mode(0o600).open(&temporary)
        };
        let mut file =
            create().or_else(|error| retry_after_set_aside(*self, &temporary, error, create))?;
        // The order matters: synced before the rename, so that after a crash the file under the
        // name is complete. The directory last, so that the rename lasts.
        file.write_all(bytes)?;
        file.sync_all()?;
        self.rename(&temporary, path)?;
        path.parent().map_or(Ok(()), |directory| self.sync_directory(directory))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let rename = || fs::rename(from, to);
        rename().or_else(|error| retry_after_set_aside(*self, to, error, rename))
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
        let file = OpenOptions::new().write(true).open(path)?;
        let length = self.length(&file)?;
        let zeroes = vec![0; OVERWRITE_BYTES];
        let (mut at, mut overwritten) = (0, 0);
        // Always forward: `next_data` rounds down to a page, and a file system with smaller blocks
        // has holes inside a page.
        let next = |at| Ok::<_, io::Error>(self.next_data(&file, at)?.map(|start| start.max(at)));
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

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        fs::read_dir(path)?.map(|entry| Ok(entry?.path())).collect()
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
        made => made,
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
