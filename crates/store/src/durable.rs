//! The named pool, its ledger, and the warm restart.

pub(crate) mod ledger;
pub(crate) mod named_pool;
pub(crate) mod warm;
