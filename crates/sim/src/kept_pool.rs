//! The files of a named pool: they outlive a simulated process, as the memory of a killed one does.
//!
//! They are real files, because a pool is a mapping. The threads of a killed process never run
//! again, but this process still has the lock of their table. So the next store gets a copy of the
//! table as it was at the kill, and the pool itself, under another name: a table is for one file,
//! whatever its name. Reads that the kernel had in flight still write to the memory of this file.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use cascade_memory::LockedFile;

/// Directories that this process has made.
static DIRECTORIES: AtomicU64 = AtomicU64::new(0);

/// A directory with the files of one pool.
#[derive(Debug)]
pub(crate) struct KeptPool {
    directory: PathBuf,
    /// Locked while the directory is in use.
    _lock: LockedFile,
    /// How often its process was killed.
    kills: AtomicU64,
}

impl KeptPool {
    pub(crate) fn new() -> io::Result<Self> {
        let shared = Path::new("/dev/shm");
        let parent = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
        loop {
            let number = DIRECTORIES.fetch_add(1, Ordering::Relaxed);
            let name = format!("cascade-simulated-{}-{number}", std::process::id());
            let directory = parent.join(name);
            if let Some(lock) = claim(&directory)? {
                return Ok(Self { directory, _lock: lock, kills: AtomicU64::new(0) });
            }
        }
    }

    /// The file of the pool.
    pub(crate) fn path(&self) -> PathBuf {
        self.of(self.kills.load(Ordering::Relaxed))
    }

    fn of(&self, kills: u64) -> PathBuf {
        self.directory.join(format!("pool-{kills}"))
    }

    /// The process was killed; with its power, the machine lost the memory.
    pub(crate) fn crashed(&self, has_lost_power: bool) -> io::Result<()> {
        let kills = self.kills.fetch_add(1, Ordering::Relaxed);
        let (old, new) = (self.of(kills), self.of(kills + 1));
        if !has_lost_power {
            if_there(fs::rename(&old, &new))?;
            if_there(fs::copy(table(&old), table(&new)))?;
        }
        if_there(fs::remove_file(&old))?;
        if_there(fs::remove_file(table(&old)))
    }

    /// Removes the directory.
    pub(crate) fn remove(&self) {
        // What is left is only in the way of a reader of its parent.
        drop(fs::remove_dir_all(&self.directory));
    }
}

/// Makes and locks a directory. `None` if another process has it: one of another PID namespace can
/// have the same number.
fn claim(directory: &Path) -> io::Result<Option<LockedFile>> {
    match fs::create_dir(directory) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let opened = match File::open(directory) {
        // Its owner has just removed it.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let Ok(lock) = LockedFile::try_lock(opened)? else { return Ok(None) };
    // Its owner removed it before the lock was taken.
    if !lock.is_at(directory)? {
        return Ok(None);
    }
    // Left by a process that was killed.
    for entry in fs::read_dir(directory)? {
        fs::remove_file(entry?.path())?;
    }
    Ok(Some(lock))
}

/// The table of a pool: its ledger.
fn table(pool: &Path) -> PathBuf {
    pool.with_extension("ledger")
}

/// A kill may come before the file was made.
fn if_there<T>(done: io::Result<T>) -> io::Result<()> {
    match done {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        Ok(_) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_one_owner_and_is_empty() {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("one");
        let lock = claim(&directory).unwrap().expect("there was none");
        fs::write(directory.join("pool-0"), "blocks").unwrap();
        assert!(claim(&directory).unwrap().is_none(), "it is in use");
        assert!(directory.join("pool-0").exists());
        drop(lock);
        let _lock = claim(&directory).unwrap().expect("its owner has ended");
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
    }

    #[test]
    fn a_kill_keeps_the_memory_and_a_power_loss_does_not() {
        let kept = KeptPool::new().unwrap();
        kept.crashed(false).unwrap();
        for (has_lost_power, left) in [(false, Some("blocks")), (true, None)] {
            fs::write(kept.path(), "blocks").unwrap();
            fs::write(table(&kept.path()), "records").unwrap();
            kept.crashed(has_lost_power).unwrap();
            assert_eq!(fs::read_to_string(kept.path()).ok().as_deref(), left);
            assert_eq!(table(&kept.path()).exists(), left.is_some());
            assert_eq!(
                fs::read_dir(&kept.directory).unwrap().count(),
                2 * usize::from(!has_lost_power)
            );
        }
        kept.remove();
        assert!(!kept.directory.exists());
    }
}
