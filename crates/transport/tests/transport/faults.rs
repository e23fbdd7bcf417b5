//! Connections through a proxy that misbehaves, peers that are killed, frames that lie.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cascade_runtime::{Clock, Deadline, SystemClock, sleep};
use cascade_transport::conformance::{Numbers, soon};
use cascade_transport::wire::{Challenge, HEADER_BYTES, Header, Hello, Kind};
use cascade_transport::{
    Access, Batch, Connection, Direction, Endpoint, EndpointConfig, Heartbeat, Limits, Listener,
    Piece, Place, Refusal, Region, RegionId, TlsConfig, TransportError,
};

use crate::proofs::{TOKEN, proof};
use crate::proxy::Proxy;
use crate::tls::subject;

pub(crate) const BYTES: usize = 4 << 20;

fn endpoint(access: Access, limits: Limits, streams: usize) -> (Endpoint, RegionId) {
    let token = Some(TOKEN.to_vec());
    with_region(access, EndpointConfig { token, limits, streams, ..Default::default() })
}

pub(crate) fn with_region(access: Access, config: EndpointConfig) -> (Endpoint, RegionId) {
    let endpoint = Endpoint::new(config).expect("valid");
    let region = endpoint
        .register(Region::shared(BYTES, access).expect("memory"))
        .expect("it works on loopback");
    (endpoint, region)
}

/// A server, and a client that is connected to it through a proxy.
pub(crate) struct Pair {
    pub(crate) client: Endpoint,
    pub(crate) local: RegionId,
    pub(crate) server: Endpoint,
    pub(crate) remote: RegionId,
    pub(crate) connection: Arc<dyn Connection>,
    pub(crate) proxy: Arc<Proxy>,
    pub(crate) listener: Listener,
}

impl Pair {
    pub(crate) fn new(limits: Limits) -> Self {
        Self::with_streams(limits, 1)
    }

    pub(crate) fn with_streams(limits: Limits, streams: usize) -> Self {
        Self::of(endpoint(Access::BOTH, limits, 1), endpoint(Access::LOCAL, limits, streams))
    }

    pub(crate) fn with_tls(client: &TlsConfig, server: &TlsConfig) -> Self {
        let [server, client] = [(Access::BOTH, server), (Access::LOCAL, client)]
            .map(|(access, tls)| with_region(access, subject::config(Some(tls.clone()))));
        Self::of(server, client)
    }

    pub(crate) fn of(
        (server, remote): (Endpoint, RegionId),
        (client, local): (Endpoint, RegionId),
    ) -> Self {
        let listener = server
            .listen_tcp("127.0.0.1:0".parse().expect("it works on loopback"))
            .expect("it works on loopback");
        let (proxy, address) = Proxy::start(listener.tcp_address().expect("it works on loopback"));
        let connection = client.connect_tcp(address, soon()).expect("it works on loopback");
        Self { client, local, server, remote, connection, proxy, listener }
    }

    pub(crate) fn pieces(&self, bytes: usize) -> [Piece; 1] {
        [Piece {
            local: Place { region: self.local, offset: 0 },
            remote: Place { region: self.remote, offset: 0 },
            bytes: bytes as u64,
        }]
    }

    pub(crate) fn run(
        &self,
        direction: Direction,
        deadline: Deadline,
    ) -> Result<(), TransportError> {
        let pieces = self.pieces(BYTES);
        let batch = Batch { direction, pieces: &pieces, notice: Some(b"arrived") };
        self.connection.post(&batch, deadline)?.wait(deadline)
    }
}

/// Whether the region of the target has exactly these bytes.
pub(crate) fn has(endpoint: &Endpoint, region: RegionId, expected: &[u8]) -> bool {
    let mut actual = vec![0; expected.len()];
    endpoint.fetch(region, 0, &mut actual).expect("it works on loopback");
    actual == expected
}

fn beating() -> Limits {
    let (interval, limit) = (Duration::from_millis(20), Duration::from_millis(400));
    Limits { heartbeat: Some(Heartbeat { interval, limit }), ..Limits::default() }
}

fn is_lost(pair: &Pair) -> bool {
    let deadline = soon();
    while pair.connection.is_open() && !deadline.has_passed(&SystemClock) {
        sleep(Duration::from_millis(5));
    }
    !pair.connection.is_open()
}

#[test]
fn a_peer_that_freezes_is_noticed_without_a_call() {
    let pair = Pair::new(beating());
    pair.run(Direction::Write, soon()).expect("it works on loopback");
    sleep(Duration::from_millis(100));
    assert!(pair.connection.is_open(), "it answers");
    pair.proxy.freeze_at.store(0, Ordering::Relaxed);
    assert!(is_lost(&pair), "nothing was called");
    let error = pair.run(Direction::Write, soon()).unwrap_err();
    assert!(matches!(error, TransportError::Lost { .. }), "{error}");
    assert!(error.to_string().contains("it answered nothing for 0.4 s"), "{error}");
}

#[test]
fn a_slow_peer_is_no_frozen_one() {
    let pair = Pair::new(beating());
    // The answer takes longer than the limit of a heartbeat.
    pair.proxy.answer_delay_ms.store(10, Ordering::Relaxed);
    pair.run(Direction::Read, soon()).expect("it only takes time");
    assert!(pair.connection.is_open());
}

#[test]
fn no_flipped_bit_is_taken_for_success() {
    let mut numbers = Numbers(1);
    let mut found = 0;
    for round in 0..60 {
        let direction = [Direction::Write, Direction::Read][round % 2];
        let pair = Pair::new(Limits::default());
        let bytes = numbers.bytes(BYTES);
        let (from, into) = match direction {
            Direction::Write => ((&pair.client, pair.local), (&pair.server, pair.remote)),
            Direction::Read => ((&pair.server, pair.remote), (&pair.client, pair.local)),
        };
        from.0.fill(from.1, 0, &bytes).unwrap();
        // Half of the flips are in the first and last bytes, where the headers are.
        let near = [numbers.below(400), BYTES as u64 + numbers.below(400)];
        let far = numbers.below(BYTES as u64 + 300);
        let at = if round % 4 < 2 { near[round / 4 % 2] } else { far };
        pair.proxy.at(&pair.proxy.flip_at, at);
        let deadline = Deadline::after(&SystemClock, Duration::from_secs(20));
        match pair.run(direction, deadline) {
            // The flip was after the last byte of the batch.
            Ok(()) => assert!(has(into.0, into.1, &bytes), "round {round}: wrong bytes confirmed"),
            Err(error) => {
                found += 1;
                assert!(
                    !matches!(error, TransportError::Deadline { .. }),
                    "round {round}, byte {at}: {error}"
                );
                if matches!(error, TransportError::Refused { .. }) {
                    pair.run(direction, deadline).expect("the connection goes on");
                    assert!(has(into.0, into.1, &bytes));
                }
            }
        }
        let notice = pair.server.next_notice(Deadline::at(SystemClock.monotonic()));
        if notice.is_some() && direction == Direction::Write {
            assert!(has(into.0, into.1, &bytes), "round {round}: told of bytes that are wrong");
        }
    }
    assert!(found > 40, "only {found} flips hit the batch");
}

#[test]
fn a_cut_connection_fails_and_another_one_works() {
    let mut numbers = Numbers(2);
    for round in 0..24 {
        let direction = [Direction::Write, Direction::Read][round % 2];
        let pair = Pair::new(Limits::default());
        pair.proxy.at(&pair.proxy.cut_at, numbers.below(BYTES as u64));
        let error = pair.run(direction, soon()).unwrap_err();
        assert!(matches!(error, TransportError::Lost { .. }), "round {round}: {error}");
        assert!(!pair.connection.is_open());
        let error = pair.run(direction, soon()).unwrap_err();
        assert!(matches!(error, TransportError::Lost { .. }), "round {round}: {error}");
        // Nothing is held: the regions can be unregistered at once.
        pair.client.unregister(pair.local, soon()).unwrap();
        pair.server.unregister(pair.remote, soon()).unwrap();
    }
}

#[test]
fn a_frozen_peer_holds_nobody_beyond_the_deadline() {
    for direction in [Direction::Write, Direction::Read] {
        for after in [0, 20, 1000, 3 << 20] {
            let limits = Limits { stall_timeout: Duration::from_millis(300), ..Limits::default() };
            let pair = Pair::new(limits);
            pair.proxy.at(&pair.proxy.freeze_at, after);
            let deadline = Deadline::after(&SystemClock, Duration::from_millis(200));
            let error = pair.run(direction, deadline).unwrap_err();
            let is_expected =
                matches!(error, TransportError::Deadline { .. } | TransportError::Lost { .. });
            assert!(is_expected, "{error}");
            // The ticket was dropped: no batch of this side uses the region any more.
            pair.client.unregister(pair.local, soon()).unwrap();
            // The server gives up by itself.
            pair.server.unregister(pair.remote, soon()).unwrap();
        }
    }
}

/// With several streams, their threads had not seen a cancel without time in time.
#[test]
fn a_cancelled_read_leaves_its_connection_open() {
    for streams in [1, 4] {
        let pair = Pair::with_streams(Limits::default(), streams);
        pair.proxy.freeze_at.store(0, Ordering::Relaxed);
        let pieces = pair.pieces(BYTES);
        let batch = Batch { direction: Direction::Read, pieces: &pieces, notice: None };
        let ticket = pair.connection.post(&batch, soon()).unwrap();
        // Usually enough for the threads of the streams to wait for their answers.
        sleep(Duration::from_millis(100));
        ticket.cancel(Deadline::at(Duration::ZERO));
        assert!(pair.connection.is_open(), "{streams} streams");
        pair.client.unregister(pair.local, Deadline::at(Duration::ZERO)).unwrap();
    }
}

#[test]
fn bytes_that_arrive_one_by_one_arrive() {
    let pair = Pair::new(Limits::default());
    pair.proxy.piece.store(1, Ordering::Relaxed);
    let bytes = Numbers(3).bytes(5000);
    pair.client.fill(pair.local, 0, &bytes).unwrap();
    let pieces = pair.pieces(bytes.len());
    for direction in [Direction::Write, Direction::Read] {
        let batch = Batch { direction, pieces: &pieces, notice: Some(b"slow") };
        pair.connection.post(&batch, soon()).unwrap().wait(soon()).unwrap();
        assert!(has(&pair.server, pair.remote, &bytes));
    }
}

#[test]
fn a_peer_that_sends_byte_by_byte_holds_nobody_for_ever() {
    // It always makes progress, so that it never stalls, but the header of its answer takes longer
    // than it may.
    let limits = Limits { stall_timeout: Duration::from_secs(4), ..Limits::default() };
    let pair = Pair::new(limits);
    pair.proxy.piece.store(1, Ordering::Relaxed);
    pair.proxy.answer_delay_ms.store(150, Ordering::Relaxed);
    let pieces = pair.pieces(1 << 20);
    let batch = Batch { direction: Direction::Read, pieces: &pieces, notice: None };
    let mut ticket = pair.connection.post(&batch, soon()).unwrap();
    let error = ticket.wait(soon()).unwrap_err();
    assert!(error.to_string().contains("too slowly"), "{error}");
    pair.server.unregister(pair.remote, soon()).unwrap();
}

#[test]
fn a_deadline_that_has_passed_is_an_error_and_the_batch_can_be_waited_for() {
    let pair = Pair::new(Limits::default());
    let pieces = pair.pieces(BYTES);
    let batch = Batch { direction: Direction::Read, pieces: &pieces, notice: None };
    let mut ticket = pair.connection.post(&batch, soon()).unwrap();
    let error = ticket.wait(Deadline::at(Duration::ZERO)).unwrap_err();
    assert!(matches!(error, TransportError::Deadline { .. }), "{error}");
    ticket.wait(soon()).unwrap();
}

#[test]
fn notices_that_nobody_reads_are_refused_and_not_collected_without_limit() {
    let pair = Pair::new(Limits { notices_max: 6, ..Limits::default() });
    let run = || {
        let batch = Batch { direction: Direction::Write, pieces: &[], notice: Some(b"n") };
        pair.connection.post(&batch, soon()).unwrap().wait(soon())
    };
    for _ in 0..3 {
        run().unwrap();
    }
    let error = run().unwrap_err();
    assert!(matches!(error, TransportError::Refused { refusal: Refusal::Busy, .. }), "{error}");
    pair.server.next_notice(soon()).unwrap();
    run().unwrap();
}

/// Speaks the protocol by hand.
struct Stranger(TcpStream);

impl Stranger {
    fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).expect("it works on loopback");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("it works on loopback");
        Self(stream)
    }

    fn send(&mut self, kind: Kind, body: &[u8]) {
        let header = Header::new(kind, 0).with_body(body).to_bytes();
        self.0.write_all(&header).expect("it works on loopback");
        self.0.write_all(body).expect("it works on loopback");
    }

    fn receive(&mut self) -> (Header, Vec<u8>) {
        let mut header = [0; HEADER_BYTES];
        self.0.read_exact(&mut header).expect("it works on loopback");
        let header = Header::parse(&header).expect("it works on loopback");
        let mut body = vec![0; header.body_bytes as usize];
        self.0.read_exact(&mut body).expect("it works on loopback");
        (header, body)
    }

    /// Says hello and returns its body.
    fn hello(&mut self, version_min: u16, version_max: u16) -> Vec<u8> {
        // Each stranger is another endpoint.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let stranger = u128::from(NEXT.fetch_add(1, Ordering::Relaxed));
        let hello = Hello {
            version_min,
            version_max,
            capabilities: u64::MAX,
            id: stranger.to_le_bytes(),
            nonce: [2; 32],
            name: "stranger".to_owned(),
            geometry: vec![],
            number: 1,
            live: vec![],
        };
        let hello = hello.to_bytes();
        self.send(Kind::Hello, &hello);
        hello
    }

    /// Whether the peer closes the connection.
    fn is_closed(&mut self) -> bool {
        let mut rest = vec![];
        match self.0.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

fn server(token: Option<Vec<u8>>) -> (Endpoint, Listener, SocketAddr) {
    server_with(token, Duration::from_secs(60))
}

fn server_with(
    token: Option<Vec<u8>>,
    handshake_timeout: Duration,
) -> (Endpoint, Listener, SocketAddr) {
    let limits = Limits { handshake_timeout, peers_max: 4, ..Limits::default() };
    let server = Endpoint::new(EndpointConfig { token, limits, ..Default::default() })
        .expect("it works on loopback");
    server
        .register(Region::shared(4096, Access::BOTH).expect("it works on loopback"))
        .expect("it works on loopback");
    let listener = server
        .listen_tcp("127.0.0.1:0".parse().expect("it works on loopback"))
        .expect("it works on loopback");
    let address = listener.tcp_address().expect("it works on loopback");
    (server, listener, address)
}

#[test]
fn a_later_version_gets_the_common_one_and_an_incompatible_one_a_reason() {
    let (_server, _listener, address) = server(None);
    let mut later = Stranger::connect(address);
    later.hello(1, 9);
    let (header, body) = later.receive();
    assert_eq!(header.kind, Kind::Challenge);
    assert_eq!(Challenge::parse(&body).unwrap().version, 1);
    let mut incompatible = Stranger::connect(address);
    incompatible.hello(2, 9);
    let (header, body) = incompatible.receive();
    assert_eq!(header.kind, Kind::Refusal);
    assert!(String::from_utf8(body).unwrap().contains("2 to 9 were offered"));
    assert!(incompatible.is_closed());
}

#[test]
fn frames_before_the_proof_are_refused() {
    let (_server, _listener, address) = server(Some(TOKEN.to_vec()));
    let mut stranger = Stranger::connect(address);
    stranger.hello(1, 1);
    assert_eq!(stranger.receive().0.kind, Kind::Challenge);
    stranger.send(Kind::Read, &[0; 16]);
    let (header, _) = stranger.receive();
    assert_eq!(header.kind, Kind::Refusal);
    assert!(stranger.is_closed());
    let mut wrong = Stranger::connect(address);
    wrong.hello(1, 1);
    wrong.receive();
    wrong.send(Kind::Proof, &[0; 32]);
    let (header, body) = wrong.receive();
    assert_eq!((header.kind, &*body), (Kind::Refusal, &b"the token is wrong"[..]));
}

#[test]
fn a_silent_connection_ends_with_the_time_of_the_handshake() {
    // Long enough for the client's handshake on a busy machine.
    let (_server, listener, address) = server_with(Some(TOKEN.to_vec()), Duration::from_secs(3));
    let mut silent: Vec<_> = (0..4).map(|_| Stranger::connect(address)).collect();
    let (client, _) = endpoint(Access::LOCAL, Limits::default(), 1);
    let _connection = client.connect_tcp(address, soon()).expect("they take no place of a peer");
    assert!(silent.iter_mut().all(Stranger::is_closed));
    assert_eq!(listener.peer_count(), 1);
}

#[test]
fn a_frame_whose_pieces_are_not_its_payload_ends_the_connection() {
    let (server, _listener, address) = server(Some(TOKEN.to_vec()));
    let mut stranger = Stranger::connect(address);
    let hello = stranger.hello(1, 1);
    let (_, challenge) = stranger.receive();
    stranger.send(Kind::Proof, &proof("client", &hello, &challenge));
    assert_eq!(stranger.receive().0.kind, Kind::Welcome);
    let mut entry = vec![];
    entry.extend(0_u32.to_le_bytes());
    entry.extend(100_u32.to_le_bytes());
    entry.extend(0_u64.to_le_bytes());
    let header = Header { pieces: 1, payload_bytes: 200, ..Header::new(Kind::Write, 1) };
    stranger.0.write_all(&header.with_body(&entry).to_bytes()).unwrap();
    stranger.0.write_all(&entry).unwrap();
    stranger.0.write_all(&[7; 204]).unwrap();
    assert!(stranger.is_closed());
    assert!(has(&server, RegionId(0), &[0; 4096]), "nothing was written");
}
