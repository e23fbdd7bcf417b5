//! Floods of idle and refused connections, leases of clients that lost their connections, and
//! reconnects.

use std::io::Write;
use std::os::unix::net::UnixStream;

use cascade_client::{Client, ConnectOptions};
use cascade_tier::{BlockStore, PutOutcome, StoreError, ViewOutcome};

use crate::child::{Process, SOCKET, await_resume, report_ready, variable};
use crate::test_node::{NOW, TestNode, hits, keys, put, wait_until};

/// Each of 3,000 idle connections was kept for half a second, so a new client timed out.
#[test]
fn a_client_connects_despite_thousands_of_unauthenticated_connections() {
    let host = TestNode::start(|_| {});
    let mut flood = Process::start("crowd::open_unauthenticated", &host.socket);
    flood.await_ready();
    for _ in 0..5 {
        let client = host.connect();
        put(&client, &keys(0..4), 4096, NOW);
        assert_eq!(hits(&keys(0..4), &client.view(&keys(0..4), NOW)), 4);
    }
    flood.kill();
    host.assert_nothing_leaks();
}

#[test]
#[ignore = "runs as a child"]
fn open_unauthenticated() {
    let Some(socket) = variable(SOCKET) else { return };
    // The hard limit of descriptors differs between machines; most allow 3,000.
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let most = limit.maximum.unwrap_or(1 << 20);
    let raised = rustix::process::Rlimit { current: Some(most.min(8192)), ..limit };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
    let mut streams = Vec::new();
    while streams.len() < 3000 {
        let Ok(stream) = UnixStream::connect(&socket) else { break };
        streams.push(stream);
        if streams.len() == 2000 {
            report_ready();
        }
    }
    await_resume();
}

/// Connections of a user without a tenant were read, answered and logged one by one.
#[test]
fn a_flood_of_refused_connections_does_not_block_other_clients() {
    use std::os::unix::fs::PermissionsExt;
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let host = TestNode::start(|_| {});
    for path in [host.socket.as_path(), host.socket.parent().unwrap()] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
    }
    let mut flood = Process::start_as(65_534, "crowd::flood_without_tenant", &host.socket);
    flood.await_ready();
    for _ in 0..5 {
        let client = host.connect();
        put(&client, &keys(0..4), 4096, NOW);
        assert_eq!(hits(&keys(0..4), &client.view(&keys(0..4), NOW)), 4);
    }
    flood.kill();
    host.assert_nothing_leaks();
}

#[test]
#[ignore = "runs as a child"]
fn flood_without_tenant() {
    let Some(socket) = variable(SOCKET) else { return };
    let error = Client::connect(ConnectOptions::new(&socket)).unwrap_err();
    let StoreError::Refused { reason, .. } = &error else { panic!("{error:?}") };
    assert!(reason.contains("user 65534 belongs to no tenant"), "{reason}");
    report_ready();
    loop {
        drop(UnixStream::connect(&socket));
    }
}

#[test]
fn an_empty_token_is_refused() {
    let host = TestNode::start(|_| {});
    for token in [Vec::new(), b" \n".to_vec(), b"not a tenant's token".to_vec()] {
        let options = ConnectOptions { token: Some(token), ..ConnectOptions::new(&host.socket) };
        let error = Client::connect(options).unwrap_err();
        assert!(matches!(error, StoreError::Refused { .. }), "{error:?}");
    }
}

/// Such leases were kept until the process ended, although no connection could release them.
#[test]
fn leases_of_a_process_without_connection_or_mapping_are_released() {
    let host = TestNode::start(|_| {});
    let witness = host.connect();
    put(&witness, &keys(0..4), 1 << 20, NOW);
    let mut child = Process::start("crowd::lease_without_mapping", &host.socket);
    child.await_ready();
    wait_until("its leases are released while it runs", || host.held_bytes() == 0);
    let new = keys(100..107);
    let outcomes = put(&witness, &new, 1 << 20, NOW);
    assert!(outcomes.iter().all(|it| matches!(it, PutOutcome::Stored)), "{outcomes:?}");
    child.kill();
    drop(witness);
    host.assert_nothing_leaks();
}

/// Leases blocks without mapping the pool, and closes its connection.
#[test]
#[ignore = "runs as a child"]
fn lease_without_mapping() {
    let Some(socket) = variable(SOCKET) else { return };
    let mut stream = UnixStream::connect(&socket).unwrap();
    stream.write_all(&crate::raw_client::hello()).unwrap();
    stream.write_all(&crate::raw_client::lease(0..4)).unwrap();
    stream.write_all(&crate::raw_client::ping()).unwrap();
    crate::raw_client::await_answers(&mut stream, 3);
    drop(stream);
    report_ready();
    await_resume();
}

/// A process that still has the pool mapped can read its views after its connections are closed.
/// Its leases are released when it unmaps the pool.
#[test]
fn leases_of_a_process_that_has_the_pool_mapped_are_kept_until_it_unmaps_it() {
    let host = TestNode::start(|_| {});
    let witness = host.connect();
    put(&witness, &keys(0..4), 1 << 20, NOW);
    let mut child = Process::start("crowd::read_after_disconnect", &host.socket);
    child.await_ready();
    wait_until("its connections are closed", || {
        host.node.clients().iter().any(|client| client.connections == 0)
    });
    for first in (100..200).step_by(4) {
        put(&witness, &keys(first..first + 4), 1 << 20, NOW);
    }
    assert_eq!(host.held_bytes(), 4 << 20);
    child.resume();
    child.await_ready();
    wait_until("its leases are released while it runs", || {
        drop(host.connect());
        host.held_bytes() == 0
    });
    child.kill();
    drop(witness);
    host.assert_nothing_leaks();
}

#[test]
#[ignore = "runs as a child"]
fn read_after_disconnect() {
    use std::os::fd::AsFd;

    use rustix::process::{PidfdFlags, PidfdGetfdFlags};
    let Some(socket) = variable(SOCKET) else { return };
    let before = sockets();
    let client = Client::connect(ConnectOptions::new(&socket)).unwrap();
    let views = client.view(&keys(0..4), NOW);
    assert_eq!(hits(&keys(0..4), &views), 4);
    client.contains(&keys(0..1));
    for number in sockets().into_iter().filter(|number| !before.contains(number)) {
        // A socket cannot be reopened through /proc, so the process duplicates its own descriptor.
        let me = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty());
        let socket = rustix::process::pidfd_getfd(me.unwrap(), number, PidfdGetfdFlags::empty());
        let socket = socket.unwrap();
        rustix::net::shutdown(socket.as_fd(), rustix::net::Shutdown::Both).unwrap();
    }
    report_ready();
    await_resume();
    assert_eq!(hits(&keys(0..4), &views), 4, "its views are unchanged");
    // The session ends without a message: the node has to detect that.
    drop(client);
    drop(views);
    report_ready();
    await_resume();
}

/// Descriptors of this process that are sockets.
fn sockets() -> Vec<i32> {
    let all = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(Result::ok);
    all.filter(|entry| {
        let name = std::fs::read_link(entry.path());
        name.is_ok_and(|name| name.to_string_lossy().starts_with("socket:"))
    })
    .map(|entry| entry.file_name().to_string_lossy().parse().unwrap())
    .collect()
}

/// The first calls of a client that had been idle during a restart of the node were misses.
#[test]
fn the_first_call_after_a_restart_reconnects_to_the_new_node() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("cascade.sock");
    let mut node = Process::start("child::node", &socket);
    node.await_ready();
    let clients: Vec<_> =
        (0..4).map(|_| Client::connect(ConnectOptions::new(&socket)).unwrap()).collect();
    put(&clients[0], &keys(0..4), 4096, NOW);
    for round in 0..3 {
        node.kill();
        if round == 2 {
            // A client that has noticed reconnects as soon as the others.
            let views = clients[0].view(&keys(0..4), NOW);
            assert!(views.iter().all(|view| matches!(view, ViewOutcome::Miss)), "{views:?}");
        }
        crate::test_node::pause(std::time::Duration::from_millis(20));
        node = Process::start("child::node", &socket);
        node.await_ready();
        let outcomes = put(&clients[0], &keys(0..4), 4096, NOW);
        let is_stored = |one: &PutOutcome| matches!(one, PutOutcome::Stored);
        assert!(outcomes.iter().all(is_stored), "round {round}: {outcomes:?}");
        assert_eq!(clients[1].contains(&keys(0..4)), [true; 4], "round {round}");
        assert_eq!(hits(&keys(0..4), &clients[2].view(&keys(0..4), NOW)), 4, "round {round}");
        clients[3].flush(NOW).unwrap();
    }
}
