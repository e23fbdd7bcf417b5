//! One node's decisions: catalog, leases, tiers, pipeline, placement, eviction and mover.

mod config;
pub mod eviction;
mod outcome;

pub use config::{
    CallOptions, FileLayout, FilesConfig, IoEngine, PipelineError, PolicyKind, StoreConfig,
    WritePolicy,
};
pub use outcome::{
    DeclineReason, GetOutcome, PrefixMatch, Put, PutOutcome, StoreError, TierName, ViewOutcome,
};
