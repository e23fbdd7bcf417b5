//! The store of one node: catalog, tiers, pipeline, placement, eviction and mover.
#![warn(clippy::disallowed_types)]

mod address;
mod block_store;
mod call_options;
mod calls;
mod change;
mod config;
pub mod conformance;
mod core;
mod drive;
mod durable;
mod hold_recorder;
mod insight;
mod names;
mod not_erased;
mod outcome;
mod pipeline_error;
mod request;
mod secret;
mod shadow_figure;
mod shared;
pub mod stage;
mod stage_health;
pub mod stages;
mod stats;
mod store;
mod warm_stats;

pub use crate::core::circuit::HealthConfig;
pub use crate::core::eviction;
pub use crate::core::eviction::Hints;
pub use crate::core::eviction::policy_kind::PolicyKind;
pub use crate::core::flush_mark::FlushMark;
pub use crate::core::history::Loss;
pub use block_store::BlockStore;
pub use call_options::{CallOptions, WriterId};
pub use calls::erase::{EraseReport, TierEraseReport};
pub use calls::holds;
pub use change::{Change, ChangeCursor, Changes};
pub use config::{
    EncryptionConfig, FileLayout, FilesConfig, IoEngine, KeepPool, StoreConfig, WritePolicy,
};
pub use drive::scrub::ScrubReport;
pub use durable::ledger::{HeldId, HeldKind, HeldPiece, LeftoverPool, Process, leftover_pools};
pub use hold_recorder::{Hold, HoldRecorder, HoldTimes};
pub use insight::explain::{
    BlockExplanation, BlockState, Explanation, NamespaceDifference, PresentBlock,
};
pub use insight::prefixes::{HotPrefix, TierBytes};
pub use names::intern;
pub use not_erased::NotErased;
pub use outcome::{
    DeclineReason, GetOutcome, PrefixMatch, PrepareOutcome, Put, PutOutcome, PutSlab, StoreError,
    TierName, ViewOutcome,
};
pub use pipeline_error::PipelineError;
pub use request::Request;
pub use secret::{SecretError, SecretReaders, read_secret};
pub use shadow_figure::{ShadowFigure, ShadowRates};
pub use stage_health::{CircuitHealth, HealthState, StageHealth};
pub use stages::Pipeline;
pub use stats::{StoreCounters, StoreStats, TierHits};
pub use store::Store;
pub use warm_stats::WarmStats;
