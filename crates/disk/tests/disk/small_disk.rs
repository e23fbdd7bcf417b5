//! A small file system in memory.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]
#![expect(clippy::print_stdout, reason = "a test that cannot run says why")]

use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Number of attempts to unmount.
const UNMOUNT_TRIES: usize = 200;

pub(crate) struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// Mounts a tmpfs, or prints why it cannot.
    pub(crate) fn mount(mib: usize) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={mib}m,mode=700"), "tmpfs"])
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
    /// Retries because another test may be starting a process, which inherits this test's open
    /// files until it executes its program. The file system is in use until then.
    #[expect(clippy::disallowed_methods, reason = "waits for another process")]
    fn drop(&mut self) {
        let is_unmounted = (0..UNMOUNT_TRIES).any(|number| {
            if number > 0 {
                std::thread::sleep(Duration::from_millis(50));
            }
            let unmounted = Command::new("umount").arg(self.path()).output();
            unmounted.is_ok_and(|output| output.status.success())
        });
        assert!(is_unmounted, "the disk is still in use");
    }
}
