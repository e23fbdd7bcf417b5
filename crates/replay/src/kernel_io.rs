//! What the kernel counted as read from and written to disks by this process.

use std::fs;

use serde::Serialize;

/// Bytes between this process and the disks, with headers, padding, checkpoints and read-ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct KernelIo {
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written, or to be written from the page cache.
    pub written_bytes: u64,
}

impl KernelIo {
    /// The count since the start of the process. `None` if the kernel does not tell.
    pub fn now() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/self/io").ok()?)
    }

    /// The count since an earlier one.
    pub fn since(self, earlier: Self) -> Self {
        Self {
            read_bytes: self.read_bytes.saturating_sub(earlier.read_bytes),
            written_bytes: self.written_bytes.saturating_sub(earlier.written_bytes),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| {
            let mut lines = text.lines();
            lines.find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
        };
        Some(Self { read_bytes: field("read_bytes:")?, written_bytes: field("write_bytes:")? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counts_of_disks_are_read_not_those_of_calls() {
        let text = "rchar: 1\nwchar: 2\nsyscr: 3\nsyscw: 4\nread_bytes: 4096\n\
                    write_bytes: 8192\ncancelled_write_bytes: 5\n";
        let both = KernelIo::parse(text).expect("both lines");
        assert_eq!(both, KernelIo { read_bytes: 4096, written_bytes: 8192 });
        let earlier = KernelIo { read_bytes: 96, written_bytes: 192 };
        assert_eq!(both.since(earlier), KernelIo { read_bytes: 4000, written_bytes: 8000 });
        assert_eq!(KernelIo::parse("read_bytes: 1\n"), None);
    }
}
