//! Connections that say nothing, of this user and of others; clients whose connections are gone.

use std::io::Write;
use std::os::unix::net::UnixStream;

use cascade_client::{Client, ConnectOptions};
use cascade_store::{BlockStore, PutOutcome, StoreError, ViewOutcome};

use crate::child::{Process, SOCKET, await_poke, say_ready, variable};
use crate::host::{Host, NOW, hits, keys, put, wait_until};

/// Each of 3,000 idle connections kept its place for half a second: a new client timed out.
#[test]
fn a_client_gets_in_past_thousands_of_silent_connections() {
    let host = Host::start(|_| {});
    let mut crowd = Process::start("crowd::silent", &host.socket);
    crowd.await_ready();
    for _ in 0..5 {
        let client = host.connect();
        put(&client, &keys(0..4), 4096, NOW);
        assert_eq!(hits(&keys(0..4), &client.view(&keys(0..4), NOW)), 4);
    }
    crowd.kill();
    host.assert_nothing_leaks();
}

#[test]
#[ignore = "runs as a child"]
fn silent() {
    let Some(socket) = variable(SOCKET) else { return };
    // Hard limits of descriptors differ; most of them let 3,000 be.
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let most = limit.maximum.unwrap_or(1 << 20);
    let raised = rustix::process::Rlimit { current: Some(most.min(8192)), ..limit };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
    let mut streams = Vec::new();
    while streams.len() < 3000 {
        let Ok(stream) = UnixStream::connect(&socket) else { break };
        streams.push(stream);
        if streams.len() == 2000 {
            say_ready();
        }
    }
    await_poke();
}

/// A flood of a user who is no tenant was read, answered and logged one by one.
#[test]
fn users_who_are_no_tenant_are_refused_and_keep_nobody_out() {
    use std::os::unix::fs::PermissionsExt;
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let host = Host::start(|_| {});
    for path in [host.socket.as_path(), host.socket.parent().unwrap()] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
    }
    let mut crowd = Process::start_as(65_534, "crowd::foreign", &host.socket);
    crowd.await_ready();
    for _ in 0..5 {
        let client = host.connect();
        put(&client, &keys(0..4), 4096, NOW);
        assert_eq!(hits(&keys(0..4), &client.view(&keys(0..4), NOW)), 4);
    }
    crowd.kill();
    host.assert_nothing_leaks();
}

#[test]
#[ignore = "runs as a child"]
fn foreign() {
    let Some(socket) = variable(SOCKET) else { return };
    let error = Client::connect(ConnectOptions::new(&socket)).unwrap_err();
    let StoreError::Refused { reason, .. } = &error else { panic!("{error:?}") };
    assert!(reason.contains("user 65534 is no tenant"), "{reason}");
    say_ready();
    loop {
        drop(UnixStream::connect(&socket));
    }
}

#[test]
fn an_empty_token_is_refused() {
    let host = Host::start(|_| {});
    for token in [Vec::new(), b" \n".to_vec(), b"not a tenant's token".to_vec()] {
        let options = ConnectOptions { token: Some(token), ..ConnectOptions::new(&host.socket) };
        let error = Client::connect(options).unwrap_err();
        assert!(matches!(error, StoreError::Refused { .. }), "{error:?}");
    }
}

/// They stayed for as long as the process lived, although no connection could release them.
#[test]
fn leases_of_a_process_without_connection_or_mapping_come_back() {
    let host = Host::start(|_| {});
    let witness = host.connect();
    put(&witness, &keys(0..4), 1 << 20, NOW);
    let mut child = Process::start("crowd::unmapped", &host.socket);
    child.await_ready();
    wait_until("its leases come back while it lives", || host.held_bytes() == 0);
    let new = keys(100..107);
    let outcomes = put(&witness, &new, 1 << 20, NOW);
    assert!(outcomes.iter().all(|it| matches!(it, PutOutcome::Stored)), "{outcomes:?}");
    child.kill();
    drop(witness);
    host.assert_nothing_leaks();
}

/// Leases blocks by hand, without mapping the pool, and closes its connection.
#[test]
#[ignore = "runs as a child"]
fn unmapped() {
    let Some(socket) = variable(SOCKET) else { return };
    let mut stream = UnixStream::connect(&socket).unwrap();
    stream.write_all(&crate::lies::hello()).unwrap();
    stream.write_all(&crate::lies::lease(0..4)).unwrap();
    stream.write_all(&crate::lies::ping()).unwrap();
    crate::lies::await_answers(&mut stream, 3);
    drop(stream);
    say_ready();
    await_poke();
}

/// A process that still has the pool mapped reads on in its views, whatever became of its
/// connections; when it unmaps the pool, they come back.
#[test]
fn leases_of_a_process_that_has_the_pool_mapped_stay_until_it_unmaps_it() {
    let host = Host::start(|_| {});
    let witness = host.connect();
    put(&witness, &keys(0..4), 1 << 20, NOW);
    let mut child = Process::start("crowd::disconnected", &host.socket);
    child.await_ready();
    wait_until("its connections are gone", || {
        host.node.clients().iter().any(|client| client.connections == 0)
    });
    for first in (100..200).step_by(4) {
        put(&witness, &keys(first..first + 4), 1 << 20, NOW);
    }
    assert_eq!(host.held_bytes(), 4 << 20);
    child.poke();
    child.await_ready();
    wait_until("its leases come back while it lives", || {
        drop(host.connect());
        host.held_bytes() == 0
    });
    child.kill();
    drop(witness);
    host.assert_nothing_leaks();
}

#[test]
#[ignore = "runs as a child"]
fn disconnected() {
    use std::os::fd::AsFd;

    use rustix::process::{PidfdFlags, PidfdGetfdFlags};
    let Some(socket) = variable(SOCKET) else { return };
    let before = sockets();
    let client = Client::connect(ConnectOptions::new(&socket)).unwrap();
    let views = client.view(&keys(0..4), NOW);
    assert_eq!(hits(&keys(0..4), &views), 4);
    client.contains(&keys(0..1));
    for number in sockets().into_iter().filter(|number| !before.contains(number)) {
        // The kernel reopens no socket by its name, so a process asks for its own descriptor.
        let me = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty());
        let socket = rustix::process::pidfd_getfd(me.unwrap(), number, PidfdGetfdFlags::empty());
        let socket = socket.unwrap();
        rustix::net::shutdown(socket.as_fd(), rustix::net::Shutdown::Both).unwrap();
    }
    say_ready();
    await_poke();
    assert_eq!(hits(&keys(0..4), &views), 4, "what it reads stays as it was");
    // It ends without a message: the node has to detect that.
    drop(client);
    drop(views);
    say_ready();
    await_poke();
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

/// A client that had rested while the node was started anew missed in its first calls.
#[test]
fn the_first_call_after_a_rest_finds_the_next_node() {
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
            // Those that noticed find it as soon as the others.
            let views = clients[0].view(&keys(0..4), NOW);
            assert!(views.iter().all(|view| matches!(view, ViewOutcome::Miss)), "{views:?}");
        }
        crate::host::pause(std::time::Duration::from_millis(20));
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
