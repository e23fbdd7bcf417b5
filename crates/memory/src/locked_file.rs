//! A file that its owner has locked, with the kernel's `flock`.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::process_mark;

/// A file that is locked exclusively for as long as this value lives, or until the process ends.
///
/// Dropping unlocks the file before it is closed. Closing is not enough: a child has a copy of the
/// open file between `fork` and `exec`. A forked child that drops its own copy of this value
/// unlocks nothing: its parent still has the lock.
#[derive(Debug)]
pub struct LockedFile {
    file: File,
    /// The process that took the lock.
    process: u64,
}

impl LockedFile {
    /// Locks a file without waiting. Gives the file back if another open file has the lock.
    ///
    /// # Errors
    /// If the file system cannot lock the file.
    pub fn try_lock(file: File) -> io::Result<Result<Self, File>> {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Ok(Self { file, process: process_mark() })),
            Err(Errno::WOULDBLOCK) => Ok(Err(file)),
            Err(error) => Err(error.into()),
        }
    }

    /// The locked file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Whether a path names this file. An earlier holder may have removed the file between the
    /// opening and the lock.
    ///
    /// # Errors
    /// If the metadata of the locked file cannot be read.
    pub fn is_at(&self, path: &Path) -> io::Result<bool> {
        let locked = self.file.metadata()?;
        let is_same = |now: fs::Metadata| now.ino() == locked.ino() && now.dev() == locked.dev();
        Ok(fs::symlink_metadata(path).is_ok_and(is_same))
    }
}

impl Drop for LockedFile {
    fn drop(&mut self) {
        if self.process == process_mark() {
            let unlocked = flock(&self.file, FlockOperation::Unlock);
            debug_assert!(unlocked.is_ok(), "unlocking our own lock");
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::path::PathBuf;
    use std::process::Command;

    use rustix::io::{FdFlags, fcntl_setfd};

    use super::*;

    /// An empty file of its own, which is removed with this value.
    struct Lock(PathBuf);

    impl Lock {
        fn new(name: &str) -> Self {
            let name = format!("cascade-locked-file-{}-{name}", std::process::id());
            let path = std::env::temp_dir().join(name);
            File::create(&path).expect("a temporary file");
            Self(path)
        }

        fn lock(&self) -> Option<LockedFile> {
            let file = File::open(&self.0).expect("it is there");
            LockedFile::try_lock(file).expect("the file system has locks").ok()
        }
    }

    impl Drop for Lock {
        fn drop(&mut self) {
            drop(fs::remove_file(&self.0));
        }
    }

    #[test]
    fn a_lock_is_exclusive_until_it_is_dropped() {
        let it = Lock::new("exclusive");
        let held = it.lock().expect("it is free");
        assert!(it.lock().is_none(), "it is held");
        drop(held);
        assert!(it.lock().is_some(), "it was dropped");
    }

    /// A test failed when another one forked while the lock was held: the lock was only closed, and
    /// the child still had it.
    #[test]
    fn a_child_with_the_descriptor_does_not_keep_the_lock() {
        let it = Lock::new("child");
        let held = it.lock().expect("it is free");
        let inherited = held.file().try_clone().expect("descriptors are left");
        fcntl_setfd(&inherited, FdFlags::empty()).expect("it is open");
        let mut child = Command::new("sleep").arg("600").spawn().expect("sleep");
        assert!(it.lock().is_none(), "it is held");
        drop(held);
        let again = it.lock();
        let still_runs = child.try_wait().expect("it is ours").is_none();
        child.kill().expect("it is ours");
        child.wait().expect("it is ours");
        drop(inherited);
        assert!(again.is_some(), "the child keeps the lock");
        assert!(still_runs, "the child has the descriptor until it is killed");
    }

    #[test]
    fn a_forked_child_does_not_unlock_what_its_parent_holds() {
        let it = Lock::new("parent");
        let held = it.lock().expect("it is free");
        let file = held.file().try_clone().expect("descriptors are left");
        drop(LockedFile { file, process: held.process + 1 });
        assert!(it.lock().is_none(), "its parent has it");
    }

    #[test]
    fn a_removed_file_is_not_at_its_path() {
        let it = Lock::new("removed");
        let held = it.lock().expect("it is free");
        assert!(held.is_at(&it.0).expect("it is open"));
        fs::remove_file(&it.0).expect("it is there");
        assert!(!held.is_at(&it.0).expect("it is open"), "it was removed");
        File::create(&it.0).expect("a temporary file");
        assert!(!held.is_at(&it.0).expect("it is open"), "another file has its name");
    }
}
