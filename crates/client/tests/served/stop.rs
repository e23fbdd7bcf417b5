//! Processes that are stopped with SIGSTOP and go on later: clients, and the node.

use std::time::Duration;

use cascade_client::{Client, ConnectOptions};
use cascade_store::{BlockStore, PutOutcome, StoreError, ViewOutcome};
use rustix::process::Signal;

use crate::child::Process;
use crate::host::{Host, NOW, hits, keys, pause, put, timed, wait_until, within};

#[test]
fn a_stopped_client_keeps_its_share_and_no_more() {
    let host = Host::start(|_| {});
    let witness = host.connect();
    let some = keys(0..16);
    put(&witness, &some, 64 << 10, NOW);
    let mut holder = Process::start("child::holder", &host.socket);
    holder.await_ready();
    holder.signal(Signal::STOP);
    // Others replace everything that is not held, several times over.
    for first in (1000..1600).step_by(8) {
        let others = keys(first..first + 8);
        let outcomes = put(&witness, &others, 256 << 10, NOW);
        assert!(!outcomes.iter().any(|o| matches!(o, PutOutcome::Failed(_))), "{outcomes:?}");
        hits(&others, &witness.view(&others, NOW));
    }
    let held = (16 * (64 << 10)) + 8192;
    wait_until("only the stopped client holds something", || host.held_bytes() == held);
    holder.signal(Signal::CONT);
    holder.poke();
    // It compares the bytes that it holds, and puts what it had reserved.
    holder.await_ready();
    assert_eq!(hits(&keys(900..901), &witness.view(&keys(900..901), NOW)), 1);
    holder.signal(Signal::STOP);
    holder.kill();
    wait_until("what it held comes back", || host.held_bytes() == 0);
    drop(witness);
    host.assert_nothing_leaks();
}

#[test]
fn a_stopped_node_costs_a_call_its_deadline_and_the_next_ones_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("cascade.sock");
    let mut node = Process::start("child::node", &socket);
    node.await_ready();
    let client = Client::connect(ConnectOptions::new(&socket)).unwrap();
    let some = keys(0..8);
    put(&client, &some, 4096, NOW);
    let views = client.view(&some, NOW);
    let session = client.welcome().unwrap().session;
    node.signal(Signal::STOP);
    let (late, took) = timed(|| client.view(&some, within(1000)));
    assert!(matches!(late[0], ViewOutcome::Failed(StoreError::Timeout { .. })), "{late:?}");
    // Alone it takes 1.0 s; among tests that keep every processor busy, somewhat more.
    assert!(took < Duration::from_secs(5), "{took:?} of 1 s");
    for _ in 0..100 {
        let (views, took) = timed(|| client.view(&some, within(60_000)));
        assert!(matches!(views[0], ViewOutcome::Miss), "{views:?}");
        let outcomes = put(&client, &some, 4096, within(60_000));
        assert!(matches!(outcomes[0], PutOutcome::Failed(StoreError::Away { .. })), "{outcomes:?}");
        assert!(took < Duration::from_secs(5), "a call waits for a node that is away: {took:?}");
    }
    assert_eq!(hits(&some, &views), 8, "views need no node");
    node.signal(Signal::CONT);
    wait_until("the node is found again", || client.welcome().is_some());
    assert_eq!(client.welcome().unwrap().session, session, "it is the same session");
    wait_until("it serves", || hits(&some, &client.view(&some, NOW)) == 8);
    assert_eq!(hits(&some, &views), 8);
}

/// Connecting to a stopped node whose queue is full waited for as long as it was stopped.
#[test]
fn connecting_to_a_stopped_node_ends_by_its_deadline() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("cascade.sock");
    let listener = {
        use rustix::net::{
            AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket as make,
        };
        let listener = make(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        bind(&listener, &SocketAddrUnix::new(&socket).unwrap()).unwrap();
        listen(&listener, 1).unwrap();
        listener
    };
    let options =
        ConnectOptions { timeout: Duration::from_millis(300), ..ConnectOptions::new(&socket) };
    for _ in 0..5 {
        let (connected, took) = timed(|| Client::connect(options.clone()));
        let error = connected.expect_err("nobody accepts");
        assert!(matches!(error, StoreError::Away { .. }), "{error:?}");
        assert!(took < Duration::from_secs(5), "{took:?} of 300 ms");
    }
    pause(Duration::ZERO);
    drop(listener);
}

/// What clients held went back to the pool when the node stopped, and what the store did until it
/// was closed was done over their views.
#[test]
fn a_node_that_stops_leaves_views_as_they_are() {
    let mut host = Host::start(|_| {});
    let client = host.connect();
    let some = keys(0..16);
    put(&client, &some, 64 << 10, NOW);
    let views = client.view(&some, NOW);
    assert_eq!(hits(&some, &views), 16);
    host.stop();
    let store = host.store();
    for first in (1000..1600).step_by(8) {
        put(&store, &keys(first..first + 8), 256 << 10, NOW);
    }
    assert_eq!(hits(&some, &views), 16);
}
