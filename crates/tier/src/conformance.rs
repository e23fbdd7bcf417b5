//! The conformance suites: checks of a tier, and of a whole store.

pub mod block_store;
pub mod tier;
