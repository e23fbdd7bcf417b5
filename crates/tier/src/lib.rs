//! Requests, outcomes, errors and statistics of calls, which the store, its tiers, the client and
//! the wire share; the traits [`BlockStore`], [`tier::Tier`] and [`source::Source`], and a
//! conformance suite for each.
#![warn(clippy::disallowed_types)]

mod block_store;
mod call_options;
mod change;
pub mod conformance;
mod error;
mod health;
mod hints;
mod names;
mod outcome;
mod request;
pub mod source;
mod stats;
pub mod tier;

pub use block_store::BlockStore;
pub use call_options::{CallOptions, WriterId};
pub use change::{Change, ChangeCursor, Changes};
pub use error::{PipelineError, StoreError};
pub use health::{CircuitHealth, HealthState, StageHealth};
pub use hints::{Hints, Priority, StopReason};
pub use names::{TIERS_MAX, TierName, intern};
pub use outcome::{
    DeclineReason, GetOutcome, PrefixMatch, PrepareOutcome, Put, PutOutcome, PutSlab, ViewOutcome,
};
pub use request::Request;
pub use stats::{
    HoldTimes, ShadowFigure, ShadowRates, SourceStats, StoreCounters, StoreStats, TierHits,
    WarmStats,
};
