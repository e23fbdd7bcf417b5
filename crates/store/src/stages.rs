//! The stages and filters of the store, and the registry of those that a pipeline may name.

mod context;
pub(crate) mod encryption;
mod fake;
mod files;
pub(crate) mod guard;
mod host_buffers;
mod pipeline;
mod records;
mod registry;
pub(crate) mod source_guard;
mod source_list;
pub(crate) mod sources;
pub(crate) mod staging;

pub use context::StageContext;
pub use encryption::EncryptedStage;
pub use fake::FakeTier;
pub use files::{open_files, open_files_with};
pub use pipeline::Pipeline;
pub use records::{RecordAnswer, RecordBuffer, RecordCall, RecordStage, Records, UnsealedRecord};
pub use registry::{StageFactory, StageRegistry};
pub use source_list::SourceList;
