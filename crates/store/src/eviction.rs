//! Eviction: which blocks leave a tier first.

mod hints;

pub use hints::{Hints, Priority, StopReason};
