//! The lock of a file, with the kernel's `flock`. The kernel releases it when the process ends.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use cascade_memory::LockedFile;
use rustix::fs::OFlags;
use rustix::process::{Pid, test_kill_process};

use super::{FileIdentity, FileOperations as _, HeldLock, LockedBy, SystemFiles, own_file};

/// After a `kill -9` the kernel may release the lock only after the process is gone, because it
/// first completes `io_uring` operations in flight. An opening waits up to ten seconds for the lock
/// of a dead process.
const DEAD_OWNER_RETRIES: u32 = 1000;
/// A living process may have the lock for a moment only, such as one whose opening fails.
const LIVING_OWNER_RETRIES: u32 = 50;
const RETRY_PAUSE: Duration = Duration::from_millis(10);
/// Maximum length of a process ID as text, with the end of its line.
const PID_BYTES_MAX: usize = 16;

/// A locked file.
#[derive(Debug)]
struct SystemLock {
    path: PathBuf,
    _file: LockedFile,
    identity: FileIdentity,
}

impl HeldLock for SystemLock {
    fn is_current(&self) -> io::Result<bool> {
        match fs::metadata(&self.path) {
            Ok(found) if identity_of(&found) == self.identity => Ok(true),
            // `lock_file` sets the directory aside.
            Ok(found) if found.is_dir() => Ok(false),
            Ok(_) => Err(io::Error::other(format!(
                "{} was replaced, so this process no longer holds the lock; another process may \
                 write to the directory",
                self.path.display()
            ))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }
}

pub(super) fn identity_of(found: &Metadata) -> FileIdentity {
    FileIdentity { device: found.dev(), inode: found.ino() }
}

/// [`super::FileOperations::lock_file`] of the system.
pub(super) fn lock(path: &Path) -> io::Result<Box<dyn HeldLock>> {
    let file = match open(path) {
        Err(error) if error.kind() == io::ErrorKind::IsADirectory => {
            SystemFiles.set_aside(path)?;
            open(path)?
        }
        opened => opened?,
    };
    let locked = wait_for_lock(file)?;
    let file = locked.file();
    // Only the holder of the lock gets here, so the file names the holder.
    file.set_len(0)?;
    file.write_all_at(format!("{}\n", std::process::id()).as_bytes(), 0)?;
    let identity = identity_of(&file.metadata()?);
    Ok(Box::new(SystemLock { path: path.to_owned(), _file: locked, identity }))
}

/// Opens or creates the file. It is not truncated, because it names the process that holds the
/// lock.
fn open(path: &Path) -> io::Result<File> {
    own_file::open(path, OFlags::RDWR | OFlags::CREATE)
}

/// Takes the lock. The error names the process that holds it.
fn wait_for_lock(mut file: File) -> io::Result<LockedFile> {
    let mut retries = 0;
    loop {
        file = match LockedFile::try_lock(file)? {
            Ok(locked) => return Ok(locked),
            Err(file) => file,
        };
        // Read in each round, because another process may have taken the lock meanwhile.
        let pid = owner_pid(&file);
        let is_living = pid.is_none_or(is_alive);
        let limit = if is_living { LIVING_OWNER_RETRIES } else { DEAD_OWNER_RETRIES };
        if retries >= limit {
            return Err(LockedBy { pid }.into());
        }
        retries += 1;
        cascade_runtime::sleep(RETRY_PAUSE);
    }
}

/// The process that the lock file names, if the file can be read.
fn owner_pid(file: &File) -> Option<u32> {
    let mut text = [0; PID_BYTES_MAX];
    let read = file.read_at(&mut text, 0).ok()?;
    std::str::from_utf8(&text[..read]).ok()?.trim().parse().ok()
}

fn is_alive(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    // Every other error, such as `EPERM`, means that the process exists.
    pid.is_none_or(|pid| test_kill_process(pid) != Err(rustix::io::Errno::SRCH))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_exclusive_until_it_is_dropped() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("one.lock");
        let held = lock(&path).unwrap();
        assert!(held.is_current().unwrap());
        let refused = lock(&path).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
        let holder = LockedBy::of(&refused).unwrap();
        assert_eq!(holder.pid, Some(std::process::id()));
        drop(held);
        drop(lock(&path).unwrap());
    }

    #[test]
    fn a_held_lock_is_not_current_without_its_file_and_fails_if_another_has_its_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("one.lock");
        let held = lock(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert!(!held.is_current().unwrap(), "the file was removed");
        fs::create_dir(&path).unwrap();
        assert!(!held.is_current().unwrap(), "a directory has its name");
        let again = lock(&path).unwrap();
        assert!(again.is_current().unwrap(), "the directory was set aside");
        assert!(held.is_current().unwrap_err().to_string().contains("replaced"));
    }
}
