//! Whether a process still maps a pool: without a mapping it cannot access the pool's memory.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;

/// Whether a process may still access a pool's memory. True if that is unknown.
pub(super) fn may_access(process: i32, pool: &File) -> bool {
    let Ok(inode) = pool.metadata().map(|pool| pool.ino()) else { return true };
    // On some file systems the inode number of `stat` differs from that in `/proc/PID/maps`. This
    // process maps the pool: if its own list lacks the inode, the lists are not usable.
    let is_reliable = maps_inode("self", inode) == Some(true);
    // A file with the same inode number on another device only delays the release.
    !is_reliable || maps_inode(&process.to_string(), inode) != Some(false)
}

/// Whether `/proc/PID/maps` lists an inode. None without such a list, or with an empty one: an
/// exiting process has an empty list while its memory still exists.
fn maps_inode(process: &str, inode: u64) -> Option<bool> {
    let maps = fs::read_to_string(format!("/proc/{process}/maps")).ok()?;
    (!maps.is_empty()).then(|| maps.lines().any(|line| inode_of(line) == Some(inode)))
}

/// The fifth field of a line: `start-end rights offset device inode path`.
fn inode_of(line: &str) -> Option<u64> {
    line.split_ascii_whitespace().nth(4)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use cascade_memory::{HugePages, Pool, PoolConfig};
    use cascade_runtime::{Deadline, SystemClock};

    use super::*;

    #[test]
    fn a_process_without_a_mapping_of_the_pool_may_not_access_it() {
        let config =
            PoolConfig { capacity_bytes: 1 << 20, huge_pages: HugePages::Never, populate: false };
        let pool = Pool::new(&config).expect("a MiB is there");
        let me = i32::try_from(std::process::id()).expect("process numbers are small");
        let file = pool
            .region()
            .host()
            .expect("host memory")
            .file()
            .try_clone()
            .expect("descriptors are left");
        assert!(may_access(me, &file));
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep");
        let other = i32::try_from(child.id()).expect("process numbers are small");
        // Between fork and exec the child is a copy of this process, with its mappings.
        let limit = Deadline::after(&SystemClock, Duration::from_secs(60));
        while may_access(other, &file) {
            assert!(!limit.has_passed(&SystemClock), "waited in vain for the child to run `sleep`");
            std::thread::yield_now();
        }
        assert!(may_access(i32::MAX, &file), "an unknown process has no list");
        drop(pool);
        assert!(may_access(other, &file), "this process does not map the pool: not reliable");
        child.kill().expect("it is ours");
        child.wait().expect("it is ours");
    }

    #[test]
    fn a_line_of_maps_names_its_inode() {
        let line =
            "7f00-7f10 rw-s 00000000 00:01 1041                     /memfd:cascade (deleted)";
        assert_eq!(inode_of(line), Some(1041));
        assert_eq!(inode_of("7ffc-7ffd r-xp 00000000 00:00 0          [vdso]"), Some(0));
    }
}
