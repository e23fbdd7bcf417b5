//! A pool in a file system that others fill.

use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::Command;

use cascade_memory::{HugePages, MemoryError, Pool, PoolConfig, PoolFiles};

const MIB: usize = 1 << 20;

/// A tmpfs of 32 MiB, unmounted on drop. None if mounting is not permitted.
struct Mounted(PathBuf);

impl Mounted {
    fn new(name: &str) -> Option<Self> {
        let path = std::env::temp_dir().join(format!("cascade-{name}-{}", std::process::id()));
        fs::create_dir(&path).expect("it is new");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=32M,mode=0700", "tmpfs"]).arg(&path);
        let is_mounted = mount.output().is_ok_and(|out| out.status.success());
        if !is_mounted {
            fs::remove_dir(&path).expect("it is empty");
        }
        is_mounted.then_some(Self(path))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg("-l").arg(&self.0).status();
        assert!(unmounted.is_ok_and(|status| status.success()), "cannot unmount the test's tmpfs");
        fs::remove_dir(&self.0).expect("it is empty");
    }
}

#[test]
#[expect(clippy::print_stderr, reason = "a test that is skipped says so")]
fn memory_whose_place_others_have_taken_is_refused_without_a_signal() {
    for (name, huge_pages) in [("ordinary", HugePages::Never), ("huge", HugePages::Auto)] {
        let Some(mounted) = Mounted::new(name) else {
            eprintln!("skipped: this user may not mount a tmpfs");
            return;
        };
        let files = PoolFiles::open(&mounted.0.join("pool"), 24 * MIB, 4096).expect("24 MiB fit");
        let config = PoolConfig { capacity_bytes: 24 * MIB, huge_pages, populate: true };
        let pool = Pool::of_files(&config, &files).expect("24 MiB fit");
        pool.withhold(16 * MIB).release().expect("the kernel punches holes");
        let taken = mounted.0.join("taken");
        let full = fs::write(&taken, vec![1; 32 * MIB]).expect_err("24 MiB are free");
        assert_eq!(full.kind(), ErrorKind::StorageFull);
        let refused = pool.restore(16 * MIB).expect_err("nothing is free");
        assert!(matches!(refused, MemoryError::Grow { .. }), "{refused}");
        assert_eq!(pool.capacity_bytes(), 8 * MIB);
        fs::remove_file(&taken).expect("it is there");
        assert_eq!(pool.restore(16 * MIB).expect("the place is free again"), 24 * MIB);
        drop(pool.allocate(24 * MIB).expect("all is free"));
    }
}
