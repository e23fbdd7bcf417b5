//! The progress of a run, which other threads read, and by which they stop it.

use std::sync::atomic::{AtomicBool, AtomicU64};

/// The progress of a run, for other threads, and their way to stop it.
#[derive(Debug, Default)]
pub struct Progress {
    /// Nanoseconds of the run's clock at the start of the window; 0 before it.
    pub started_ns: AtomicU64,
    /// Answered requests.
    pub requests: AtomicU64,
    /// Bytes read.
    pub read_bytes: AtomicU64,
    /// Bytes written.
    pub written_bytes: AtomicU64,
    /// Once set, no further operation begins.
    pub is_stopped: AtomicBool,
}
