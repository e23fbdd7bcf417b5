//! One node's decisions: catalog, leases, tiers, pipeline, placement, eviction and mover.

mod block_store;
mod call;
mod catalog;
mod config;
pub mod eviction;
mod ledger;
mod mover;
mod node;
mod outcome;
mod pipeline;
mod put;
mod read;
mod request;
pub mod stage;
mod state;
mod stats;
mod store;
mod warm;

pub use block_store::BlockStore;
pub use config::{
    CallOptions, FileLayout, FilesConfig, IoEngine, KeepPool, PipelineError, PolicyKind,
    StoreConfig, WritePolicy,
};
pub use ledger::{HeldId, HeldKind, HeldPiece, Process, WarmStats};
pub use outcome::{
    DeclineReason, GetOutcome, PrefixMatch, Put, PutOutcome, PutSlab, StoreError, TierName,
    ViewOutcome,
};
pub use pipeline::Pipeline;
pub use request::{Hints, Request};
pub use stats::{Counters, Stats, TierHits};
pub use store::Store;
