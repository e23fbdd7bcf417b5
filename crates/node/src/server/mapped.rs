//! Whether a process still has a pool mapped: without a mapping it can touch nothing of it.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;

/// Whether a process may touch a pool's memory. It may where the kernel does not say.
pub(super) fn may_touch(process: i32, pool: &File) -> bool {
    let Ok(inode) = pool.metadata().map(|pool| pool.ino()) else { return true };
    // Some file systems tell a number here that is not the one in the lists. This process has the
    // pool mapped: if its own list does not say so, another's says nothing either.
    let is_told = is_listed("self", inode) == Some(true);
    // Another file of the same number only keeps the memory for longer.
    !is_told || is_listed(&process.to_string(), inode) != Some(false)
}

/// Whether a process's list of mappings has a file. None if there is no list: a process that is
/// ending has an empty one, and its memory for a moment more.
fn is_listed(process: &str, inode: u64) -> Option<bool> {
    let maps = fs::read_to_string(format!("/proc/{process}/maps")).ok()?;
    (!maps.is_empty()).then(|| maps.lines().any(|line| inode_of(line) == Some(inode)))
}

/// The fifth field of a line: `start-end rights offset device inode path`.
fn inode_of(line: &str) -> Option<u64> {
    line.split_ascii_whitespace().nth(4)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use cascade_memory::{HugePages, Pool, PoolConfig};

    use super::*;

    #[test]
    fn only_a_process_that_is_seen_not_to_have_the_pool_mapped_cannot_touch_it() {
        let config =
            PoolConfig { capacity_bytes: 1 << 20, huge_pages: HugePages::Never, populate: false };
        let pool = Pool::new(&config).expect("a MiB is there");
        let me = i32::try_from(std::process::id()).expect("process numbers are small");
        let file = pool.region().file().try_clone().expect("descriptors are left");
        assert!(may_touch(me, &file));
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep");
        let other = i32::try_from(child.id()).expect("process numbers are small");
        // Until it runs the program it may be a copy of this process.
        while may_touch(other, &file) {
            std::thread::yield_now();
        }
        assert!(may_touch(i32::MAX, &file), "nobody says so of an unknown process");
        drop(pool);
        assert!(may_touch(other, &file), "the node itself is not seen to have it mapped");
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
