//! The workload as the original benchmark runs it: whole requests as files, counted as it counts.
//!
//! The default mode measures Cascade's store. This one measures the disk as the original does, so
//! that its figures can stand beside published results. It shares the figures, the criteria and the
//! result file with the default mode, and neither the store nor the plan of its requests.

pub mod criteria;
mod document_count;
pub mod documents;
pub mod entry;
pub mod figures;
pub mod io_log;
pub mod logged;
pub mod mersenne_twister;
mod object_file;
pub mod plan;
mod queue;
mod recorded_plan;
mod result;
pub mod run;
pub mod tail;
mod unmeasured;
pub mod waterfall;
