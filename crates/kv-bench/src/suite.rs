//! The eleven workloads of the original's wrapper, and one comparison of their results.

pub mod comparison;
pub mod page;
pub mod plan;
pub mod table;
mod workload;

pub use workload::{Length, SuiteWorkload, parse_list};
