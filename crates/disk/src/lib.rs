//! The file tier's bytes: segments, block files, and the engines that read and write them.
//!
//! Which blocks lie here, and which leave, is decided above. This crate keeps them so that they
//! come back right or not at all: every payload carries a checksum that a read checks, every call
//! has a deadline, and a restart finds what was stored. `docs/segment-format.md` draws the bytes.

mod config;
pub mod conformance;
mod device_probe;
mod erase;
mod error;
pub mod format;
mod gate;
pub mod inspect;
pub mod io;
mod lock;
mod manifests;
mod per_block;
mod placement;
mod problems;
mod random;
mod record;
pub mod scan;
mod segments;
mod tier;

pub use config::{EngineKind, FileTierConfig, Layout};
pub use erase::{ErasedFiles, FileLeft};
pub use error::DiskError;
pub use format::WriterName;
pub use inspect::{InspectReport, inspect};
pub use manifests::StoredManifest;
pub use per_block::PerBlockFiles;
pub use record::{Address, RecordMeta};
pub use segments::SegmentFiles;
pub use tier::{
    BlockFiles, Damage, DiskStats, ReadOutcome, ReadRequest, Reclaimed, Recovery, open, open_with,
};
