//! Errors of the file tier, by what the caller can do about them.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cascade_tier::tier::TierError;
use thiserror::Error;

use crate::format::FORMAT_VERSION;
use crate::io::is_not_own;

/// A failure of the file tier. A missing or damaged block is a result, not an error.
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum DiskError {
    /// The capacity is used up. Call `reclaim`, then retry.
    #[error(
        "the file tier is full: {used_bytes} of {capacity_bytes} bytes are used, \
         {needed_bytes} more are needed"
    )]
    Full {
        /// Bytes to be added.
        needed_bytes: u64,
        /// Bytes that the files use.
        used_bytes: u64,
        /// The capacity.
        capacity_bytes: u64,
    },
    /// The file system is full, or a quota or file size limit is reached.
    #[error("no space on the device under {}", path.display())]
    NoSpace {
        /// The file that could not grow.
        path: PathBuf,
        /// The error of the kernel.
        #[source]
        source: Arc<io::Error>,
    },
    /// The deadline passed. The operation may still complete; its buffers are released when it
    /// does.
    #[error("{operation} on {} did not finish before its deadline", path.display())]
    Timeout {
        /// What was under way.
        operation: &'static str,
        /// On which file.
        path: PathBuf,
    },
    /// The kernel reported an error.
    #[error("cannot {operation} {}", path.display())]
    Io {
        /// What was under way.
        operation: &'static str,
        /// On which file.
        path: PathBuf,
        /// The error of the kernel.
        #[source]
        source: Arc<io::Error>,
    },
    /// Another process holds the lock of this writer.
    #[error(
        "{} is locked by {}; stop that process, or give this store another directory",
        path.display(), holder_name(*pid)
    )]
    Locked {
        /// The lock file.
        path: PathBuf,
        /// The process that holds it, if the lock file names one.
        pid: Option<u32>,
    },
    /// A file has another format version.
    #[error(
        "{} has format version {found}, this program reads {FORMAT_VERSION}; open it with the \
         version of Cascade that wrote it, or choose an empty directory", path.display()
    )]
    UnknownVersion {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u16,
    },
    /// The directory has a file for each block, a layout that is no longer read.
    #[error(
        "{} has a file for each block, a layout that this program does not read; remove it if its \
         blocks may be dropped, or choose another directory for the file tier", path.display()
    )]
    OldLayout {
        /// The directory of the block files.
        path: PathBuf,
    },
    /// The tier was closed.
    #[error("the file tier in {} is closed", directory.display())]
    Closed {
        /// Its directory.
        directory: PathBuf,
    },
    /// A block that is empty or longer than a segment of this tier can hold.
    #[error(
        "a block of {payload_bytes} bytes cannot be stored; valid lengths are 1 to {limit_bytes}"
    )]
    BadLength {
        /// Its length.
        payload_bytes: u64,
        /// The maximum length.
        limit_bytes: u64,
    },
    /// The length of the slab differs from the length in the record's metadata.
    #[error("the block has {payload_bytes} bytes, but its slab has {slab_bytes}")]
    LengthMismatch {
        /// Length of the record.
        payload_bytes: u64,
        /// Length of the slab.
        slab_bytes: u64,
    },
    /// The slab is in device memory, which no file can be read into or written from.
    #[error("the block is in device memory; copy it to host memory before it is written")]
    NotHostMemory,
    /// The bytes of a slab do not match the checksum that was recorded for it. Nothing was stored.
    #[error("the bytes of the block changed in memory since they were put")]
    ChangedInMemory,
    /// The target of an alias is not stored.
    #[error("the block that the alias refers to is not stored")]
    NoTarget,
    /// A manifest file prevents the operation.
    #[error("{}: {reason}", path.display())]
    Manifest {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A setting is invalid.
    #[error("{setting}: {reason}")]
    Config {
        /// The setting's name.
        setting: &'static str,
        /// What is wrong and which values are valid.
        reason: String,
    },
}

/// How the store reacts to an error of a call.
impl From<DiskError> for TierError {
    fn from(error: DiskError) -> Self {
        match error {
            // Space freed by reclaim is also free on the device.
            DiskError::Full { .. } | DiskError::NoSpace { .. } => Self::Full,
            DiskError::Timeout { .. } => Self::Timeout,
            DiskError::Closed { .. } => Self::Closed,
            DiskError::NotHostMemory => Self::NotHostMemory,
            DiskError::ChangedInMemory => Self::ChangedInMemory,
            DiskError::BadLength { payload_bytes, .. } => {
                Self::Declined { bytes: u32::try_from(payload_bytes).unwrap_or(u32::MAX) }
            }
            error => Self::Failed(Arc::new(error)),
        }
    }
}

fn holder_name(pid: Option<u32>) -> String {
    pid.map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"))
}

impl DiskError {
    /// Whether the file is missing or something else has its name. Such an error concerns this file
    /// alone, not the device.
    pub(crate) fn is_misplaced(&self) -> bool {
        matches!(self, Self::Io { source, .. } if is_misplaced(source))
    }

    /// Classifies an error of the kernel by what the caller can do about it.
    pub(crate) fn from_io(operation: &'static str, path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::TimedOut => Self::Timeout { operation, path },
            io::ErrorKind::StorageFull
            | io::ErrorKind::QuotaExceeded
            | io::ErrorKind::FileTooLarge => Self::NoSpace { path, source: Arc::new(source) },
            _ => Self::Io { operation, path, source: Arc::new(source) },
        }
    }
}

/// [`DiskError::is_misplaced`] for an error of the kernel.
pub(crate) fn is_misplaced(error: &io::Error) -> bool {
    use io::ErrorKind::{IsADirectory, NotADirectory, NotFound};
    // `ELOOP`: symbolic links above the file that never end at a directory.
    let is_loop = error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error());
    is_loop || is_not_own(error) || matches!(error.kind(), IsADirectory | NotADirectory | NotFound)
}
