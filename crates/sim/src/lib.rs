//! The simulator: real stores and endpoints on virtual time with simulated devices, each result
//! checked against a naive model. A seed decides everything.
#![forbid(unsafe_code)]
#![warn(clippy::disallowed_types)]

mod client;
mod content;
pub mod disk;
mod disturber;
mod finding;
mod kept_pool;
mod key_file;
mod lease;
mod model;
mod options;
mod profile;
mod report;
mod run;
mod tiers;
mod transport;
mod workers;
mod workload;
mod world;

pub use options::{Length, SimOptions, Subject, WORLD_OPERATIONS};
pub use report::{Seconds, SimResult, Violation};
pub use run::{Progress, Workers, run};
pub use workers::{Processes, serve};
