//! A pool's files: the pool under a name that outlives the process, and the table beside it.
//!
//! The table is locked for as long as anything of the pool is in use; it never leaves the process,
//! so a client that holds the pool's file cannot keep the lock of a store that died. A pool that
//! cannot be used any more is not emptied but replaced: whoever still maps the old file keeps it.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{
    FallocateFlags, FlockOperation, Mode, OFlags, fallocate, flock, fstatvfs, ftruncate, open,
};
use rustix::process::geteuid;

use crate::{MemoryError, SharedWords};

/// How often another opener may remove the files between our looking and our locking.
const TRIES_MAX: usize = 16;

/// A file that is locked until this goes. Unlocked by word, not only by closing: a child that is
/// being started has a copy of the descriptor for a moment.
#[derive(Debug)]
pub(crate) struct LockedFile(File);

impl Drop for LockedFile {
    fn drop(&mut self) {
        let unlocked = flock(&self.0, FlockOperation::Unlock);
        debug_assert!(unlocked.is_ok(), "unlocking our own lock");
    }
}

/// The two files of a pool that outlives its process, opened and locked by this store alone.
#[derive(Debug)]
pub struct PoolFiles {
    pool_path: PathBuf,
    table_path: PathBuf,
    pool: File,
    table: Arc<LockedFile>,
    words: SharedWords,
    pool_bytes: usize,
    is_kept: bool,
}

impl PoolFiles {
    /// Opens both files, or makes them; either way they are reserved in full afterwards, so that a
    /// full file system is an error here and not a signal later. Sizes are multiples of 4096.
    ///
    /// # Errors
    /// Another store has the files; they belong to another user, can be written by others or are
    /// no plain files; the file system is full or refuses.
    pub fn open(path: &Path, pool_bytes: usize, table_bytes: usize) -> Result<Self, MemoryError> {
        let table_path = table_path(path);
        let table = open_locked(&table_path)?;
        let table_fits = size_of(&table.0, &table_path)? == table_bytes as u64;
        if !table_fits {
            reserve_anew(&table.0, &table_path, table_bytes)?;
        }
        let kept = if table_fits { open_existing(path, pool_bytes)? } else { None };
        let is_kept = kept.is_some();
        if table_fits && !is_kept {
            // Before there is another pool that it does not speak of.
            reserve_anew(&table.0, &table_path, table_bytes)?;
        }
        let pool = kept.map_or_else(|| make_pool(path, pool_bytes), Ok)?;
        let words = map_words(&table.0, &table_path, table_bytes)?;
        let pool_path = path.to_owned();
        Ok(Self { pool_path, table_path, pool, table: Arc::new(table), words, pool_bytes, is_kept })
    }

    /// Whether both files were there, in the sizes that were asked for.
    pub fn is_kept(&self) -> bool {
        self.is_kept
    }

    /// The table. All zero where the files are new.
    pub fn words(&self) -> &SharedWords {
        &self.words
    }

    /// Device and inode of the pool's file: a table speaks of one file, not of a name.
    ///
    /// # Errors
    /// The file system does not say.
    pub fn pool_identity(&self) -> Result<[u64; 2], MemoryError> {
        let failed = |source| named("look at", &self.pool_path, source);
        let metadata = self.pool.metadata().map_err(failed)?;
        Ok([metadata.dev(), metadata.ino()])
    }

    /// Discards what is in both files: the table is zero afterwards, the pool another file.
    ///
    /// # Errors
    /// As [`PoolFiles::open`].
    pub fn renew(&mut self) -> Result<(), MemoryError> {
        self.words.zero();
        self.is_kept = false;
        self.pool = make_pool(&self.pool_path, self.pool_bytes)?;
        Ok(())
    }

    /// Removes the files of that name, if they are there and nobody has them.
    ///
    /// # Errors
    /// As [`PoolFiles::open`].
    pub fn discard(path: &Path) -> Result<(), MemoryError> {
        let table_path = table_path(path);
        // Without the lock another store could be opening them.
        let _locked = open_locked(&table_path)?;
        remove_if_there(path)?;
        remove_if_there(&table_path)
    }

    /// Takes the names away. Mappings stay as they are until they go.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn remove(&self) -> Result<(), MemoryError> {
        // The pool first: a table without a pool is discarded, a pool without one leaks nothing
        // either, but takes the memory until the next start.
        for path in [&self.pool_path, &self.table_path] {
            remove_if_there(path)?;
        }
        Ok(())
    }

    pub(crate) fn pool(&self) -> &File {
        &self.pool
    }

    pub(crate) fn lock(&self) -> Arc<LockedFile> {
        Arc::clone(&self.table)
    }

    pub(crate) fn pool_bytes(&self) -> usize {
        self.pool_bytes
    }
}

fn table_path(pool: &Path) -> PathBuf {
    let mut name = OsString::from(pool);
    name.push(".ledger");
    name.into()
}

fn named(operation: &'static str, path: &Path, source: io::Error) -> MemoryError {
    MemoryError::Named { operation, path: path.to_owned(), source }
}

fn size_of(file: &File, path: &Path) -> Result<u64, MemoryError> {
    Ok(file.metadata().map_err(|source| named("look at", path, source))?.len())
}

/// Nobody else may have read or written what we are about to trust.
fn check_ours(file: &File, path: &Path) -> Result<(), MemoryError> {
    let metadata = file.metadata().map_err(|source| named("look at", path, source))?;
    let reason = if !metadata.is_file() {
        "it is not a plain file"
    } else if metadata.uid() != geteuid().as_raw() {
        "it belongs to another user"
    } else if metadata.mode() & 0o077 != 0 {
        "others than its owner have rights to it"
    } else if metadata.nlink() > 1 {
        "it has another name"
    } else {
        return Ok(());
    };
    Err(MemoryError::NotOurs { path: path.to_owned(), reason })
}

fn open_file(path: &Path, flags: OFlags) -> io::Result<File> {
    // Without NONBLOCK, opening a pipe that somebody put there would wait for its other end.
    let flags = flags | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    Ok(open(path, flags, Mode::RUSR | Mode::WUSR)?.into())
}

/// The lock counts only if the name still means the file that was locked.
fn open_locked(path: &Path) -> Result<LockedFile, MemoryError> {
    for _ in 0..TRIES_MAX {
        let file = open_file(path, OFlags::CREATE).map_err(|e| named("open", path, e))?;
        check_ours(&file, path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(MemoryError::InUse { path: path.to_owned() });
            }
            Err(error) => return Err(named("lock", path, error.into())),
        }
        let file = LockedFile(file);
        let locked = file.0.metadata().map_err(|source| named("look at", path, source))?;
        let is_same = |now: fs::Metadata| now.ino() == locked.ino() && now.dev() == locked.dev();
        if fs::symlink_metadata(path).is_ok_and(is_same) {
            return Ok(file);
        }
    }
    Err(MemoryError::InUse { path: path.to_owned() })
}

/// The pool of an earlier run, if it is there in that size.
fn open_existing(path: &Path, bytes: usize) -> Result<Option<File>, MemoryError> {
    let file = match open_file(path, OFlags::empty()) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(named("open", path, error)),
    };
    check_ours(&file, path)?;
    if size_of(&file, path)? != bytes as u64 {
        return Ok(None);
    }
    // It was reserved when it was made; again in case somebody has punched a hole.
    reserve(&file, path, bytes)?;
    Ok(Some(file))
}

fn make_pool(path: &Path, bytes: usize) -> Result<File, MemoryError> {
    match open_file(path, OFlags::empty()) {
        Ok(file) => check_ours(&file, path)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(named("open", path, error)),
    }
    remove_if_there(path)?;
    let flags = OFlags::CREATE | OFlags::EXCL;
    let file = open_file(path, flags).map_err(|source| named("make", path, source))?;
    if let Err(error) = size(&file, path, bytes) {
        // What could not be reserved is not left behind to fill the file system.
        remove_if_there(path)?;
        return Err(error);
    }
    Ok(file)
}

/// Gives a new pool its length. Its memory is reserved once it is mapped: huge pages first, which
/// the kernel would otherwise have to copy together from small ones, at a third of the speed.
fn size(file: &File, path: &Path, bytes: usize) -> Result<(), MemoryError> {
    let room = fstatvfs(file).map_err(|error| named("look at", path, error.into()))?;
    let free = room.f_bavail.saturating_mul(room.f_frsize);
    // A file system without a limit of its own says that it has no blocks.
    if room.f_blocks > 0 && free < bytes as u64 {
        let source = rustix::io::Errno::NOSPC.into();
        return Err(MemoryError::NotReserved { path: path.to_owned(), bytes, source });
    }
    ftruncate(file, bytes as u64).map_err(|error| named("size", path, error.into()))
}

fn reserve_anew(file: &File, path: &Path, bytes: usize) -> Result<(), MemoryError> {
    // Nobody else maps the table, so it may shrink.
    ftruncate(file, 0).map_err(|error| named("empty", path, error.into()))?;
    reserve(file, path, bytes)
}

fn reserve(file: &File, path: &Path, bytes: usize) -> Result<(), MemoryError> {
    fallocate(file, FallocateFlags::empty(), 0, bytes as u64).map_err(|error| {
        MemoryError::NotReserved { path: path.to_owned(), bytes, source: error.into() }
    })
}

fn map_words(file: &File, path: &Path, bytes: usize) -> Result<SharedWords, MemoryError> {
    SharedWords::map(file, bytes).map_err(|source| named("map", path, source))
}

fn remove_if_there(path: &Path) -> Result<(), MemoryError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(named("remove", path, error)),
        _ => Ok(()),
    }
}
