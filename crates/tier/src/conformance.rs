//! The conformance suites: checks of a tier, of a source, and of a whole store.

pub mod block_store;
pub mod source;
pub mod tier;
