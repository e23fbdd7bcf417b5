//! The directory of a run: one run at a time, nothing left behind.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use crate::KvBenchError;

/// The file that a run locks.
const LOCK_FILE: &str = "cascade-bench-kv.lock";
/// The directory of the blocks.
const BLOCKS: &str = "cascade-bench-kv";
/// Directories of the system, in which nobody keeps blocks.
const OF_THE_SYSTEM: [&str; 8] =
    ["/bin", "/boot", "/dev", "/etc", "/proc", "/sbin", "/sys", "/usr"];

/// A directory that this run alone uses. Dropping it removes what the run made.
#[derive(Debug)]
pub struct BenchDirectory {
    root: PathBuf,
    is_new: bool,
    is_kept: bool,
    /// Held until the end; the kernel releases it with the process.
    _lock: File,
}

impl BenchDirectory {
    /// Takes a directory. A missing one is created if the directory above it exists, and removed at
    /// the end. What a killed run has left is removed.
    ///
    /// # Errors
    /// If it cannot be used, or another run uses it.
    pub fn claim(root: &Path, is_kept: bool) -> Result<Self, KvBenchError> {
        let absolute = std::path::absolute(root).unwrap_or_else(|_| root.to_owned());
        // Memory for files of users is the exception.
        let is_memory = absolute.starts_with("/dev/shm");
        if OF_THE_SYSTEM.iter().any(|system| absolute.starts_with(system)) && !is_memory {
            return Err(KvBenchError::usage(
                format!("--cache-dir {} is a directory of the system", root.display()),
                "give a directory on the disk to measure",
            ));
        }
        let is_new = !root.exists();
        if is_new {
            fs::create_dir(root).map_err(|source| KvBenchError::Directory {
                action: "create",
                path: root.to_owned(),
                advice: "create the directory above it, or give another --cache-dir",
                source,
            })?;
        }
        let path = root.join(LOCK_FILE);
        let opened = File::options().create(true).truncate(false).write(true).open(&path);
        let lock = opened.map_err(|source| KvBenchError::Directory {
            action: "write in",
            path: root.to_owned(),
            advice: "give a --cache-dir that you may write in",
            source,
        })?;
        if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(KvBenchError::Busy { path: root.to_owned() });
        }
        let directory = Self { root: root.to_owned(), is_new, is_kept, _lock: lock };
        let left = remove(&directory.blocks());
        left.map_err(|source| KvBenchError::Directory {
            action: "remove what an earlier run has left in",
            path: directory.blocks(),
            advice: "remove it, or give another --cache-dir",
            source,
        })?;
        Ok(directory)
    }

    /// Where the store keeps the blocks.
    pub fn blocks(&self) -> PathBuf {
        self.root.join(BLOCKS)
    }

    /// The error of a run whose blocks were removed. None if they are there.
    pub fn missing(&self) -> Option<KvBenchError> {
        let path = self.blocks();
        (!path.is_dir()).then_some(KvBenchError::Removed { path })
    }

    /// Whether the run created the directory itself.
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    /// Free bytes of its file system for this user.
    pub fn free_bytes(&self) -> Option<u64> {
        free_bytes(&self.root).ok()
    }

    /// Free bytes of the file system of a directory, or of the one above it if it is missing.
    ///
    /// # Errors
    /// If neither is there.
    pub fn free_bytes_of(root: &Path) -> Result<u64, KvBenchError> {
        let absolute = std::path::absolute(root).unwrap_or_else(|_| root.to_owned());
        let above = absolute.parent().unwrap_or(&absolute);
        let free = free_bytes(root).or_else(|_| free_bytes(above));
        free.map_err(|source| KvBenchError::Directory {
            action: "find the free space of",
            path: root.to_owned(),
            advice: "create the directory above it, or give another --cache-dir",
            source,
        })
    }
}

impl Drop for BenchDirectory {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        // A file that cannot be removed is no reason to lose the figures of the run.
        drop(remove(&self.blocks()));
        drop(fs::remove_file(self.root.join(LOCK_FILE)));
        if self.is_new {
            drop(fs::remove_dir(&self.root));
        }
    }
}

fn free_bytes(directory: &Path) -> io::Result<u64> {
    let space = rustix::fs::statvfs(directory)?;
    Ok(space.f_bavail.saturating_mul(space.f_frsize))
}

fn remove(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    fn entries(directory: &Path) -> usize {
        fs::read_dir(directory).unwrap().count()
    }

    #[test]
    fn a_second_run_in_a_directory_is_refused_until_the_first_ends() {
        let directory = TempDir::new().unwrap();
        let first = BenchDirectory::claim(directory.path(), false).unwrap();
        let refused = BenchDirectory::claim(directory.path(), false).unwrap_err();
        assert!(refused.to_string().contains("another benchmark"), "{refused}");
        drop(first);
        let again = BenchDirectory::claim(directory.path(), false).unwrap();
        assert!(again.free_bytes().unwrap() > 0);
    }

    #[test]
    fn nothing_is_left_behind_and_files_of_others_stay() {
        let directory = TempDir::new().unwrap();
        fs::write(directory.path().join("mine"), "").unwrap();
        let claimed = BenchDirectory::claim(directory.path(), false).unwrap();
        fs::create_dir(claimed.blocks()).unwrap();
        fs::write(claimed.blocks().join("segment"), "").unwrap();
        drop(claimed);
        assert_eq!(entries(directory.path()), 1);

        let new = directory.path().join("new");
        let claimed = BenchDirectory::claim(&new, false).unwrap();
        assert!(claimed.is_new() && new.exists());
        drop(claimed);
        assert!(!new.exists());
    }

    #[test]
    fn what_a_killed_run_left_is_removed_and_what_is_kept_stays() {
        let directory = TempDir::new().unwrap();
        let kept = BenchDirectory::claim(directory.path(), true).unwrap();
        fs::create_dir(kept.blocks()).unwrap();
        let blocks = kept.blocks();
        drop(kept);
        assert!(blocks.exists());
        drop(BenchDirectory::claim(directory.path(), false).unwrap());
        assert_eq!(entries(directory.path()), 0);
    }

    #[test]
    fn a_directory_that_cannot_be_used_is_refused_before_anything_runs() {
        let directory = TempDir::new().unwrap();
        let far = directory.path().join("missing/below");
        let refused = BenchDirectory::claim(&far, false).unwrap_err().to_string();
        assert!(refused.contains("cannot create"), "{refused}");
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        let refused = BenchDirectory::claim(&file, false).unwrap_err().to_string();
        assert!(refused.contains("cannot write in"), "{refused}");
        let refused = BenchDirectory::claim(Path::new("/etc/kv"), false).unwrap_err().to_string();
        assert!(refused.contains("directory of the system"), "{refused}");
    }
}
