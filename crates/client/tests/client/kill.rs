//! Clients killed with SIGKILL at random points: the node keeps serving and releases their holds.
//!
//! 60 kills by default; the slow gate runs 500 with `CASCADE_KILL_ROUNDS=500`. A failure means
//! that a dead client's memory is not released, or that a block has wrong bytes.

use std::time::Duration;

use cascade_tier::BlockStore;

use crate::child::{Process, variable};
use crate::test_node::{NOW, TestNode, hits, keys, pause, wait_until};

#[test]
fn holds_of_killed_clients_are_released_and_no_block_is_damaged() {
    let rounds: u64 = variable("CASCADE_KILL_ROUNDS").map_or(60, |text| text.parse().unwrap());
    let host = TestNode::start(|_| {});
    let witness = host.connect();
    let mut random = u64::from(std::process::id());
    let mut found = 0;
    for _ in 0..rounds {
        let mut child = Process::start("child::busy_client", &host.socket);
        child.await_ready();
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        pause(Duration::from_micros((random >> 33) % 60_000));
        child.kill();
        wait_until("the dead client's session ends", || host.node.clients().len() == 1);
        for some in keys(0..420).chunks(60) {
            // `hits` compares every byte.
            found += hits(some, &witness.view(some, NOW));
        }
        wait_until("no client holds anything", || host.held_bytes() == 0);
    }
    assert!(found > 0, "no block was found, so the test proves nothing");
    drop(witness);
    host.assert_nothing_leaks();
}

/// Other tests of this process open descriptors too, so the node runs in a child process.
#[test]
fn descriptors_of_killed_clients_are_closed() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("cascade.sock");
    let mut node = Process::start("child::node", &socket);
    node.await_ready();
    let count = || std::fs::read_dir(node.descriptors()).unwrap().count();
    let before = count();
    for _ in 0..10 {
        let mut child = Process::start("child::busy_client", &socket);
        child.await_ready();
        child.kill();
    }
    wait_until("all descriptors are closed", || count() == before);
}
