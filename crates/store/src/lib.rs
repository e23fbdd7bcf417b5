//! One node's decisions: catalog, leases, tiers, pipeline, placement, eviction and mover.

mod block_store;
mod call;
mod catalog;
mod config;
pub mod eviction;
mod health;
mod mover;
mod names;
mod node;
mod outcome;
mod pipeline;
mod prepare;
mod prober;
mod put;
mod read;
mod request;
mod shedding;
pub mod stage;
mod state;
mod stats;
mod store;

pub use block_store::BlockStore;
pub use config::{
    CallOptions, FileLayout, FilesConfig, IoEngine, PipelineError, PolicyKind, StoreConfig,
    WritePolicy,
};
pub use health::{HealthConfig, HealthState, StageHealth};
pub use names::intern;
pub use outcome::{
    DeclineReason, GetOutcome, PrefixMatch, Prepared, Put, PutOutcome, PutSlab, StoreError,
    TierName, ViewOutcome,
};
pub use pipeline::Pipeline;
pub use request::{Hints, Request};
pub use stats::{Counters, Stats, TierHits};
pub use store::Store;
