//! One client exhausts its share of a resource; other clients are not affected.
//!
//! The greedy client is a child process, because a share belongs to a process, however often it
//! connects.

use std::io::Write;
use std::os::unix::net::UnixStream;

use cascade_block::{Manifest, Namespace, TenantSecret};
use cascade_client::{Client, ConnectOptions};
use cascade_store::FilesConfig;
use cascade_tier::{BlockStore, PutOutcome, StoreError, ViewOutcome};
use cascade_wire::{Call, KeyQuestion};

use crate::child::{Process, SOCKET, await_resume, report_ready, variable};
use crate::test_node::{NOW, TestNode, hits, key, keys, put, wait_until, within};

/// Blocks of one byte that the greedy client leases.
const TINY: std::ops::Range<u64> = 0..40_000;

fn host_with_named_pool() -> TestNode {
    TestNode::start(|config| {
        config.store.dram_bytes = 64 << 20;
        config.pool_directory = config.socket.parent().map(ToOwned::to_owned);
    })
}

/// Reads and puts of another client: all 20 of each.
fn assert_is_served(client: &Client) {
    let old = keys(1_000_000..1_000_020);
    let views = client.view(&old, NOW);
    assert_eq!(hits(&old, &views), 20, "{views:?}");
    drop(views);
    let new = keys(2_000_000..2_000_020);
    let outcomes = put(client, &new, 4096, NOW);
    let is_stored = |outcome: &PutOutcome| matches!(outcome, PutOutcome::Stored);
    assert!(outcomes.iter().all(is_stored), "{outcomes:?}");
    assert_eq!(client.delete(&new), [true; 20]);
}

fn victim(host: &TestNode) -> Client {
    let client = host.connect();
    put(&client, &keys(1_000_000..1_000_020), 4096, NOW);
    client
}

/// Runs the child until it has exhausted its share, and checks another client before and after the
/// child is killed.
fn with_greedy(role: &str, host: &TestNode) {
    let client = victim(host);
    let mut greedy = Process::start(role, &host.socket);
    greedy.await_ready();
    assert_is_served(&client);
    // Killed, so that the node has to release everything.
    greedy.kill();
    wait_until("its holds are released", || host.held_bytes() == 0);
    assert_is_served(&client);
    drop(client);
    host.assert_nothing_leaks();
}

fn connect() -> Option<Client> {
    Some(Client::connect(ConnectOptions::new(variable(SOCKET)?)).unwrap())
}

/// 16,384 leases of one byte each filled the ledger: other clients could neither read nor write.
#[test]
fn leases_of_one_client_leave_ledger_places_to_others() {
    with_greedy("shares::lease_tiny_blocks", &host_with_named_pool());
}

#[test]
#[ignore = "runs as a child"]
fn lease_tiny_blocks() {
    let Some(client) = connect() else { return };
    let all = keys(TINY);
    for some in all.chunks(2048) {
        put(&client, some, 1, NOW);
    }
    let views = client.view(&all, NOW);
    let held = hits(&all, &views);
    assert!(held >= 10_000, "{held} small views in a pool of 64 MiB");
    let refused = views.iter().find(|view| matches!(view, ViewOutcome::Failed(_)));
    let Some(ViewOutcome::Failed(error @ StoreError::Limit { .. })) = refused else {
        panic!("{held} views, then {refused:?}");
    };
    assert!(error.to_string().contains("release some"), "{error}");
    report_ready();
    await_resume();
}

/// With 32 MiB of leases, a put of 31 MiB stored one block and left 29 MiB free.
#[test]
fn a_put_uses_all_memory_that_is_not_leased() {
    let host = TestNode::start(|config| config.store.dram_bytes = 64 << 20);
    let client = host.connect();
    for round in 0..3 {
        let old = keys(round * 1000..round * 1000 + 63);
        put(&client, &old, 1 << 20, NOW);
        let mut holder = Process::start("shares::lease_share_of_dram", &host.socket);
        holder.await_ready();
        let new = keys(round * 1000 + 500..round * 1000 + 531);
        let outcomes = put(&client, &new, 1 << 20, NOW);
        let is_stored = |outcome: &&PutOutcome| matches!(outcome, PutOutcome::Stored);
        let stored = outcomes.iter().filter(is_stored).count();
        let pool = host.stats().pool;
        assert_eq!(stored, 31, "round {round}: {outcomes:?}, {pool:?}");
        assert_eq!(hits(&new, &client.view(&new, NOW)), 31);
        holder.kill();
        wait_until("its holds are released", || host.held_bytes() == 0);
    }
    drop(client);
    host.assert_nothing_leaks();
}

/// Leases as many stored blocks as its share allows.
#[test]
#[ignore = "runs as a child"]
fn lease_share_of_dram() {
    let Some(client) = connect() else { return };
    let mut views = Vec::new();
    for round in 0..3 {
        for key in keys(round * 1000..round * 1000 + 63).iter().step_by(2) {
            let view = client.view(&[*key], NOW).remove(0);
            if matches!(view, ViewOutcome::Hit { .. }) {
                views.push(view);
            }
        }
    }
    assert!(views.len() >= 30, "{} views", views.len());
    report_ready();
    await_resume();
}

/// Shares belonged to sessions: two of them could hold the whole pool.
#[test]
fn a_process_has_one_share_for_all_its_sessions() {
    with_greedy("shares::reserve_in_many_sessions", &host_with_named_pool());
}

#[test]
#[ignore = "runs as a child"]
fn reserve_in_many_sessions() {
    let clients: Vec<_> = (0..4).filter_map(|_| connect()).collect();
    let Some(first) = clients.first() else { return };
    let share = first.welcome().unwrap().hold_bytes_max;
    let mut slabs = Vec::new();
    for client in &clients {
        while let Ok(slab) = client.reserve(1 << 20, within(1000)) {
            slabs.push(slab);
        }
    }
    assert_eq!(slabs.len() as u64, share >> 20);
    let error = first.reserve(1 << 20, within(1000)).unwrap_err();
    assert!(matches!(error, StoreError::Limit { most, .. } if most == share), "{error:?}");
    report_ready();
    await_resume();
}

/// Pins were not counted: one client could pin the whole pool, and no other could put a block.
#[test]
fn pins_of_one_client_leave_memory_to_others() {
    with_greedy(
        "shares::pin_share_of_dram",
        &TestNode::start(|config| config.store.dram_bytes = 64 << 20),
    );
}

#[test]
#[ignore = "runs as a child"]
fn pin_share_of_dram() {
    let Some(client) = connect() else { return };
    let share = client.welcome().unwrap().hold_bytes_max;
    let all = keys(0..200);
    let pinned = all.iter().filter(|key| {
        put(&client, &[**key], 1 << 20, NOW);
        client.pin(&[**key])[0]
    });
    assert_eq!(pinned.count() as u64, share >> 20);
    report_ready();
    await_resume();
}

#[test]
fn a_removed_pin_no_longer_counts() {
    let host = TestNode::start(|config| config.store.dram_bytes = 64 << 20);
    let client = host.connect();
    let all = keys(0..16);
    put(&client, &all, 1 << 20, NOW);
    for round in 0..10 {
        assert_eq!(client.pin(&all), [true; 16], "round {round}");
        assert_eq!(client.pin(&all), [true; 16], "a second pin of a block is free");
        let gone = match round % 3 {
            0 => [client.unpin(&all), client.unpin(&all)].concat(),
            1 => client.delete(&all),
            _ => {
                client.clear();
                Vec::new()
            }
        };
        assert!(gone.iter().all(|is_gone| *is_gone), "{gone:?}");
        put(&client, &all, 1 << 20, NOW);
    }
    drop(client);
    host.assert_nothing_leaks();
}

/// A tenant's list of namespaces is one message, which one client could make too long for all.
#[test]
fn namespaces_of_one_client_leave_room_for_those_of_others() {
    let host = TestNode::start(|config| config.store.dram_bytes = 64 << 20);
    let client = victim(&host);
    let mut greedy = Process::start("shares::register_namespaces", &host.socket);
    greedy.await_ready();
    let mine = Namespace::new(Manifest::new().with("weights", "mine"), &TenantSecret::new("s"));
    client.register(&mine, NOW).unwrap();
    client.register(&mine, NOW).unwrap();
    let listed = client.manifests(NOW).unwrap();
    assert!(listed.iter().any(|(id, _)| *id == mine.id()), "{} are listed", listed.len());
    assert_is_served(&client);
}

#[test]
#[ignore = "runs as a child"]
fn register_namespaces() {
    let Some(client) = connect() else { return };
    let long = "w".repeat(4000);
    let register = |number: u32| {
        let manifest = Manifest::new().with("weights", long.as_str());
        let manifest = manifest.with("number", number.to_string().as_str());
        client.register(&Namespace::new(manifest, &TenantSecret::new("s")), NOW)
    };
    let taken = (0..5000).take_while(|number| register(*number).is_ok()).count();
    assert!((10..1000).contains(&taken), "{taken} namespaces");
    let error = register(1 << 20).unwrap_err();
    assert!(matches!(error, StoreError::Limit { .. }), "{error:?}");
    register(0).unwrap();
    report_ready();
    await_resume();
}

/// Incomplete messages of one process could use up the input buffers of all connections.
#[test]
fn incomplete_messages_of_one_client_leave_buffers_to_others() {
    with_greedy(
        "shares::send_incomplete_messages",
        &TestNode::start(|config| config.store.dram_bytes = 64 << 20),
    );
}

#[test]
#[ignore = "runs as a child"]
fn send_incomplete_messages() {
    let Some(socket) = variable(SOCKET) else { return };
    let mut bytes = Vec::new();
    let call = Call::Ask { question: KeyQuestion::Contains, keys: vec![key(0); 65_000] };
    call.write(&mut bytes, 1, None).unwrap();
    let streams: Vec<_> = (0..400)
        .filter_map(|_| {
            let mut stream = UnixStream::connect(&socket).ok()?;
            stream.write_all(&crate::raw_client::hello()).ok()?;
            // The node closes connections beyond the share.
            drop(stream.write_all(&bytes[..bytes.len() - 1]));
            Some(stream)
        })
        .collect();
    report_ready();
    await_resume();
    drop(streams);
}

/// Many threads that put to a slow tier and prefetch continuously.
#[test]
fn queues_of_one_client_leave_room_for_other_clients() {
    let directory = tempfile::tempdir().unwrap();
    let host = TestNode::start(|config| {
        config.store.dram_bytes = 64 << 20;
        config.store.pipeline = "Dram|Files".to_owned();
        config.store.files = Some(FilesConfig {
            capacity_bytes: 128 << 20,
            segment_bytes: 16 << 20,
            ..FilesConfig::new(directory.path())
        });
    });
    let client = victim(&host);
    let mut greedy = Process::start("shares::fill_queues", &host.socket);
    greedy.await_ready();
    for _ in 0..5 {
        assert_is_served(&client);
    }
    greedy.kill();
    drop(client);
    host.assert_nothing_leaks();
}

#[test]
#[ignore = "runs as a child"]
fn fill_queues() {
    let Some(client) = connect() else { return };
    let flood = |first: u64| {
        for at in (first..).step_by(32) {
            let some = keys(at % 5000..at % 5000 + 32);
            put(&client, &some, 64 << 10, NOW);
            client.prefetch(&keys(0..5000));
            hits(&some, &client.view(&some, NOW));
            client.delete(&some[..8]);
        }
    };
    std::thread::scope(|scope| {
        for thread in 0..8 {
            scope.spawn(move || flood(thread * 600));
        }
        report_ready();
    });
}
