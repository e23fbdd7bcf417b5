//! The file tier: segments, block files, and the I/O engines that read and write them.
//!
//! The store above decides which blocks this tier holds and which it evicts. This crate stores
//! their bytes: each payload has a checksum that every read verifies, each call has a deadline, and
//! a restart recovers what was stored. A damaged block is a miss, never wrong bytes.
//! `docs/segment-format.md` specifies the format.
#![warn(clippy::disallowed_types)]

mod alignment;
mod config;
pub mod conformance;
mod device_probe;
mod erase;
mod error;
mod files;
pub mod format;
pub mod inspect;
pub mod io;
mod lock;
mod manifests;
mod per_block;
mod place;
mod problem_log;
pub mod scan;
mod segments;
mod shared_sync;
mod tier;

pub use cascade_tier::tier::{
    Address, BlockFacts, EraseOutcome, Load, LoadOutcome, MakeRoomOutcome, NotErased, TierError,
};
pub use config::{FileLayout, FilesConfig, IoEngine};
pub use error::DiskError;
pub use files::{FilesTier, open, open_with};
pub use format::WriterName;
pub use inspect::{InspectReport, inspect};
pub use manifests::StoredManifest;
pub use per_block::PerBlockFiles;
pub use segments::SegmentFiles;
pub use tier::{BlockFiles, DiskStats, Recovery};
