//! The command `cascade`: node operation, replay of traces, benchmarks and eviction studies.
#![expect(clippy::cast_precision_loss, reason = "53 bits are enough for printed figures")]

pub mod cli;
pub mod environment;
pub mod latency;
pub mod measure;
pub mod payload;
mod random;
pub mod replay;
pub mod report;
pub mod study;
pub mod trace;
