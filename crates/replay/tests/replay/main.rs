//! Traces are read, and studies of policies count what a store would.

mod files;
mod formats;
mod rows;
mod study;
mod trace;
