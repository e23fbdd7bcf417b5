//! How to make a file tier: one struct, checked before anything is opened.

use std::path::PathBuf;

use crate::DiskError;
use crate::format::{PAGE_BYTES, WriterName};

const MIB: u64 = 1 << 20;

/// What reads and writes the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EngineKind {
    /// `io_uring` for direct I/O where the kernel allows it, else `Psync`.
    #[default]
    Auto,
    /// `io_uring`, or an error.
    Uring,
    /// `preadv` and `pwritev` on a few threads.
    Psync,
}

/// How blocks lie in files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Layout {
    /// Append-only segments of many blocks.
    #[default]
    Segments,
    /// One file a block, in sharded directories, for file systems that share blocks by name.
    FilePerBlock,
}

/// A file tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileTierConfig {
    /// Where the files lie. Made if it is missing.
    pub directory: PathBuf,
    /// Which of the writers of this directory this is; each has its own files. Default: `w0`.
    pub writer: WriterName,
    /// Bytes that this writer's files may take; one segment of it is kept free for reclaiming.
    /// Default: 4 GiB. Minimum: 1 MiB.
    pub capacity_bytes: u64,
    /// Size of a segment; a quarter of the capacity if that is less. Default: 256 MiB.
    /// Minimum: 64 KiB.
    pub segment_bytes: u64,
    /// Whether to pass by the page cache where the file system allows it. Default: yes.
    pub direct: bool,
    /// Default: auto.
    pub engine: EngineKind,
    /// Whether an append returns only once its blocks are on stable storage. Default: no.
    pub durable: bool,
    /// Default: segments.
    pub layout: Layout,
    /// Most transfers under way at once in one call. Default: 32. Minimum: 1. Maximum: 1,024.
    pub queue_depth: u32,
    /// Hexadecimal digits of the key that name a block file's directory. Default: 2. Maximum: 4.
    pub shard_digits: u8,
}

impl FileTierConfig {
    /// The defaults, for a directory.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
            writer: WriterName::default(),
            capacity_bytes: 4096 * MIB,
            segment_bytes: 256 * MIB,
            direct: true,
            engine: EngineKind::default(),
            durable: false,
            layout: Layout::default(),
            queue_depth: 32,
            shard_digits: 2,
        }
    }

    /// Refuses what makes no sense and fits the segment size to the capacity.
    pub(crate) fn checked(mut self) -> Result<Self, DiskError> {
        let refuse =
            |setting, reason: &str| Err(DiskError::Config { setting, reason: reason.to_owned() });
        if self.capacity_bytes < MIB {
            return refuse("capacity_bytes", "must be at least 1 MiB");
        }
        if self.segment_bytes < 64 << 10 {
            return refuse("segment_bytes", "must be at least 64 KiB");
        }
        if self.segment_bytes > 1 << 40 {
            return refuse("segment_bytes", "must be at most 1 TiB");
        }
        if !(1..=1024).contains(&self.queue_depth) {
            return refuse("queue_depth", "must be 1 to 1024");
        }
        if self.shard_digits > 4 {
            return refuse("shard_digits", "must be 0 to 4");
        }
        let page = PAGE_BYTES as u64;
        self.segment_bytes = self.segment_bytes.min(self.capacity_bytes / 4) / page * page;
        Ok(self)
    }
}
