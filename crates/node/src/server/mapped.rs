//! Whether a process still has a pool mapped: without a mapping it can touch nothing of it.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;

/// Whether a process may touch a pool's memory. It may where the kernel does not say.
pub(super) fn may_touch(process: i32, pool: &File) -> bool {
    let Ok(inode) = pool.metadata().map(|pool| pool.ino()) else { return true };
    let Ok(maps) = fs::read_to_string(format!("/proc/{process}/maps")) else { return true };
    // A process that is ending has an empty list, and its memory for a moment more: its end is
    // told by the pidfd. Another file of the same number only keeps the memory for longer.
    maps.is_empty() || maps.lines().any(|line| inode_of(line) == Some(inode))
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
    fn a_process_touches_what_it_has_mapped_and_nothing_else() {
        let config =
            PoolConfig { capacity_bytes: 1 << 20, huge_pages: HugePages::Never, populate: false };
        let pool = Pool::new(&config).expect("a MiB is there");
        let me = i32::try_from(std::process::id()).expect("process numbers are small");
        let file = pool.region().file().try_clone().expect("descriptors are left");
        assert!(may_touch(me, &file));
        drop(pool);
        assert!(!may_touch(me, &file), "its mapping is gone");
        assert!(may_touch(i32::MAX, &file), "nobody says so of an unknown process");
    }

    #[test]
    fn a_line_of_maps_names_its_inode() {
        let line =
            "7f00-7f10 rw-s 00000000 00:01 1041                     /memfd:cascade (deleted)";
        assert_eq!(inode_of(line), Some(1041));
        assert_eq!(inode_of("7ffc-7ffd r-xp 00000000 00:00 0          [vdso]"), Some(0));
    }
}
