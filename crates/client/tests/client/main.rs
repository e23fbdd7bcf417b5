//! A node and its clients: normal operation, failures of either side, and limits.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

mod child;
mod conformance;
mod crowd;
mod deadlines;
mod full_disk;
mod kill;
mod long_calls;
mod peers;
mod put_and_view;
mod raw_client;
mod restart;
mod shares;
#[path = "../../../disk/tests/disk/small_disk.rs"]
mod small_disk;
mod stop;
mod test_node;
mod traffic;
