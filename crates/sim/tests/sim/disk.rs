//! The simulated disk: crashes, power losses, late transfers, faults, and the file tier on it.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod crashes;
mod faults;
mod fixture;
mod tier;
mod transfers;
