//! Workloads with known answers, replay of recorded traces, and what they teach about eviction.

pub mod study;
pub mod trace;
