//! What the store knows and decides, without I/O or threads: catalog, state, eviction, circuits.

pub(crate) mod additions;
pub(crate) mod awaited;
pub(crate) mod bound;
pub(crate) mod catalog;
pub(crate) mod change_log;
pub(crate) mod circuit;
pub mod eviction;
pub(crate) mod fetching;
pub(crate) mod flush_mark;
pub(crate) mod health_signal;
pub(crate) mod history;
pub(crate) mod located;
pub(crate) mod lower_tier;
pub(crate) mod memory_tier;
pub(crate) mod pending;
pub(crate) mod queue;
pub(crate) mod state;
pub(crate) mod usable;
