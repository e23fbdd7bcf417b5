//! The named pool, its ledger, and the warm restart.

mod held;
pub(crate) mod ledger;
pub(crate) mod named_pool;
pub(crate) mod recovery;
pub(crate) mod warm;
