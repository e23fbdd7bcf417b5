//! A killed node and its successor at the same socket.

use std::time::Duration;

use cascade_client::{Administrator, Client, ConnectOptions};
use cascade_tier::{BlockStore, PrepareOutcome, Put, PutOutcome, PutSlab, StoreError, ViewOutcome};

use crate::child::Process;
use crate::test_node::{NOW, bytes_of, hits, keys, put, timed, wait_until, within};

#[test]
fn calls_miss_at_once_after_a_kill_and_the_client_reconnects_to_the_successor() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("cascade.sock");
    let mut node = Process::start("child::node", &socket);
    node.await_ready();
    let client = Client::connect(ConnectOptions::new(&socket)).unwrap();
    let some = keys(0..8);
    put(&client, &some, 4096, NOW);
    let views = client.view(&some, NOW);
    let mut slab = client.reserve(4096, NOW).unwrap();
    let epoch = client.welcome().unwrap().epoch;
    node.kill();
    for _ in 0..100 {
        let (seen, took) = timed(|| client.view(&some, within(60_000)));
        assert!(matches!(seen[0], ViewOutcome::Miss), "{seen:?}");
        assert!(took < Duration::from_secs(20), "a call waits for a dead node: {took:?}");
        let outcomes = put(&client, &some[..1], 4096, within(60_000));
        let PutOutcome::Failed(StoreError::Unavailable { .. }) = outcomes[0] else {
            panic!("{outcomes:?}");
        };
    }
    assert_eq!(hits(&some, &views), 8, "held views stay mapped");
    let mut next = Process::start("child::node", &socket);
    next.await_ready();
    wait_until("the client has reconnected", || client.welcome().is_some_and(|w| w.epoch != epoch));
    assert!(put(&client, &some, 4096, NOW).iter().all(|o| matches!(o, PutOutcome::Stored)));
    let fresh = client.view(&some, NOW);
    assert_eq!((hits(&some, &views), hits(&some, &fresh)), (8, 8));
    // The new node refuses a slab of the dead node's pool.
    slab.fill_from(&bytes_of(&some[0], 4096)).unwrap();
    let key = keys(50..51)[0];
    let outcomes = client.put_slabs(vec![PutSlab::new(key, slab)], NOW);
    assert!(matches!(outcomes[0], PutOutcome::Failed(_)), "{outcomes:?}");
    assert_eq!(client.contains(&[key]), [false]);
    drop(views);
    assert_eq!(
        hits(&some, &client.view(&some, NOW)),
        8,
        "old holds are not released at the new node"
    );
}

/// The first request after a restart failed, because it was sent on the closed connection.
#[test]
fn the_first_request_of_an_administrator_after_a_restart_is_answered() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("cascade.sock");
    let mut node = Process::start("child::node", &socket);
    node.await_ready();
    let timeout = Duration::from_secs(30);
    let administrator = Administrator::connect(&socket, None, "test", timeout).unwrap();
    administrator.ping(timeout).unwrap();
    node.kill();
    let mut next = Process::start("child::node", &socket);
    next.await_ready();
    administrator.ping(timeout).unwrap();
}

#[test]
fn slabs_prepared_before_a_restart_cannot_be_sealed_after_it() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("cascade.sock");
    let mut node = Process::start("child::node", &socket);
    node.await_ready();
    let client = Client::connect(ConnectOptions::new(&socket)).unwrap();
    let (some, others) = (keys(0..8), keys(100..108));
    let prepare = |keys: &[_]| {
        let batch: Vec<_> = keys.iter().map(|key| Put::new(*key, &[])).collect();
        client.prepare(&batch, &vec![4096; keys.len()], NOW)
    };
    let (prepared, dropped) = (prepare(&some), prepare(&others));
    let epoch = client.welcome().unwrap().epoch;
    node.kill();
    wait_until("the client notices", || {
        let [PutOutcome::Failed(_)] = put(&client, &some[..1], 4096, within(60_000))[..] else {
            return false;
        };
        true
    });
    let (unavailable, took) = timed(|| prepare(&others));
    let is_unavailable = |one: &PrepareOutcome| {
        matches!(one, PrepareOutcome::Settled(PutOutcome::Failed(StoreError::Unavailable { .. })))
    };
    assert!(unavailable.iter().all(is_unavailable), "{unavailable:?}");
    assert!(took < Duration::from_secs(20), "a call waits for a dead node: {took:?}");
    let mut next = Process::start("child::node", &socket);
    next.await_ready();
    wait_until("the client has reconnected", || client.welcome().is_some_and(|w| w.epoch != epoch));
    assert!(put(&client, &others, 4096, NOW).iter().all(|o| matches!(o, PutOutcome::Stored)));
    let sealed = some.iter().zip(prepared).map(|(key, one)| {
        let PrepareOutcome::Slab(mut slab) = one else { panic!("{one:?}") };
        slab.host_mut().unwrap().fill(0xDB);
        PutSlab::new(*key, slab)
    });
    let outcomes = client.put_slabs(sealed.collect(), NOW);
    assert!(outcomes.iter().all(|o| matches!(o, PutOutcome::Failed(_))), "{outcomes:?}");
    drop(dropped);
    assert_eq!(client.contains(&some), [false; 8]);
    assert_eq!(
        hits(&others, &client.view(&others, NOW)),
        8,
        "old slabs are not released at the new node"
    );
}
