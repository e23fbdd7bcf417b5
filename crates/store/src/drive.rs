//! What runs beside the calls: movers, probers, circuit breakers, the scrubber.

pub(crate) mod breaker;
pub(crate) mod mover;
pub(crate) mod prober;
pub(crate) mod scrub;
pub(crate) mod settle;
pub(crate) mod source_prober;
