//! Traces of requests, their replay through a store, eviction studies, and the report of a replay.
#![expect(clippy::cast_precision_loss, reason = "53 bits are enough for printed figures")]

pub mod ceilings;
pub mod counts;
pub mod environment;
pub mod figures;
pub mod kernel_io;
pub mod latency;
pub mod pace;
pub mod payload;
pub mod random;
pub mod report;
pub mod result;
pub mod run;
pub mod study;
pub mod trace;
pub mod workload;
