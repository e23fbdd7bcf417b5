//! The file tier's bytes: segments, block files, and the engines that read and write them.
//!
//! Which blocks lie here, and which leave, is decided above. This crate keeps them so that they
//! come back right or not at all: every payload carries a checksum that a read checks, every call
//! has a deadline, and a restart finds what was stored. `docs/segment-format.md` draws the bytes.

mod alignment;
mod config;
pub mod conformance;
mod device_probe;
mod erase;
mod error;
pub mod format;
pub mod inspect;
pub mod io;
mod lock;
mod manifests;
mod per_block;
mod problems;
mod random;
mod record;
pub mod scan;
mod segments;
mod tier;
mod timed_mutex;

pub use config::{EngineKind, FileTierConfig, Layout};
pub use erase::{EraseReport, FileLeft};
pub use error::DiskError;
pub use format::WriterName;
pub use inspect::{InspectReport, inspect};
pub use manifests::StoredManifest;
pub use per_block::PerBlockFiles;
pub use record::{Address, RecordMeta};
pub use segments::SegmentFiles;
pub use tier::{
    BlockFiles, DamageKind, DiskStats, ReadOutcome, ReadRequest, ReclaimOutcome, Recovery, open,
    open_with,
};
