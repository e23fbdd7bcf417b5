//! Replays a recorded trace through a real store and tells what the cache did.

pub mod assemble;
pub mod ceilings;
pub mod pace;
pub mod result;
pub mod run;
pub mod summary;
pub mod tally;
pub mod workload;
