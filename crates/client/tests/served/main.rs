//! A node and its clients: what they do together, and what the one does when the other is gone.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

mod child;
mod conformance;
mod crowd;
mod deadlines;
mod first;
mod host;
mod kill;
mod lies;
mod long_calls;
mod restart;
mod shares;
#[path = "../../../disk/tests/small_disk/mod.rs"]
mod small_disk;
mod stop;
mod traffic;
mod trouble;
