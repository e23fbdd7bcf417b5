//! A pool's files: the pool under a name that outlives the process, and the table of its blocks.
//!
//! The table is locked for as long as any slab of the pool is in use. Its descriptor is never sent
//! to clients, so a client cannot keep the lock of a store that died. A pool that cannot be reused
//! is replaced, not emptied: processes that still map the old file keep its contents.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::fs::{
    FallocateFlags, Mode, OFlags, StatVfs, fallocate, fstatvfs, ftruncate, open, statfs, statvfs,
};
use rustix::process::geteuid;

use crate::available::available_here;
use crate::locked_file::LockedFile;
use crate::{MemoryError, SharedWords};

/// Maximum number of retries when another process removes a file between our open and our lock.
const LOCK_TRIES_MAX: usize = 16;

/// How long to wait for a lock. A process that lists the pools of a directory holds the lock of
/// each for a moment, which must not make a start fail.
const LOCK_TIMEOUT: Duration = Duration::from_millis(200);
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// `TMPFS_MAGIC`: files there are memory.
const TMPFS: u64 = 0x0102_1994;

/// Removes newly created files that hold no blocks, unless they are persisted.
#[derive(Debug)]
struct RemoveOnDrop {
    pool_path: PathBuf,
    table_path: PathBuf,
    removes_pool: AtomicBool,
    removes_table: AtomicBool,
}

impl RemoveOnDrop {
    fn of(pool_path: &Path, table_path: &Path) -> Self {
        let (pool_path, table_path) = (pool_path.to_owned(), table_path.to_owned());
        let [removes_pool, removes_table] = [false, false].map(AtomicBool::new);
        Self { pool_path, table_path, removes_pool, removes_table }
    }

    fn arm(&self, pool: bool, table: bool) {
        // Relaxed: the flags order nothing else.
        self.removes_pool.fetch_or(pool, Ordering::Relaxed);
        self.removes_table.fetch_or(table, Ordering::Relaxed);
    }

    fn persist(&self) {
        self.removes_pool.store(false, Ordering::Relaxed);
        self.removes_table.store(false, Ordering::Relaxed);
    }
}

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        // Errors are dropped: the error that ended the start is reported, and the next start
        // removes the remaining files.
        if *self.removes_pool.get_mut() {
            drop(remove_if_exists(&self.pool_path));
        }
        if *self.removes_table.get_mut() {
            drop(remove_if_exists(&self.table_path));
        }
    }
}

/// The two files of a pool that outlives its process, opened and locked exclusively. New files are
/// removed if this is dropped before [`PoolFiles::persist`].
#[derive(Debug)]
pub struct PoolFiles {
    /// Declared before `table`, so dropped first: the files are locked while they are removed.
    remove_on_drop: RemoveOnDrop,
    pool_path: PathBuf,
    table_path: PathBuf,
    pool: File,
    table: Arc<LockedFile>,
    words: SharedWords,
    pool_bytes: usize,
    is_reused: bool,
}

impl PoolFiles {
    /// Opens or creates both files and reserves their full size, so that a full file system is an
    /// error here and not SIGBUS later. Sizes are multiples of 4096.
    ///
    /// # Errors
    /// If another store uses the files; if they belong to another user, are accessible to others or
    /// are not regular files; if the memory or the file system has no room for both.
    pub fn open(path: &Path, pool_bytes: usize, table_bytes: usize) -> Result<Self, MemoryError> {
        let table_path = table_path(path);
        let table = open_locked(&table_path)?;
        let remove_on_drop = RemoveOnDrop::of(path, &table_path);
        let table_size = size_of(table.file(), &table_path)?;
        // An empty table was created just now, so it does not stay if the rest fails.
        remove_on_drop.arm(false, table_size == 0);
        // Before anything is reserved, and before an earlier pool of another size is removed.
        check_room(path, &table_path, pool_bytes, table_bytes)?;
        let table_fits = table_size == table_bytes as u64;
        let existing = if table_fits { open_existing(path, pool_bytes)? } else { None };
        let is_reused = existing.is_some();
        if !is_reused {
            // The table loses its entries now, so it does not stay if the rest fails.
            remove_on_drop.arm(false, true);
            // Clear the table before the new pool exists: its entries describe the old one.
            clear_and_reserve(table.file(), &table_path, table_bytes)?;
        }
        let pool = match existing {
            Some(pool) => pool,
            None => create_pool(path, pool_bytes, &remove_on_drop)?,
        };
        let words = map_words(table.file(), &table_path, table_bytes)?;
        let (pool_path, table) = (path.to_owned(), Arc::new(table));
        let files = Self {
            remove_on_drop,
            pool_path,
            table_path,
            pool,
            table,
            words,
            pool_bytes,
            is_reused,
        };
        Ok(files)
    }

    /// From now on the files outlive this value: they hold blocks.
    pub fn persist(&self) {
        self.remove_on_drop.persist();
    }

    /// Whether both files existed in the requested sizes and were reused.
    pub fn is_reused(&self) -> bool {
        self.is_reused
    }

    /// The table. All zero where the files are new.
    pub fn words(&self) -> &SharedWords {
        &self.words
    }

    /// Device and inode of the pool's file: the table describes this file, whatever its name.
    ///
    /// # Errors
    /// If the file system does not report them.
    pub fn pool_identity(&self) -> Result<[u64; 2], MemoryError> {
        let failed = |source| named("read the metadata of", &self.pool_path, source);
        let metadata = self.pool.metadata().map_err(failed)?;
        Ok([metadata.dev(), metadata.ino()])
    }

    /// Discards the contents of both files: zeroes the table and creates a new pool file.
    ///
    /// # Errors
    /// As [`PoolFiles::open`].
    pub fn recreate(&mut self) -> Result<(), MemoryError> {
        self.remove_on_drop.arm(false, true);
        // The table first: its entries describe the old pool.
        self.words.zero();
        self.is_reused = false;
        self.pool = create_pool(&self.pool_path, self.pool_bytes, &self.remove_on_drop)?;
        Ok(())
    }

    /// Removes the files of this name if they exist and no store uses them.
    ///
    /// # Errors
    /// As [`PoolFiles::open`].
    pub fn discard(path: &Path) -> Result<(), MemoryError> {
        let table_path = table_path(path);
        // Without the lock another store could be opening them.
        let _locked = open_locked(&table_path)?;
        remove_if_exists(path)?;
        remove_if_exists(&table_path)
    }

    /// Removes both files. Existing mappings keep their memory.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn remove(&self) -> Result<(), MemoryError> {
        // The pool first: a table alone is small, a pool alone would occupy its memory until the
        // next start. Each is discarded without the other.
        for path in [&self.pool_path, &self.table_path] {
            remove_if_exists(path)?;
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

/// The locked files of a pool that no store uses.
#[derive(Debug)]
pub struct IdlePoolFiles {
    pool_path: PathBuf,
    table_path: PathBuf,
    table: LockedFile,
}

impl IdlePoolFiles {
    /// Paths of the pools in a directory that have names with this prefix and suffix. Only the
    /// names of their tables are read.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn names(directory: &Path, prefix: &str, suffix: &str) -> io::Result<Vec<PathBuf>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(directory)? {
            let name = entry?.file_name();
            let pool = name.to_str().and_then(|name| name.strip_suffix(TABLE_SUFFIX));
            if let Some(pool) = pool.filter(|it| it.starts_with(prefix) && it.ends_with(suffix)) {
                found.push(directory.join(pool));
            }
        }
        found.sort_unstable();
        Ok(found)
    }

    /// Locks the files of a pool. `None` if a store uses them or if there is no table.
    ///
    /// # Errors
    /// If they belong to another user, are accessible to others, are not regular files, or cannot
    /// be opened.
    pub fn lock(pool_path: &Path) -> Result<Option<Self>, MemoryError> {
        let table_path = table_path(pool_path);
        match try_lock(&table_path, OFlags::empty()) {
            Ok(Some(table)) => {
                Ok(Some(Self { pool_path: pool_path.to_owned(), table_path, table }))
            }
            Ok(None) => Ok(None),
            Err(MemoryError::Named { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// The first words of the table; zero beyond its end.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn first_words<const WORDS: usize>(&self) -> Result<[u64; WORDS], MemoryError> {
        let failed = |source| named("read", &self.table_path, source);
        let mut words = [0; WORDS];
        for (at, word) in words.iter_mut().enumerate() {
            let mut bytes = [0; 8];
            let read = self.table.file().read_at(&mut bytes, at as u64 * 8).map_err(failed)?;
            *word = if read == bytes.len() { u64::from_le_bytes(bytes) } else { 0 };
        }
        Ok(words)
    }

    /// Whether the pool's file exists.
    pub fn has_pool(&self) -> bool {
        fs::symlink_metadata(&self.pool_path).is_ok()
    }

    /// Bytes that both files occupy.
    pub fn reserved_bytes(&self) -> u64 {
        reserved(&self.pool_path) + reserved(&self.table_path)
    }

    /// Removes both files.
    ///
    /// # Errors
    /// If the directory cannot be written, or if the pool's path is not a file of this user.
    pub fn remove(self) -> Result<(), MemoryError> {
        // Keeps the pool open until after the unlock. Closing frees its memory, which for a large
        // pool takes longer than a starting store waits for the lock.
        let _pool = match open_file(&self.pool_path, OFlags::empty()) {
            Ok(pool) => {
                check_ours(&pool, &self.pool_path)?;
                Some(pool)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(named("open", &self.pool_path, error)),
        };
        remove_if_exists(&self.pool_path)?;
        remove_if_exists(&self.table_path)?;
        drop(self.table);
        Ok(())
    }
}

const TABLE_SUFFIX: &str = ".ledger";

fn table_path(pool: &Path) -> PathBuf {
    let mut name = OsString::from(pool);
    name.push(TABLE_SUFFIX);
    name.into()
}

/// Bytes that a file occupies; 0 if it does not exist.
fn reserved(path: &Path) -> u64 {
    fs::symlink_metadata(path).map_or(0, |metadata| metadata.blocks().saturating_mul(512))
}

/// Refuses sizes that cannot fit. Bytes of existing files of this name count as free: the files are
/// either reused, or removed before new ones are created.
fn check_room(
    path: &Path,
    table_path: &Path,
    pool_bytes: usize,
    table_bytes: usize,
) -> Result<(), MemoryError> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new("."));
    let failed = |error: rustix::io::Errno| named("read the metadata of", directory, error.into());
    let bytes = pool_bytes.saturating_add(table_bytes);
    let own = reserved(path).saturating_add(reserved(table_path));
    let kind = statfs(directory).map_err(failed)?.f_type;
    let is_memory = kind.cast_unsigned() & 0xffff_ffff == TMPFS;
    // Only files in a tmpfs use memory.
    let available = available_here().filter(|_| is_memory);
    let available = available.map(|available| own.saturating_add(available as u64));
    if let Some(available) = available.filter(|available| *available < bytes as u64) {
        let available_bytes = usize::try_from(available).unwrap_or(usize::MAX);
        return Err(MemoryError::NotEnough { bytes, available_bytes });
    }
    check_free(&statvfs(directory).map_err(failed)?, own, path, bytes)
}

/// Refuses a file that is larger than the free space of its file system and `reusable_bytes`.
fn check_free(
    room: &StatVfs,
    reusable_bytes: u64,
    path: &Path,
    bytes: usize,
) -> Result<(), MemoryError> {
    let free = room.f_bavail.saturating_mul(room.f_frsize).saturating_add(reusable_bytes);
    // A file system without a limit reports zero blocks.
    if room.f_blocks > 0 && free < bytes as u64 {
        let source = rustix::io::Errno::NOSPC.into();
        return Err(MemoryError::NotReserved { path: path.to_owned(), bytes, source });
    }
    Ok(())
}

fn named(operation: &'static str, path: &Path, source: io::Error) -> MemoryError {
    MemoryError::Named { operation, path: path.to_owned(), source }
}

fn size_of(file: &File, path: &Path) -> Result<u64, MemoryError> {
    Ok(file.metadata().map_err(|source| named("read the metadata of", path, source))?.len())
}

/// Checks that other users can neither read nor write a file whose contents are trusted.
fn check_ours(file: &File, path: &Path) -> Result<(), MemoryError> {
    let metadata = file.metadata().map_err(|source| named("read the metadata of", path, source))?;
    let reason = if !metadata.is_file() {
        "it is not a regular file"
    } else if metadata.uid() != geteuid().as_raw() {
        "it belongs to another user"
    } else if metadata.mode() & 0o077 != 0 {
        "users other than its owner have access to it"
    } else if metadata.nlink() > 1 {
        "it has another hard link"
    } else {
        return Ok(());
    };
    Err(MemoryError::NotOurs { path: path.to_owned(), reason })
}

fn open_file(path: &Path, flags: OFlags) -> io::Result<File> {
    // Without NONBLOCK, opening a named pipe at this path would block until its other end opens.
    let flags = flags | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    Ok(open(path, flags, Mode::RUSR | Mode::WUSR)?.into())
}

/// Locks a file, creating it if it does not exist.
fn open_locked(path: &Path) -> Result<LockedFile, MemoryError> {
    let polls = LOCK_TIMEOUT.as_millis() / LOCK_POLL_INTERVAL.as_millis();
    for _ in 0..=polls {
        if let Some(file) = try_lock(path, OFlags::CREATE)? {
            return Ok(file);
        }
        cascade_runtime::sleep(LOCK_POLL_INTERVAL);
    }
    Err(MemoryError::InUse { path: path.to_owned() })
}

/// Locks a file; `None` if another process has the lock. Retries if the path names another file
/// after the lock was taken: its holder may have removed the file meanwhile.
fn try_lock(path: &Path, flags: OFlags) -> Result<Option<LockedFile>, MemoryError> {
    for _ in 0..LOCK_TRIES_MAX {
        let file = open_file(path, flags).map_err(|e| named("open", path, e))?;
        check_ours(&file, path)?;
        let locked = LockedFile::try_lock(file).map_err(|source| named("lock", path, source))?;
        let Ok(locked) = locked else { return Ok(None) };
        let is_there = locked.is_at(path);
        if is_there.map_err(|source| named("read the metadata of", path, source))? {
            return Ok(Some(locked));
        }
    }
    Ok(None)
}

/// The pool of an earlier run, if it exists in this size.
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
    // It was reserved at creation; a hole may have been punched since.
    reserve(&file, path, bytes)?;
    Ok(Some(file))
}

fn create_pool(path: &Path, bytes: usize, guard: &RemoveOnDrop) -> Result<File, MemoryError> {
    match open_file(path, OFlags::empty()) {
        Ok(file) => check_ours(&file, path)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(named("open", path, error)),
    }
    remove_if_exists(path)?;
    // With `EXCL`, a file that another process created since is not taken over.
    let flags = OFlags::CREATE | OFlags::EXCL;
    let file = open_file(path, flags).map_err(|source| named("create", path, source))?;
    guard.arm(true, false);
    set_size(&file, path, bytes)?;
    Ok(file)
}

/// Sets the length of a new pool. Its memory is reserved after it is mapped, huge pages first:
/// collapsing pages that are already populated is three times slower.
fn set_size(file: &File, path: &Path, bytes: usize) -> Result<(), MemoryError> {
    let room = fstatvfs(file).map_err(|error| named("read the metadata of", path, error.into()))?;
    check_free(&room, 0, path, bytes)?;
    ftruncate(file, bytes as u64).map_err(|error| named("set the size of", path, error.into()))
}

fn clear_and_reserve(file: &File, path: &Path, bytes: usize) -> Result<(), MemoryError> {
    // No other process maps the table, so it may shrink.
    ftruncate(file, 0).map_err(|error| named("truncate", path, error.into()))?;
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

fn remove_if_exists(path: &Path) -> Result<(), MemoryError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(named("remove", path, error)),
        _ => Ok(()),
    }
}
