//! Calls whose time runs out while the node is at them: nothing that they were granted is lost.

use std::sync::atomic::{AtomicBool, Ordering};

use cascade_store::{BlockStore, PutOutcome, ViewOutcome};

use crate::host::{Host, hits, keys, put, wait_until, within};

/// A call that timed out gave its holds back through another connection. The node could read that
/// before the call itself, and then granted what nobody would ever give back. And what had been
/// given back along with a call that failed was never sent.
#[test]
fn calls_that_run_out_of_time_leave_nothing_held() {
    let host = Host::start(|config| config.limits.threads_max = 8);
    let client = host.connect();
    put(&host.store(), &keys(0..200), 4096, within(10_000));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let busy = |seed: u64| {
            let (host, is_over) = (&host, &is_over);
            move || {
                let noise = host.connect();
                while !is_over.load(Ordering::Relaxed) {
                    hits(
                        &keys(seed..seed + 200),
                        &noise.view(&keys(seed..seed + 200), within(5000)),
                    );
                }
            }
        };
        scope.spawn(busy(0));
        scope.spawn(busy(100));
        let hasty = |seed: u64| {
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
        let hasty: Vec<_> = (0..4).map(|seed| scope.spawn(hasty(seed))).collect();
        let late: u32 = hasty.into_iter().map(|thread| thread.join().unwrap()).sum();
        is_over.store(true, Ordering::Relaxed);
        assert!(late > 0, "no call ran out of time; the test shows nothing");
    });
    // The client stays connected, so nothing but its own giving back can empty its hands.
    wait_until("the client holds nothing", || {
        client.contains(&keys(0..1));
        host.held_bytes() == 0
    });
    let some = keys(0..4);
    wait_until("the client is served", || hits(&some, &client.view(&some, within(5000))) == 4);
    drop(client);
    host.assert_nothing_leaks();
}
