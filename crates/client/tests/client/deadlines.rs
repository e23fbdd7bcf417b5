//! Calls that time out in the node: everything that they were granted is released.

use std::sync::atomic::{AtomicBool, Ordering};

use cascade_tier::{BlockStore, PutOutcome, StoreError, ViewOutcome};

use crate::test_node::{TestNode, hits, keys, put, wait_until, within};

/// A call that timed out released its holds through another connection. The node could read the
/// release before the call, and then granted holds that were never released. Releases that were
/// sent along with a failed call were lost.
#[test]
fn calls_that_time_out_leave_nothing_held() {
    let host = TestNode::start(|config| config.limits.threads_max = 8);
    let client = host.connect();
    put(&host.store(), &keys(0..200), 4096, within(10_000));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let busy = |seed: u64| {
            let (host, is_over) = (&host, &is_over);
            move || {
                let other = host.connect();
                while !is_over.load(Ordering::Relaxed) {
                    hits(
                        &keys(seed..seed + 200),
                        &other.view(&keys(seed..seed + 200), within(5000)),
                    );
                }
            }
        };
        scope.spawn(busy(0));
        scope.spawn(busy(100));
        let impatient = |seed: u64| {
            let client = client.clone();
            move || {
                let mut late = 0;
                for round in 0..300 {
                    let some = keys(seed..seed + 200);
                    let views = client.view(&some, within(1));
                    hits(&some, &views);
                    late += u32::from(views.iter().any(|v| matches!(v, ViewOutcome::Failed(_))));
                    let new = seed * 1000 + round * 4;
                    let outcomes = put(&client, &keys(new..new + 4), 8192, within(1));
                    let failed = |outcome: &PutOutcome| matches!(outcome, PutOutcome::Failed(_));
                    late += u32::from(outcomes.iter().any(failed));
                }
                late
            }
        };
        let impatient: Vec<_> = (0..4).map(|seed| scope.spawn(impatient(seed))).collect();
        let ended: Vec<_> =
            impatient.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        // Before anything here panics: the scope waits for the other threads.
        is_over.store(true, Ordering::Relaxed);
        let late: u32 = ended.into_iter().map(Result::unwrap).sum();
        assert!(late > 0, "no call timed out, so the test proves nothing");
    });
    // The client stays connected, so only its own releases can end its holds.
    wait_until("the client holds nothing", || {
        client.contains(&keys(0..1));
        host.held_bytes() == 0
    });
    let some = keys(0..4);
    wait_until("the client is served", || hits(&some, &client.view(&some, within(5000))) == 4);
    drop(client);
    host.assert_nothing_leaks();
}

/// A put copied its whole batch after its deadline, although it could no longer seal a block.
#[test]
fn a_put_copies_nothing_after_its_deadline() {
    let host = TestNode::start(|config| config.store.dram_bytes = 64 << 20);
    let client = host.connect();
    let new = keys(0..32);
    wait_until("a put is late while it copies", || {
        let outcomes = put(&client, &new, 1 << 20, within(2));
        let is_copy = |outcome: &PutOutcome| {
            let PutOutcome::Failed(StoreError::Timeout { operation, .. }) = outcome else {
                return false;
            };
            *operation == "copy a put"
        };
        client.delete(&new);
        outcomes.iter().any(is_copy)
    });
    wait_until("the client holds nothing", || {
        client.contains(&new);
        host.held_bytes() == 0
    });
    drop(client);
    host.assert_nothing_leaks();
}
