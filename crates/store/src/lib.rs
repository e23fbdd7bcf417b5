//! The store of one node: catalog, tiers, pipeline, placement, eviction and mover.
#![warn(clippy::disallowed_types)]

mod calls;
mod config;
mod core;
mod drive;
mod durable;
mod hold_recorder;
mod insight;
mod secret;
mod shared;
pub mod stages;
mod store;

pub use crate::core::circuit::HealthConfig;
pub use crate::core::eviction;
pub use crate::core::eviction::policy_kind::PolicyKind;
pub use crate::core::flush_mark::FlushMark;
pub use crate::core::history::Loss;
pub use calls::chains::OwnBlocks;
pub use calls::erase::{EraseReport, TierEraseReport};
pub use calls::holds;
pub use calls::list::{KeyPage, ListRequest, ListedKey};
pub use cascade_disk::{FilesConfig, IoEngine};
pub use cascade_tier::tier::NotErased;
pub use cascade_tier::{
    BlockStore, CallOptions, Change, ChangeCursor, Changes, CircuitHealth, DeclineReason,
    GetOutcome, HealthState, Hints, HoldTimes, PipelineError, PrefixMatch, PrepareOutcome, Put,
    PutOutcome, PutSlab, Request, ShadowFigure, ShadowRates, SourceStats, StageHealth,
    StoreCounters, StoreError, StoreStats, TierHits, TierName, ViewOutcome, WarmStats, WriterId,
    intern,
};
pub use config::{EncryptionConfig, KeepPool, StoreConfig, WritePolicy};
pub use drive::scrub::ScrubReport;
pub use durable::ledger::{
    HeldId, HeldKind, HeldPiece, LeftoverPool, Process, ledger_bytes, leftover_pools,
};
pub use hold_recorder::{Hold, HoldRecorder};
pub use insight::explain::{
    BlockExplanation, BlockState, Explanation, NamespaceDifference, PresentBlock,
};
pub use insight::prefixes::{HotPrefix, TierBytes};
pub use secret::{SecretError, SecretReaders, read_secret};
pub use stages::{Pipeline, SourceList};
pub use store::Store;
