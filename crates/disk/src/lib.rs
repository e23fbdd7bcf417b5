//! The file tier: segments, and the I/O engines that read and write them.
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
pub mod format;
pub mod inspect;
pub mod io;
mod lock;
mod manifests;
mod old_layout;
mod place;
mod problem_log;
pub mod scan;
mod segments;
mod shared_sync;

pub use cascade_tier::tier::{
    Address, BlockFacts, EraseOutcome, Load, LoadOutcome, MakeRoomOutcome, NotErased, TierError,
};
pub use config::{FilesConfig, IoEngine};
pub use error::DiskError;
pub use format::WriterName;
pub use inspect::{InspectReport, inspect};
pub use manifests::StoredManifest;
pub use old_layout::find_block_files;
pub use segments::{DiskStats, Recovery, SegmentFiles, TIER_NAME};
