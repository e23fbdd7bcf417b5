//! A pool's files: the pool under a name that outlives the process, and the table beside it.
//!
//! The table is locked for as long as anything of the pool is in use; it never leaves the process,
//! so a client that holds the pool's file cannot keep the lock of a store that died. A pool that
//! cannot be used any more is not emptied but replaced: whoever still maps the old file keeps it.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::fs::{
    FallocateFlags, FlockOperation, Mode, OFlags, fallocate, flock, fstatvfs, ftruncate, open,
    statfs, statvfs,
};
use rustix::process::geteuid;

use crate::pages;
use crate::{MemoryError, SharedWords};

/// How often another opener may remove the files between our looking and our locking.
const TRIES_MAX: usize = 16;

/// How long a lock is waited for: whoever looks through the pools of a directory holds the lock of
/// each for a moment, and must not make a start fail.
const LOCK_PATIENCE: Duration = Duration::from_millis(200);
const LOCK_POLL: Duration = Duration::from_millis(5);

/// `TMPFS_MAGIC`: files there are memory.
const TMPFS: u64 = 0x0102_1994;

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

/// Removes files that were made and that hold nothing worth keeping, unless told to keep them.
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

    fn keep(&self) {
        self.removes_pool.store(false, Ordering::Relaxed);
        self.removes_table.store(false, Ordering::Relaxed);
    }
}

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        // The directory cannot be written: the error that ended the start says more, and the next
        // start removes what is left.
        if *self.removes_pool.get_mut() {
            drop(remove_if_there(&self.pool_path));
        }
        if *self.removes_table.get_mut() {
            drop(remove_if_there(&self.table_path));
        }
    }
}

/// The two files of a pool that outlives its process, opened and locked by this store alone. Files
/// that were made are removed again when this is dropped before [`PoolFiles::keep`].
#[derive(Debug)]
pub struct PoolFiles {
    /// Before the table, so that the files are locked while they are removed.
    remove_on_drop: RemoveOnDrop,
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
    /// no plain files; the memory or the file system has no room for both, or refuses.
    pub fn open(path: &Path, pool_bytes: usize, table_bytes: usize) -> Result<Self, MemoryError> {
        let table_path = table_path(path);
        let table = open_locked(&table_path)?;
        let remove_on_drop = RemoveOnDrop::of(path, &table_path);
        let table_size = size_of(&table.0, &table_path)?;
        remove_on_drop.arm(false, table_size == 0);
        // Before anything is reserved, and before an earlier pool of another size is given up.
        check_room(path, &table_path, pool_bytes, table_bytes)?;
        let table_fits = table_size == table_bytes as u64;
        let kept = if table_fits { open_existing(path, pool_bytes)? } else { None };
        let is_kept = kept.is_some();
        if !is_kept {
            remove_on_drop.arm(false, true);
            // Before there is another pool that it does not speak of.
            reserve_anew(&table.0, &table_path, table_bytes)?;
        }
        let pool = match kept {
            Some(pool) => pool,
            None => make_pool(path, pool_bytes, &remove_on_drop)?,
        };
        let words = map_words(&table.0, &table_path, table_bytes)?;
        let (pool_path, table) = (path.to_owned(), Arc::new(table));
        let is =
            Self { remove_on_drop, pool_path, table_path, pool, table, words, pool_bytes, is_kept };
        Ok(is)
    }

    /// From now on the files outlive this value: there is something in them to find.
    pub fn keep(&self) {
        self.remove_on_drop.keep();
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
        self.remove_on_drop.arm(false, true);
        self.words.zero();
        self.is_kept = false;
        self.pool = make_pool(&self.pool_path, self.pool_bytes, &self.remove_on_drop)?;
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

/// A pool's files while no store has them; nobody else gets them while this lives.
#[derive(Debug)]
pub struct IdleFiles {
    pool_path: PathBuf,
    table_path: PathBuf,
    table: LockedFile,
}

impl IdleFiles {
    /// The files of every pool in a directory whose names begin and end like this, as the pools'
    /// paths. Looks at names alone.
    ///
    /// # Errors
    /// The directory cannot be read.
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

    /// Locks the files of a pool. Nothing if a store has them, or if there is no table.
    ///
    /// # Errors
    /// They belong to another user, can be written by others, are no plain files, or cannot be
    /// opened.
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

    /// The first words of the table, zero where it is shorter.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn first_words<const WORDS: usize>(&self) -> Result<[u64; WORDS], MemoryError> {
        let failed = |source| named("read", &self.table_path, source);
        let mut words = [0; WORDS];
        for (at, word) in words.iter_mut().enumerate() {
            let mut bytes = [0; 8];
            let read = self.table.0.read_at(&mut bytes, at as u64 * 8).map_err(failed)?;
            *word = if read == bytes.len() { u64::from_le_bytes(bytes) } else { 0 };
        }
        Ok(words)
    }

    /// Whether there is a pool beside the table.
    pub fn has_pool(&self) -> bool {
        fs::symlink_metadata(&self.pool_path).is_ok()
    }

    /// What both files take.
    pub fn reserved_bytes(&self) -> u64 {
        reserved(&self.pool_path) + reserved(&self.table_path)
    }

    /// Removes both files.
    ///
    /// # Errors
    /// The directory cannot be written, or what is named like the pool is not ours.
    pub fn remove(self) -> Result<(), MemoryError> {
        // Memory of the pool is given back when this is closed, after the lock: a store that
        // starts under this name waits for the lock a moment, and large pools take longer.
        let _pool = match open_file(&self.pool_path, OFlags::empty()) {
            Ok(pool) => {
                check_ours(&pool, &self.pool_path)?;
                Some(pool)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(named("open", &self.pool_path, error)),
        };
        remove_if_there(&self.pool_path)?;
        remove_if_there(&self.table_path)?;
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

/// What a file takes of its file system; nothing where there is none.
fn reserved(path: &Path) -> u64 {
    fs::symlink_metadata(path).map_or(0, |metadata| metadata.blocks().saturating_mul(512))
}

/// Refuses sizes that cannot fit. What the files of this name take already counts as free: they
/// are either kept or removed before others are made.
fn check_room(
    path: &Path,
    table_path: &Path,
    pool_bytes: usize,
    table_bytes: usize,
) -> Result<(), MemoryError> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new("."));
    let failed = |error: rustix::io::Errno| named("look at", directory, error.into());
    let bytes = pool_bytes.saturating_add(table_bytes);
    let own = reserved(path).saturating_add(reserved(table_path));
    let kind = statfs(directory).map_err(failed)?.f_type;
    let is_memory = kind.cast_unsigned() & 0xffff_ffff == TMPFS;
    let available = pages::available_bytes().filter(|_| is_memory);
    let available = available.map(|available| own.saturating_add(available as u64));
    if let Some(available) = available.filter(|available| *available < bytes as u64) {
        let available_bytes = usize::try_from(available).unwrap_or(usize::MAX);
        return Err(MemoryError::NotEnough { bytes, available_bytes });
    }
    let room = statvfs(directory).map_err(failed)?;
    let free = room.f_bavail.saturating_mul(room.f_frsize).saturating_add(own);
    // A file system without a limit of its own says that it has no blocks.
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

/// Locks a file, which is made if it is not there.
#[expect(clippy::disallowed_methods, reason = "a store that starts has no clock of its own yet")]
fn open_locked(path: &Path) -> Result<LockedFile, MemoryError> {
    let polls = LOCK_PATIENCE.as_millis() / LOCK_POLL.as_millis();
    for _ in 0..=polls {
        if let Some(file) = try_lock(path, OFlags::CREATE)? {
            return Ok(file);
        }
        thread::sleep(LOCK_POLL);
    }
    Err(MemoryError::InUse { path: path.to_owned() })
}

/// Nothing if somebody else has the lock. It counts only if the name still means the file that was
/// locked.
fn try_lock(path: &Path, flags: OFlags) -> Result<Option<LockedFile>, MemoryError> {
    for _ in 0..TRIES_MAX {
        let file = open_file(path, flags).map_err(|e| named("open", path, e))?;
        check_ours(&file, path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            Err(error) => return Err(named("lock", path, error.into())),
        }
        let file = LockedFile(file);
        let locked = file.0.metadata().map_err(|source| named("look at", path, source))?;
        let is_same = |now: fs::Metadata| now.ino() == locked.ino() && now.dev() == locked.dev();
        if fs::symlink_metadata(path).is_ok_and(is_same) {
            return Ok(Some(file));
        }
    }
    Ok(None)
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

fn make_pool(path: &Path, bytes: usize, guard: &RemoveOnDrop) -> Result<File, MemoryError> {
    match open_file(path, OFlags::empty()) {
        Ok(file) => check_ours(&file, path)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(named("open", path, error)),
    }
    remove_if_there(path)?;
    let flags = OFlags::CREATE | OFlags::EXCL;
    let file = open_file(path, flags).map_err(|source| named("make", path, source))?;
    guard.arm(true, false);
    size(&file, path, bytes)?;
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
