//! A file system in memory that is soon full.

#![expect(clippy::print_stdout, reason = "a test that cannot run says why")]

use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// How often it is tried to let go of a disk.
const TRIES: usize = 200;

pub(crate) struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// Says so where this user may not mount one.
    pub(crate) fn mount(mib: usize) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={mib}m"), "tmpfs"])
            .arg(directory.path())
            .output()
            .is_ok_and(|output| output.status.success());
        if !mounted {
            println!("skipped: this user may not mount a file system");
        }
        mounted.then(|| Self(directory))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallDisk {
    /// A process that another test is about to start has this one's files until it runs a program
    /// of its own: the disk is in use for a moment, and not longer.
    #[expect(clippy::disallowed_methods, reason = "waits for another process")]
    fn drop(&mut self) {
        let is_unmounted = (0..TRIES).any(|number| {
            if number > 0 {
                std::thread::sleep(Duration::from_millis(50));
            }
            let unmounted = Command::new("umount").arg(self.path()).output();
            unmounted.is_ok_and(|output| output.status.success())
        });
        assert!(is_unmounted, "the disk is still in use");
    }
}
