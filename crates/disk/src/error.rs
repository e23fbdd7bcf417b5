//! What can go wrong with files, by what the caller can do about it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;

use crate::format::FORMAT_VERSION;

/// A failure of the file tier. A block that is not there or damaged is a result, not an error.
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum DiskError {
    /// The capacity is used up. Call `reclaim`, then try again.
    #[error("{needed_bytes} bytes do not fit: {used_bytes} of {capacity_bytes} are in use")]
    Full {
        /// Bytes that were to be added.
        needed_bytes: u64,
        /// Bytes that the files take.
        used_bytes: u64,
        /// Bytes that they may take.
        capacity_bytes: u64,
    },
    /// The file system is full, or a quota or size limit of the machine is reached.
    #[error("no space on the device under {}", path.display())]
    NoSpace {
        /// The file that could not grow.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: Arc<io::Error>,
    },
    /// The deadline passed. What was under way may still happen; buffers come back by themselves.
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
        /// What the kernel said.
        #[source]
        source: Arc<io::Error>,
    },
    /// Another process writes here.
    #[error(
        "{} is held by {}; stop that process, or give this store another directory",
        path.display(), holder_name(*pid)
    )]
    Locked {
        /// The lock file.
        path: PathBuf,
        /// Who holds it, where the file says so.
        pid: Option<u32>,
    },
    /// Files of another version of the format.
    #[error(
        "{} has format version {found}, this program reads {FORMAT_VERSION}; open it with the \
         version of cascade that wrote it, or name an empty directory", path.display()
    )]
    UnknownVersion {
        /// The file.
        path: PathBuf,
        /// The version that it names.
        found: u16,
    },
    /// A block that no file of this tier can hold.
    #[error("a block of {payload_bytes} bytes; this tier takes 1 to {limit_bytes}")]
    BadLength {
        /// Its length.
        payload_bytes: u64,
        /// The longest that would fit.
        limit_bytes: u64,
    },
    /// The slab has not the length that the record's description says.
    #[error("the record is {payload_bytes} bytes long, the slab {slab_bytes}")]
    LengthMismatch {
        /// Length of the record.
        payload_bytes: u64,
        /// Length of the slab.
        slab_bytes: u64,
    },
    /// The bytes that an alias should name are not there.
    #[error("an alias for bytes that are not stored")]
    NoTarget,
    /// A manifest file that stands in the way.
    #[error("{}: {reason}", path.display())]
    Manifest {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        reason: String,
    },
    /// A setting makes no sense.
    #[error("{setting}: {reason}")]
    Config {
        /// The setting's name.
        setting: &'static str,
        /// What is wrong and what would be right.
        reason: String,
    },
}

fn holder_name(pid: Option<u32>) -> String {
    pid.map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"))
}

impl DiskError {
    /// Whether something else lies where a file of the tier belongs, or nothing. It concerns this
    /// file alone, until it is removed or replaced.
    pub(crate) fn is_misplaced(&self) -> bool {
        matches!(self, Self::Io { source, .. } if is_misplaced(source))
    }

    /// Sorts an error of the kernel by what the caller can do.
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

/// As [`DiskError::is_misplaced`].
pub(crate) fn is_misplaced(error: &io::Error) -> bool {
    use io::ErrorKind::{IsADirectory, NotADirectory, NotFound};
    let is_loop = error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error());
    is_loop || matches!(error.kind(), IsADirectory | NotADirectory | NotFound)
}
