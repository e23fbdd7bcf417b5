//! A file system in memory that is soon full.

#![expect(clippy::print_stdout, reason = "a test that cannot run says why")]

use std::path::Path;
use std::process::Command;

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
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg(self.path()).status();
        assert!(unmounted.is_ok_and(|status| status.success()), "the disk is still in use");
    }
}
