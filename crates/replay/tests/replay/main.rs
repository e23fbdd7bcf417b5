//! Traces are read, and studies of policies count what a store would.

mod study;
mod trace;
