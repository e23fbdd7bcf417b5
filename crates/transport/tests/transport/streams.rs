//! Connections of several streams: batches that are divided among them.
#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::io::{Read as _, Write as _, copy};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, RwLock};
use std::thread;
use std::time::Duration;

use cascade_runtime::{Deadline, SystemClock, sleep};
use cascade_transport::conformance::{Numbers, soon};
use cascade_transport::{
    Access, Batch, Connection, Direction, Endpoint, EndpointConfig, Listener, Piece, Place,
    Refusal, Region, RegionId, TransportError,
};

use crate::proofs::TOKEN;

const BYTES: usize = 16 << 20;

struct Pair {
    client: Endpoint,
    local: RegionId,
    server: Endpoint,
    remote: RegionId,
    connection: Arc<dyn Connection>,
    listener: Listener,
}

fn endpoint(access: Access) -> (Endpoint, RegionId) {
    let token = Some(TOKEN.to_vec());
    let config = EndpointConfig { token, streams: 4, ..Default::default() };
    let endpoint = Endpoint::new(config).unwrap();
    let region = endpoint.register(Region::shared(BYTES, access).unwrap()).unwrap();
    (endpoint, region)
}

fn listen(endpoint: &Endpoint) -> (Listener, SocketAddr) {
    let listener = endpoint.listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.tcp_address().unwrap();
    (listener, address)
}

fn pair() -> Pair {
    let (server, remote) = endpoint(Access::BOTH);
    let (listener, address) = listen(&server);
    let (client, local) = endpoint(Access::LOCAL);
    let connection = client.connect_tcp(address, soon()).unwrap();
    Pair { client, local, server, remote, connection, listener }
}

impl Pair {
    fn piece(&self, remote: u64, bytes: usize) -> Piece {
        Piece {
            local: Place { region: self.local, offset: 0 },
            remote: Place { region: self.remote, offset: remote },
            bytes: bytes as u64,
        }
    }

    fn fill(&self, seed: u64) -> Vec<u8> {
        let bytes = Numbers(seed).bytes(BYTES);
        self.client.fill(self.local, 0, &bytes).unwrap();
        bytes
    }

    fn at_server(&self) -> Vec<u8> {
        let mut bytes = vec![0; BYTES];
        self.server.fetch(self.remote, 0, &mut bytes).unwrap();
        bytes
    }
}

fn now() -> Deadline {
    Deadline::at(cascade_runtime::now())
}

#[test]
fn the_notice_of_a_divided_batch_comes_after_the_bytes_of_all_streams() {
    let pair = pair();
    for round in 0..10 {
        let bytes = pair.fill(round);
        let pieces = [pair.piece(0, BYTES)];
        let notice = [u8::try_from(round).unwrap()];
        let batch = Batch { direction: Direction::Write, pieces: &pieces, notice: Some(&notice) };
        let mut ticket = pair.connection.post(&batch, soon()).unwrap();
        // Also when the thread that posted does not wait.
        assert_eq!(pair.server.next_notice(soon()).unwrap().bytes[..], notice);
        assert!(pair.at_server() == bytes, "round {round}");
        ticket.wait(soon()).unwrap();
        assert_eq!(pair.server.next_notice(now()), None);
    }
}

#[test]
fn a_part_that_is_refused_fails_the_batch_and_its_notice_is_not_sent() {
    let pair = pair();
    let pieces = [pair.piece(1, BYTES)];
    let batch = Batch { direction: Direction::Write, pieces: &pieces, notice: Some(b"all") };
    let refused = pair.connection.post(&batch, soon()).unwrap().wait(soon());
    let is_out_of_bounds = |error: &TransportError| {
        matches!(error, TransportError::Refused { refusal: Refusal::OutOfBounds, .. })
    };
    assert!(refused.as_ref().is_err_and(is_out_of_bounds), "{refused:?}");
    assert_eq!(pair.server.next_notice(Deadline::after(&SystemClock, SHORT)), None);
    let pieces = [pair.piece(0, BYTES)];
    let batch = Batch { direction: Direction::Read, pieces: &pieces, notice: None };
    pair.connection.post(&batch, soon()).unwrap().wait(soon()).unwrap();
}

/// Long enough for a notice that is sent by mistake.
const SHORT: Duration = Duration::from_millis(200);

#[test]
fn a_cancelled_batch_leaves_the_memory() {
    let pair = pair();
    for direction in [Direction::Write, Direction::Read] {
        let pieces = [pair.piece(0, BYTES)];
        let batch = Batch { direction, pieces: &pieces, notice: None };
        pair.connection.post(&batch, soon()).unwrap().cancel(soon());
        let bytes = pair.fill(7);
        let mut after = vec![0; BYTES];
        pair.client.fetch(pair.local, 0, &mut after).unwrap();
        assert!(after == bytes, "{direction:?}");
        assert!(pair.connection.is_open(), "the peer answers, so nothing was cut");
    }
    pair.client.unregister(pair.local, soon()).unwrap();
}

/// The answers of the peer arrive after the cancellation has ended.
#[test]
fn bytes_that_arrive_after_a_cancellation_are_not_written() {
    let (server, remote) = endpoint(Access::BOTH);
    server.fill(remote, 0, &vec![1; BYTES]).unwrap();
    let (_listener, target) = listen(&server);
    let gate = Arc::new(RwLock::new(()));
    let address = pass_through(vec![target], Some(Arc::clone(&gate)));
    let (client, local) = endpoint(Access::LOCAL);
    let connection = client.connect_tcp(address, soon()).unwrap();
    let closed = gate.write().unwrap();
    let place = |region| Place { region, offset: 0 };
    let pieces = [Piece { local: place(local), remote: place(remote), bytes: BYTES as u64 }];
    let batch = Batch { direction: Direction::Read, pieces: &pieces, notice: None };
    let ticket = connection.post(&batch, soon()).unwrap();
    sleep(SHORT);
    ticket.cancel(Deadline::after(&SystemClock, SHORT));
    drop(closed);
    sleep(SHORT);
    let mut after = vec![0; BYTES];
    client.fetch(local, 0, &mut after).unwrap();
    assert!(after.iter().all(|byte| *byte == 0));
    client.unregister(local, soon()).unwrap();
}

/// While no answer arrives, parts wait for each stream until no more may.
#[test]
fn a_batch_that_finds_no_place_in_time_moves_nothing_and_the_others_arrive() {
    let (server, remote) = endpoint(Access::BOTH);
    let (_listener, target) = listen(&server);
    let gate = Arc::new(RwLock::new(()));
    let address = pass_through(vec![target], Some(Arc::clone(&gate)));
    let (client, local) = endpoint(Access::LOCAL);
    client.fill(local, 0, &vec![1; BYTES]).unwrap();
    let connection = client.connect_tcp(address, soon()).unwrap();
    let half = BYTES as u64 / 2;
    let post = |offset, deadline| {
        let local = Place { region: local, offset: 0 };
        let pieces = [Piece { local, remote: Place { region: remote, offset }, bytes: half }];
        let batch = Batch { direction: Direction::Write, pieces: &pieces, notice: None };
        connection.post(&batch, deadline)
    };
    let closed = gate.write().unwrap();
    let mut tickets = vec![];
    let error = loop {
        match post(0, Deadline::after(&SystemClock, SHORT)) {
            Ok(ticket) => tickets.push(ticket),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, TransportError::Deadline { .. }), "{error}");
    assert!(tickets.len() > 10, "{}", tickets.len());
    assert!(post(half, Deadline::after(&SystemClock, SHORT)).is_err());
    drop(closed);
    for mut ticket in tickets {
        ticket.wait(soon()).unwrap();
    }
    let mut after = vec![0; BYTES];
    server.fetch(remote, 0, &mut after).unwrap();
    let (written, left) = after.split_at(BYTES / 2);
    assert!(written.iter().all(|byte| *byte == 1), "the batches that were posted have arrived");
    assert!(left.iter().all(|byte| *byte == 0), "nothing of the others was written");
    post(half, soon()).unwrap().wait(soon()).unwrap();
}

/// What happened: each batch takes the next stream. A write that was cancelled waited in a buffer
/// of the first one, the next write of the same block took the second one and was confirmed, and
/// then the bytes of the first write came.
#[test]
fn a_cancelled_write_does_not_arrive_after_the_next_one() {
    let (server, remote) = endpoint(Access::BOTH);
    let (_listener, target) = listen(&server);
    let gate = Arc::new(RwLock::new(()));
    let address = pass_on(target, &gate);
    let (client, local) = endpoint(Access::LOCAL);
    let connection = client.connect_tcp(address, soon()).unwrap();
    let place = |region| Place { region, offset: 0 };
    let batch = |pieces: &[Piece], deadline| {
        let batch = Batch { direction: Direction::Write, pieces, notice: None };
        connection.post(&batch, deadline)
    };
    let piece = |bytes| Piece { local: place(local), remote: place(remote), bytes };
    // The second one is divided among the streams.
    for bytes in [1 << 16, BYTES] {
        client.fill(local, 0, &vec![1; BYTES]).unwrap();
        let closed = gate.write().unwrap();
        // More than one for each of the four streams, so that the next one takes another stream.
        let given_up = [(); 5].map(|()| batch(&[piece(1 << 16)], soon()).unwrap());
        sleep(SHORT);
        for ticket in given_up {
            ticket.cancel(soon());
        }
        assert!(connection.is_open());
        client.fill(local, 0, &vec![2; BYTES]).unwrap();
        let pieces = [piece(bytes as u64)];
        let late = batch(&pieces, Deadline::after(&SystemClock, SHORT));
        assert!(matches!(late, Err(TransportError::Deadline { .. })), "{late:?}");
        thread::scope(|scope| {
            let waits = scope.spawn(|| batch(&pieces, soon())?.wait(soon()));
            sleep(SHORT);
            drop(closed);
            waits.join().unwrap().unwrap();
        });
        sleep(SHORT);
        let mut after = vec![0; bytes];
        server.fetch(remote, 0, &mut after).unwrap();
        assert!(after.iter().all(|byte| *byte == 2), "{bytes} bytes");
    }
}

#[test]
fn a_stopped_listener_ends_all_streams() {
    let pair = pair();
    assert_eq!(pair.listener.peer_count(), 4);
    pair.listener.stop();
    let pieces = [pair.piece(0, BYTES)];
    let batch = Batch { direction: Direction::Write, pieces: &pieces, notice: None };
    let lost = pair.connection.post(&batch, soon()).and_then(|mut ticket| ticket.wait(soon()));
    assert!(matches!(lost, Err(TransportError::Lost { .. })), "{lost:?}");
    assert!(!pair.connection.is_open());
}

/// A load balancer in front of two endpoints: half of a batch would go to the wrong one.
#[test]
fn streams_that_lead_to_different_endpoints_are_refused() {
    let (first, _) = endpoint(Access::BOTH);
    let (second, _) = endpoint(Access::BOTH);
    let (listeners, targets): (Vec<_>, Vec<_>) = [&first, &second].map(listen).into_iter().unzip();
    let address = pass_through(targets, None);
    let (client, _) = endpoint(Access::LOCAL);
    let refused = client.connect_tcp(address, soon()).unwrap_err();
    assert!(refused.to_string().contains("different endpoints"), "{refused}");
    drop(listeners);
}

/// Passes connections on to each target in turn. Answers pass while the gate is not held.
fn pass_through(targets: Vec<SocketAddr>, gate: Option<Arc<RwLock<()>>>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for (client, target) in listener.incoming().zip(targets.iter().cycle()) {
            let (client, server) = (client.unwrap(), TcpStream::connect(target).unwrap());
            let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            thread::spawn(move || copy(&mut from, &mut to));
            let gate = gate.clone();
            thread::spawn(move || answer(server, client, gate.as_deref()));
        }
    });
    address
}

/// Passes connections on. Requests of the first one pass while the gate is not held.
fn pass_on(target: SocketAddr, gate: &Arc<RwLock<()>>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let gate = Arc::clone(gate);
    thread::spawn(move || {
        for (client, number) in listener.incoming().zip(0..) {
            let (client, server) = (client.unwrap(), TcpStream::connect(target).unwrap());
            let (from, to) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            thread::spawn(move || answer(from, to, None));
            let gate = Arc::clone(&gate);
            thread::spawn(move || answer(client, server, (number == 0).then_some(&*gate)));
        }
    });
    address
}

fn answer(mut from: TcpStream, mut to: TcpStream, gate: Option<&RwLock<()>>) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let _open = gate.map(|gate| gate.read().unwrap());
        if to.write_all(&buffer[..count]).is_err() {
            return;
        }
    }
}

#[test]
fn the_number_of_streams_is_limited() {
    for streams in [0, 17] {
        let config = EndpointConfig { streams, ..Default::default() };
        assert!(Endpoint::new(config).is_err(), "{streams}");
    }
}
