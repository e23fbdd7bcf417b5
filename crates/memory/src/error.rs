//! Why a pool could not be created.

use std::io;
use std::path::PathBuf;

use cascade_block::ByteSize;
use thiserror::Error;

/// Why a pool could not be created.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The kernel refused the mapping.
    #[error("cannot map a pool of {} of shared memory", shown(*bytes))]
    Map {
        /// Requested size.
        bytes: usize,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The pool does not fit the available memory.
    #[error(
        "a pool of {} does not fit: {} of memory are available, on this machine or in this \
         container or service; make the pool smaller, free memory or raise the limit",
        shown(*bytes),
        shown(*available_bytes)
    )]
    NotEnough {
        /// Requested size.
        bytes: usize,
        /// Memory that the kernel says this process can have.
        available_bytes: usize,
    },
    /// An operation on a pool's file failed.
    #[error("cannot {operation} {path}")]
    Named {
        /// The operation.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A pool's file could not be reserved in full.
    #[error(
        "cannot reserve {} for {path}: make the pool smaller or its file system larger",
        shown(*bytes)
    )]
    NotReserved {
        /// The file.
        path: PathBuf,
        /// Requested size.
        bytes: usize,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// Another store uses the pool's files.
    #[error("{path} is in use by another store: stop that store or give this one another name")]
    InUse {
        /// The file that is locked.
        path: PathBuf,
    },
    /// The pool's file cannot be trusted.
    #[error("{path} cannot be used as a pool: {reason}; remove it or choose another name")]
    NotOurs {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The available memory is less than what the pool should get back.
    #[error(
        "{} more for the pool do not fit: {} of memory are available, on this machine or in this \
         container or service; choose a smaller size, free memory or raise the limit",
        shown(*bytes),
        shown(*available_bytes)
    )]
    NotEnoughToGrow {
        /// The additional size.
        bytes: usize,
        /// Memory that the kernel says this process can have.
        available_bytes: usize,
    },
    /// The kernel refused to allocate memory of the pool again.
    #[error("cannot allocate {} more for the pool", shown(*bytes))]
    Grow {
        /// The additional size.
        bytes: usize,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The kernel refused to take memory of the pool back.
    #[error("cannot give {} of the pool back to the system", shown(*bytes))]
    Shrink {
        /// The size.
        bytes: usize,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The pool has fewer bytes than requested.
    #[error(
        "the pool has {} of address space since the start of the store; open the store again for \
         a larger one",
        shown(*region_bytes)
    )]
    BeyondRegion {
        /// The size at the start.
        region_bytes: usize,
    },
    /// A device or the kernel uses the memory by its pages, also while it is free.
    #[error(
        "the pool is registered with a device, so that its pages stay allocated; open the store \
         again with another size"
    )]
    Pinned,
    /// A capacity of zero.
    #[error("the capacity of a pool is 0; give at least one page of 4096 bytes")]
    Empty,
}

/// A size as messages show it.
fn shown(bytes: usize) -> String {
    ByteSize(bytes as u64).rounded()
}
