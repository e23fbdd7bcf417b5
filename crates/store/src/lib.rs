//! The store of one node: catalog, tiers, pipeline, placement, eviction and mover.

mod address;
mod block_store;
mod call_context;
mod call_options;
mod catalog;
mod change;
mod change_log;
mod changes;
mod circuits;
mod config;
pub mod conformance;
mod erase;
pub mod eviction;
mod explain;
mod find;
mod flush;
mod flush_mark;
mod health;
mod history;
mod hot;
mod insight;
mod ledger;
mod mover;
mod named_pool;
mod names;
mod not_erased;
mod outcome;
mod pipeline;
mod pipeline_error;
mod policy_kind;
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
mod shadow_figure;
pub mod stage;
mod stage_health;
mod state;
mod stats;
mod store;
mod store_core;
mod traffic;
mod warm;
mod warm_stats;
mod write_through;

pub use block_store::BlockStore;
pub use call_options::{CallOptions, WriterId};
pub use change::{Change, ChangeCursor, Changes};
pub use config::{
    EncryptionConfig, FileLayout, FilesConfig, IoEngine, KeepPool, StoreConfig, WritePolicy,
};
pub use erase::{EraseReport, TierEraseReport};
pub use eviction::Hints;
pub use explain::{BlockExplanation, BlockState, Explanation, NamespaceDifference, PresentBlock};
pub use flush_mark::FlushMark;
pub use health::HealthConfig;
pub use history::Loss;
pub use insight::{HotPrefix, TierBytes};
pub use ledger::{HeldId, HeldKind, HeldPiece, LeftoverPool, Process, leftover_pools};
pub use names::intern;
pub use not_erased::NotErased;
pub use outcome::{
    DeclineReason, GetOutcome, PrefixMatch, PrepareOutcome, Put, PutOutcome, PutSlab, StoreError,
    TierName, ViewOutcome,
};
pub use pipeline::Pipeline;
pub use pipeline_error::PipelineError;
pub use policy_kind::PolicyKind;
pub use request::Request;
pub use scrub::ScrubReport;
pub use secret::{SecretError, SecretReaders, read_secret};
pub use shadow_figure::{ShadowFigure, ShadowRates};
pub use stage_health::{CircuitHealth, HealthState, StageHealth};
pub use stats::{StoreCounters, StoreStats, TierHits};
pub use store::Store;
pub use warm_stats::WarmStats;
