//! What runs beside the calls: movers, probers, circuit breakers, the scrubber.

pub(crate) mod breaker;
pub(crate) mod mover;
pub(crate) mod prober;
pub(crate) mod rate_limiter;
mod room;
pub(crate) mod scrub;
pub(crate) mod settle;
mod shrink;
pub(crate) mod source_prober;
