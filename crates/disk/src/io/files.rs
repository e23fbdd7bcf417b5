//! Everything about files that is not a transfer: making, finding, renaming, removing them.

use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, OFlags, SeekFrom, fallocate, seek};

use crate::format::PAGE_BYTES;

/// What is overwritten in one call.
const OVERWRITE_BYTES: usize = 1 << 20;
/// So many things that lie under one name are kept beside it.
const SET_ASIDE_MAX: u32 = 100;

/// What an opened file is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpenMode {
    /// To be read.
    Read,
    /// A new file, to be written and read; an error when it exists.
    Create {
        /// Bytes to set aside at once.
        allocate_bytes: u64,
    },
    /// An existing file, to be written and read.
    Write,
}

/// What the file tier asks of a file system, beside transfers. A fake one makes disks fail.
pub trait FileOperations: Send + Sync + fmt::Debug {
    /// Opens a file; with `direct`, past the page cache, or fails with `InvalidInput`. A
    /// directory fails with `IsADirectory`.
    fn open(&self, path: &Path, mode: OpenMode, direct: bool) -> io::Result<File>;

    /// Cuts a file, or makes it longer with zeroes.
    fn truncate(&self, file: &File, bytes: u64) -> io::Result<()>;

    /// Length of a file.
    fn length(&self, file: &File) -> io::Result<u64>;

    /// Reads up to the end of the buffer or of the file; how many bytes there were.
    fn read(&self, file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<usize>;

    /// The first byte at or after `offset` that was ever written, as far as the system knows.
    fn next_data(&self, file: &File, offset: u64) -> io::Result<Option<u64>>;

    /// Writes a file under another name, syncs it, and renames it: there is all of it or nothing.
    fn replace(&self, path: &Path, bytes: &[u8]) -> io::Result<()>;

    /// Renames a file within its file system, over an existing one.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Writes zeroes over all of a file that was ever written, and syncs it; how many bytes.
    fn overwrite(&self, path: &Path) -> io::Result<u64>;

    /// Renames what lies under a name, so that the name is free. Nothing is lost by it.
    fn set_aside(&self, path: &Path) -> io::Result<PathBuf>;

    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Makes a directory and those above it, for this user alone; fine when it exists.
    fn make_directory(&self, path: &Path) -> io::Result<()>;

    /// Brings creations, renames and removals in a directory to stable storage.
    fn sync_directory(&self, path: &Path) -> io::Result<()>;

    /// What is in a directory.
    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>>;
}

/// The machine's file systems.
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
        }
        if direct {
            options.custom_flags(OFlags::DIRECT.bits().cast_signed());
        }
        let file = match options.open(path) {
            // Directories take no `O_DIRECT` either.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput && path.is_dir() => {
                return Err(io::ErrorKind::IsADirectory.into());
            }
            opened => opened?,
        };
        if file.metadata()?.is_dir() {
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

    fn length(&self, file: &File) -> io::Result<u64> {
        Ok(file.metadata()?.len())
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

    fn next_data(&self, file: &File, offset: u64) -> io::Result<Option<u64>> {
        match seek(file, SeekFrom::Data(offset)) {
            Ok(at) => Ok(Some(at / PAGE_BYTES as u64 * PAGE_BYTES as u64)),
            Err(rustix::io::Errno::NXIO) => Ok(None),
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
        let length = file.metadata()?.len();
        let zeroes = vec![0; OVERWRITE_BYTES];
        let (mut at, mut overwritten) = (0, 0);
        while let Some(start) = self.next_data(&file, at)?.filter(|start| *start < length) {
            let end = match seek(&file, SeekFrom::Hole(start)) {
                Ok(hole) if hole > start => hole.min(length),
                // No holes are known of: all of it is data.
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

/// Tries again once a directory no longer lies where a file belongs.
fn retry_after_set_aside<T>(
    files: SystemFiles,
    path: &Path,
    error: io::Error,
    again: impl FnOnce() -> io::Result<T>,
) -> io::Result<T> {
    if error.kind() != io::ErrorKind::IsADirectory {
        return Err(error);
    }
    files.set_aside(path)?;
    again()
}

/// Makes a directory of the tier's own below its directory. What lies under its name and is no
/// directory is set aside.
pub(crate) fn make_tier_directory(files: &dyn FileOperations, path: &Path) -> io::Result<()> {
    match files.make_directory(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            files.set_aside(path)?;
            files.make_directory(path)
        }
        made => made,
    }
}

/// Sets space aside, so that a full disk shows now and a direct write need not move the end.
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
        // Best effort: an empty file left behind is found and removed at the next open.
        let removed = fs::remove_file(path);
        drop(removed);
    }
    allocated
}
