//! Replay of a recorded trace through a real store, and the results.

pub mod assemble;
pub mod ceilings;
pub mod counts;
pub mod pace;
pub mod result;
pub mod run;
pub mod summary;
pub mod workload;
