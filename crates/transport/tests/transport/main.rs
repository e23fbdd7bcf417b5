//! Connections over TCP and shared memory: conformance, faults, and peers that lie.

mod faults;
mod lies;
mod stream;
