//! Traffic statistics: shadow caches, hot prefixes, and why a block is missing.
//!
//! They have a lock of their own, taken after the state's lock is released, so that statistics
//! never hold the state's lock. Two requests may arrive here in the other order; the statistics
//! tolerate that.

pub(crate) mod explain;
pub(crate) mod hot;
pub(crate) mod prefixes;
pub(crate) mod shadow;
pub(crate) mod traffic;
