//! The store of one node: catalog, tiers, pipeline, placement, eviction and mover.

mod block_store;
mod call_context;
mod catalog;
mod changes;
mod circuits;
mod config;
pub mod conformance;
mod erase;
pub mod eviction;
mod explain;
mod find;
mod flush;
mod health;
mod history;
mod hot;
mod insight;
mod ledger;
mod mover;
mod names;
mod outcome;
mod pipeline;
mod prepare;
mod prober;
mod put;
mod put_check;
mod read;
mod read_counters;
mod request;
mod scrub;
mod secret;
mod shadow;
pub mod stage;
mod state;
mod stats;
mod store;
mod store_core;
mod warm;
mod write_through;

pub use block_store::BlockStore;
pub use changes::{Change, ChangeCursor, Changes};
pub use config::{
    CallOptions, EncryptionConfig, FileLayout, FilesConfig, IoEngine, KeepPool, PipelineError,
    PolicyKind, StoreConfig, WritePolicy, WriterId,
};
pub use erase::{EraseReport, NotErased, TierEraseReport};
pub use explain::{BlockExplanation, BlockState, Explanation, NamespaceDifference, PresentBlock};
pub use flush::FlushMark;
pub use health::{CircuitHealth, HealthConfig, HealthState, StageHealth};
pub use history::Loss;
pub use insight::{HotPrefix, TierBytes};
pub use ledger::{HeldId, HeldKind, HeldPiece, LeftoverPool, Process, WarmStats, leftover_pools};
pub use names::intern;
pub use outcome::{
    DeclineReason, GetOutcome, PrefixMatch, PrepareOutcome, Put, PutOutcome, PutSlab, StoreError,
    TierName, ViewOutcome,
};
pub use pipeline::Pipeline;
pub use request::{Hints, Request};
pub use scrub::ScrubReport;
pub use secret::{SecretError, SecretReaders, read_secret};
pub use shadow::{ShadowFigure, ShadowRates};
pub use stats::{StoreCounters, StoreStats, TierHits};
pub use store::Store;
