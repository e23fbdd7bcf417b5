//! What a lost connection leaves: bytes that arrive late, and threads.
//!
//! What happened: in a simulated world, a client lost its connection, made another one, and wrote
//! a block, which was confirmed. Then the server read what the first connection had left in a
//! buffer, and the block had bytes of an earlier write. The client's next connection ends the
//! first one now.
#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use cascade_runtime::{Deadline, SystemClock, sleep, thread};
use cascade_transport::conformance::soon;
use cascade_transport::{
    Access, Batch, Connection, Direction, Endpoint, EndpointConfig, Heartbeat, Limits, Piece,
    Place, Region, RegionId,
};

use crate::proofs::TOKEN;
use rustix::io::Errno;

const BYTES: usize = 4 << 20;

fn endpoint(access: Access) -> (Endpoint, RegionId) {
    let stall_timeout = Duration::from_secs(60);
    let limits = Limits { stall_timeout, ..Default::default() };
    let config = EndpointConfig { token: Some(TOKEN.to_vec()), limits, ..Default::default() };
    let endpoint = Endpoint::new(config).unwrap();
    let region = endpoint.register(Region::shared(BYTES, access).unwrap()).unwrap();
    (endpoint, region)
}

/// Passes bytes on to the target while the gate is not held, also after the client has closed.
struct Gate {
    address: SocketAddr,
    closed: Arc<RwLock<()>>,
    has_passed_all: Arc<AtomicBool>,
}

fn pass(mut from: TcpStream, mut to: TcpStream, gate: &RwLock<()>) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let _open = gate.read().unwrap();
        if to.write_all(&buffer[..count]).is_err() {
            return;
        }
    }
}

impl Gate {
    fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let closed = Arc::new(RwLock::new(()));
        let has_passed_all = Arc::new(AtomicBool::new(false));
        let (gate, done) = (Arc::clone(&closed), Arc::clone(&has_passed_all));
        thread::spawn(move || {
            let (client, _) = listener.accept().unwrap();
            let server = TcpStream::connect(target).unwrap();
            let (from, to) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            thread::spawn(move || pass(from, to, &RwLock::new(())));
            pass(client, server, &gate);
            done.store(true, Ordering::Release);
        });
        Self { address, closed, has_passed_all }
    }
}

fn write(
    connection: &dyn Connection,
    (client, local, remote): (&Endpoint, RegionId, RegionId),
    byte: u8,
    deadline: Deadline,
) -> bool {
    client.fill(local, 0, &vec![byte; BYTES]).unwrap();
    let place = |region| Place { region, offset: 0 };
    let pieces = [Piece { local: place(local), remote: place(remote), bytes: BYTES as u64 }];
    let batch = Batch { direction: Direction::Write, pieces: &pieces, notice: None };
    connection.post(&batch, deadline).and_then(|mut ticket| ticket.wait(deadline)).is_ok()
}

#[test]
fn a_lost_connection_writes_nothing_after_its_successor_was_made() {
    let (server, remote) = endpoint(Access::BOTH);
    let listener = server.listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
    let target = listener.tcp_address().unwrap();
    let gate = Gate::to(target);
    let (client, local) = endpoint(Access::LOCAL);
    let places = (&client, local, remote);
    let first = client.connect_tcp(gate.address, soon()).unwrap();
    let held = gate.closed.write().unwrap();
    let briefly = Deadline::after(&SystemClock, Duration::from_millis(300));
    assert!(!write(&*first, places, 1, briefly), "nothing passes");
    first.close();
    let second = client.connect_tcp(target, soon()).unwrap();
    assert!(write(&*second, places, 2, soon()));
    drop(held);
    for _ in 0..100 {
        if gate.has_passed_all.load(Ordering::Acquire) {
            break;
        }
        sleep(Duration::from_millis(20));
    }
    sleep(Duration::from_millis(200));
    let mut block = vec![0; BYTES];
    server.fetch(remote, 0, &mut block).unwrap();
    assert!(block.iter().all(|byte| *byte == 2), "the confirmed bytes are there");
    assert_eq!(listener.peer_count(), 1, "the first one has ended");
}

/// Connections that are in use are not ended by new ones.
#[test]
fn connections_of_one_endpoint_live_side_by_side() {
    let (server, remote) = endpoint(Access::BOTH);
    let listener = server.listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
    let target = listener.tcp_address().unwrap();
    let (client, local) = endpoint(Access::LOCAL);
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let client = client.clone();
            thread::spawn(move || client.connect_tcp(target, soon()).unwrap())
        })
        .collect();
    let connections: Vec<_> = threads.into_iter().map(|it| it.join().unwrap()).collect();
    for (connection, byte) in connections.iter().zip(1..) {
        assert!(write(&**connection, (&client, local, remote), byte, soon()));
    }
    connections[3].close();
    let ninth = client.connect_tcp(target, soon()).unwrap();
    assert!(write(&*ninth, (&client, local, remote), 9, soon()));
    assert!(write(&*connections[7], (&client, local, remote), 10, soon()));
    assert_eq!(listener.peer_count(), 8);
}

/// Threads of this process with this name.
fn threads_named(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("the kernel lists them");
    let is_named = |task: &std::io::Result<std::fs::DirEntry>| {
        let path = task.as_ref().expect("the kernel lists them").path().join("comm");
        let ended = [Errno::NOENT, Errno::SRCH].map(Errno::raw_os_error).map(Some);
        match std::fs::read_to_string(path) {
            Ok(found) => found.trim() == name,
            Err(error) if ended.contains(&error.raw_os_error()) => false,
            Err(error) => panic!("{error}"),
        }
    };
    tasks.filter(is_named).count()
}

/// What happened: the thread with the heartbeats of a connection slept until its next one, however
/// long ago the connection had ended, so that reconnecting without end took all threads.
#[test]
fn an_ended_connection_leaves_no_thread_however_seldom_its_heartbeats_are() {
    let (server, _) = endpoint(Access::BOTH);
    let listener = server.listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
    let interval = Duration::from_secs(24 * 3600);
    let heartbeat = Some(Heartbeat { interval, limit: Duration::from_secs(1) });
    let limits = Limits { heartbeat, ..Default::default() };
    let config = EndpointConfig { token: Some(TOKEN.to_vec()), limits, ..Default::default() };
    let client = Endpoint::new(config).unwrap();
    let connect = || client.connect_tcp(listener.tcp_address().unwrap(), soon()).unwrap();
    let wait_until = |is_done: fn(usize) -> bool| {
        let end = soon();
        while !is_done(threads_named("transport-beat")) {
            assert!(!end.has_passed(&SystemClock), "{} threads", threads_named("transport-beat"));
            sleep(Duration::from_millis(5));
        }
    };
    let connections = [(); 8].map(|()| connect());
    wait_until(|threads| threads == 8);
    drop(connections);
    wait_until(|threads| threads == 0);
}
