//! The configuration of a file tier: one struct, checked before anything is opened.

use std::path::PathBuf;

use crate::DiskError;
use crate::format::{PAGE_BYTES, WriterName};

const MIB: u64 = 1 << 20;

/// The I/O engine that reads and writes the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IoEngine {
    /// `io_uring` for direct I/O if the kernel allows it, otherwise `Psync`.
    #[default]
    Auto,
    /// `io_uring`, or an error.
    Uring,
    /// `preadv` and `pwritev` on worker threads.
    Psync,
}

/// The settings of a file tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilesConfig {
    /// Directory of the files. It is created if it is missing. No other store may use it.
    pub directory: PathBuf,
    /// Name of this writer. Each writer of a directory has its own files. Default: `w0`.
    pub writer: WriterName,
    /// Capacity of this writer's files. One segment of it is reserved for reclaims. Default: 4 GiB.
    /// Minimum: 1 MiB.
    pub capacity_bytes: u64,
    /// Size of a segment, at most a quarter of the capacity. Default: 256 MiB. Minimum: 64 KiB.
    /// Maximum: 1 TiB.
    pub segment_bytes: u64,
    /// Whether to bypass the page cache if the file system allows it. Default: yes.
    pub direct: bool,
    /// The I/O engine. Default: auto.
    pub engine: IoEngine,
    /// Whether an append returns only after its blocks are on stable storage. Default: no.
    pub durable: bool,
    /// Maximum number of transfers in flight per call. Default: 32. Minimum: 1. Maximum: 1,024.
    pub queue_depth: u32,
}

impl FilesConfig {
    /// The default settings for a directory.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
            writer: WriterName::default(),
            capacity_bytes: 4096 * MIB,
            segment_bytes: 256 * MIB,
            direct: true,
            engine: IoEngine::default(),
            durable: false,
            queue_depth: 32,
        }
    }

    /// Rejects values out of range.
    pub(crate) fn check(&self) -> Result<(), DiskError> {
        let refuse =
            |setting, reason: &str| Err(DiskError::Config { setting, reason: reason.to_owned() });
        if self.capacity_bytes < MIB {
            return refuse("capacity_bytes", "must be at least 1 MiB");
        }
        if self.segment_bytes < 64 << 10 {
            return refuse("segment_bytes", "must be at least 64 KiB");
        }
        // Page numbers have 32 bits, which is enough for 16 TiB.
        if self.segment_bytes > 1 << 40 {
            return refuse("segment_bytes", "must be at most 1 TiB");
        }
        if !(1..=1024).contains(&self.queue_depth) {
            return refuse("queue_depth", "must be 1 to 1024");
        }
        Ok(())
    }

    /// The size of a segment: at most a quarter of the capacity, so that at least four fit. One of
    /// them is the reserve.
    pub(crate) fn segment_bytes_of(segment_bytes_max: u64, capacity_bytes: u64) -> u64 {
        let page = PAGE_BYTES as u64;
        segment_bytes_max.min(capacity_bytes / 4) / page * page
    }
}
