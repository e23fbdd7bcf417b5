//! `MLPerf` Storage's KV cache workload, run on an embedded store: the plan, the run, its figures.
//!
//! A run is deterministic in what it does: a seed determines each user's requests and each byte of
//! each block. It is honest in what it counts: rates are of bytes that moved within the window,
//! each byte read is compared with the one that was written, and a run that cannot be trusted says
//! why. [`compatible`] runs the workload as the original does, on files.
#![expect(clippy::cast_precision_loss, reason = "53 bits are enough for printed figures")]

mod audit;
pub mod autoscaler;
pub mod backend;
pub mod block_names;
pub mod compatible;
pub mod config_file;
pub mod criteria;
pub mod devices;
pub mod directory;
mod error;
pub mod export;
pub mod histogram;
pub mod measurements;
pub mod model;
pub mod model_config;
mod permits;
pub mod plan;
pub mod prepare;
pub mod progress;
pub mod qos;
mod queue;
pub mod recorded;
pub mod report;
pub mod result;
pub mod retrieval;
pub mod run;
pub mod samples;
pub mod settings_file;
pub mod spreadsheet;
pub mod store_backend;
pub mod submission;
pub mod suite;
pub mod timeline;
mod user_kind;
pub mod validation;
pub mod validity;
pub mod window;
pub mod workload_settings;

pub use error::KvBenchError;

/// Bytes of a GiB. The original's "gb" is a GiB everywhere.
pub const GIB: f64 = 1_073_741_824.0;
