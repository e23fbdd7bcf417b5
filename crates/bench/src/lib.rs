//! Workloads with known answers, replay of recorded traces, and what they teach about eviction.
#![expect(clippy::cast_precision_loss, reason = "figures for people need no more than 53 bits")]

pub mod cli;
pub mod environment;
pub mod latency;
pub mod measure;
pub mod payload;
pub mod replay;
pub mod report;
pub mod study;
pub mod trace;
