//! Answers that come in parts: calls keep their deadlines in the middle of them.

use std::io::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use cascade_block::checksum;
use cascade_runtime::thread::JoinHandle;
use cascade_runtime::{Deadline, SystemClock, sleep};
use cascade_transport::conformance::soon;
use cascade_transport::wire::{HEADER_BYTES, Header, Kind};
use cascade_transport::{
    Batch, Connection, Direction, Endpoint, EndpointConfig, Heartbeat, Limits, Piece, Place,
    RegionId, Ticket, TransportError,
};

use crate::liar::{BYTES, Liar, client, client_with};

/// What the server sends, in answers of one piece.
const ANSWER: [u8; BYTES] = [7; BYTES];

fn in_ms(ms: u64) -> Deadline {
    Deadline::after(&SystemClock, Duration::from_millis(ms))
}

/// A client, and a server that sends of each answer what the test allows.
struct Pair {
    client: Endpoint,
    region: RegionId,
    connection: Arc<dyn Connection>,
    /// How many more bytes the server sends.
    allowed: mpsc::Sender<usize>,
    server: JoinHandle<()>,
}

impl Pair {
    fn new() -> Self {
        Self::with_heartbeat(None)
    }

    fn with_heartbeat(heartbeat: Option<Heartbeat>) -> Self {
        let (allowed, allows) = mpsc::channel::<usize>();
        let (address, server) = Liar::start(move |mut liar| {
            liar.challenge(true);
            liar.welcome();
            let mut rest = vec![];
            for count in allows {
                while rest.len() < count {
                    let frame = liar.receive().frame;
                    let (pieces, payload_bytes) = (1, BYTES as u64);
                    let header = Header { pieces, payload_bytes, ..Header::new(Kind::Data, frame) };
                    rest.extend(header.to_bytes());
                    rest.extend(ANSWER);
                    rest.extend(checksum(&ANSWER).to_le_bytes());
                }
                liar.0.write_all(&rest[..count]).expect("a client");
                rest.drain(..count);
            }
        });
        let limits = Limits { heartbeat, ..Limits::default() };
        let (client, region) = client_with(EndpointConfig { limits, ..Default::default() });
        let connection = client.connect_tcp(address, soon()).expect("the handshake is right");
        Self { client, region, connection, allowed, server }
    }

    /// Posts a read of one answer.
    fn read(&self) -> Ticket {
        self.post().expect("it is sent")
    }

    fn post(&self) -> Result<Ticket, TransportError> {
        let place = |region| Place { region, offset: 0 };
        let (local, remote) = (place(self.region), place(RegionId(0)));
        let pieces = [Piece { local, remote, bytes: BYTES as u64 }];
        let batch = Batch { direction: Direction::Read, pieces: &pieces, notice: None };
        self.connection.post(&batch, soon())
    }

    fn allow(&self, bytes: usize) {
        self.allowed.send(bytes).expect("the server runs");
    }

    fn memory(&self) -> Vec<u8> {
        let mut bytes = vec![0; BYTES];
        self.client.fetch(self.region, 0, &mut bytes).expect("it is registered");
        bytes
    }

    /// Waits until bytes have come into the memory of a read.
    fn wait_for_part(&self, ticket: &mut Ticket) {
        while self.memory().first() != Some(&ANSWER[0]) {
            let error = ticket.wait(in_ms(10)).expect_err("a part is missing");
            assert!(matches!(error, TransportError::Deadline { .. }), "{error}");
        }
    }

    fn end(self) {
        drop(self.allowed);
        self.server.join().expect("the server ends");
    }
}

/// What comes after the header.
const BODY: usize = BYTES + 4;

/// A wait that had begun to receive an answer went on for as long as its bytes took, up to 10 s
/// without any.
#[test]
fn a_wait_ends_in_the_middle_of_an_answer_and_another_one_goes_on() {
    for part in [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 100, HEADER_BYTES + BYTES + 1] {
        let pair = Pair::new();
        let mut ticket = pair.read();
        pair.allow(part);
        for _ in 0..5 {
            let error = ticket.wait(in_ms(50)).expect_err("the rest is missing");
            assert!(matches!(error, TransportError::Deadline { .. }), "{part}: {error}");
        }
        pair.allow(HEADER_BYTES + BODY - part);
        ticket.wait(soon()).expect("all of it has come");
        assert!(pair.memory() == ANSWER, "{part}");
        pair.end();
    }
}

/// A caller that asked without a time-out, again and again, received nothing.
#[test]
fn a_batch_ends_although_nobody_waits_for_any_time() {
    let pair = Pair::new();
    let mut ticket = pair.read();
    pair.allow(HEADER_BYTES + BODY);
    let until = soon();
    while let Err(error) = ticket.wait(Deadline::at(Duration::ZERO)) {
        assert!(matches!(error, TransportError::Deadline { .. }), "{error}");
        assert!(!until.has_passed(&SystemClock), "nothing is received");
    }
    assert!(pair.memory() == ANSWER);
    pair.end();
}

/// A cancelled read waited for its answer, and ended the connection if that did not come.
#[test]
fn a_cancelled_read_leaves_its_memory_and_the_connection_goes_on() {
    for part in [0, HEADER_BYTES + 100] {
        let pair = Pair::new();
        let mut ticket = pair.read();
        if part > 0 {
            pair.allow(part);
            pair.wait_for_part(&mut ticket);
        }
        ticket.cancel(Deadline::at(Duration::ZERO));
        pair.client.unregister(pair.region, in_ms(0)).expect("no batch uses it");
        let region = cascade_transport::Region::private(BYTES, cascade_transport::Access::LOCAL);
        let region = pair.client.register(region).expect("it works on loopback");
        let pair = Pair { region, ..pair };
        let mut next = pair.read();
        pair.allow(HEADER_BYTES + BODY - part);
        pair.allow(HEADER_BYTES + BODY);
        next.wait(soon()).expect("its answer comes after that of the cancelled one");
        assert!(pair.memory() == ANSWER);
        pair.end();
    }
}

/// Another thread was in the middle of the answer.
#[test]
fn a_read_is_cancelled_while_another_thread_receives_it() {
    let pair = Pair::new();
    let mut ticket = pair.read();
    pair.allow(HEADER_BYTES + 100);
    pair.wait_for_part(&mut ticket);
    let mut second = pair.read();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| second.wait(soon()));
        // It makes no difference whether that thread has begun.
        sleep(Duration::from_millis(20));
        ticket.cancel(soon());
        let left = pair.memory();
        pair.allow(HEADER_BYTES + BODY - (HEADER_BYTES + 100));
        sleep(Duration::from_millis(20));
        assert!(pair.memory() == left, "memory changed after its batch was cancelled");
        pair.allow(HEADER_BYTES + BODY);
        waiting.join().expect("it does not panic").expect("its answer comes");
    });
    assert!(pair.memory() == ANSWER);
    pair.end();
}

/// The time without a byte counts only while somebody receives: with questions that are short, a
/// peer that had stopped in an answer was noticed after minutes.
#[test]
fn a_peer_that_stops_in_an_answer_is_noticed_by_heartbeats() {
    let (interval, limit) = (Duration::from_secs(1), Duration::from_millis(100));
    let pair = Pair::with_heartbeat(Some(Heartbeat { interval, limit }));
    let mut ticket = pair.read();
    pair.allow(HEADER_BYTES + 100);
    pair.wait_for_part(&mut ticket);
    let until = soon();
    while pair.connection.is_open() {
        assert!(!until.has_passed(&SystemClock), "nobody notices");
        sleep(Duration::from_millis(10));
    }
    let error = ticket.wait(soon()).expect_err("the rest is missing");
    assert!(error.to_string().contains("answered nothing for 0.1 s"), "{error}");
    pair.end();
}

/// A question that had no place because another thread waited for one counted as answered.
#[test]
fn a_peer_that_answers_nothing_is_noticed_while_a_batch_waits_for_its_place() {
    let (interval, limit) = (Duration::from_millis(50), Duration::from_millis(100));
    let pair = Pair::with_heartbeat(Some(Heartbeat { interval, limit }));
    let mut tickets: Vec<Ticket> = vec![];
    let error = loop {
        match pair.post() {
            Ok(ticket) => tickets.push(ticket),
            Err(error) => break error,
        }
    };
    assert!(error.to_string().contains("answered nothing for 0.1 s"), "{error}");
    drop(tickets);
    pair.end();
}

/// A post that could not send received one slow answer after the other, and ended long after its
/// deadline.
#[test]
fn a_post_begins_no_answer_after_its_deadline() {
    const ANSWERS: u64 = 30;
    let sent = Arc::new(AtomicU64::new(0));
    let of_server = Arc::clone(&sent);
    let (address, liar) = Liar::start(move |mut liar| {
        liar.challenge(true);
        liar.welcome();
        let asked: Vec<Header> = (0..ANSWERS).map(|_| liar.receive()).collect();
        // The next frame is not taken. Each answer begins when the one before it has ended.
        let answers = asked.iter().map(|it| Header::new(Kind::Data, it.frame).to_bytes());
        let bytes = answers.flatten().collect::<Vec<u8>>();
        let half = HEADER_BYTES / 2;
        liar.0.write_all(&bytes[..half]).expect("a client");
        for part in bytes[half..].chunks(HEADER_BYTES) {
            sleep(Duration::from_millis(200));
            if liar.0.write_all(part).is_err() {
                break;
            }
            of_server.fetch_add(1, Ordering::Relaxed);
        }
    });
    let (client, region) = client();
    let connection = client.connect_tcp(address, soon()).expect("the handshake is right");
    let question = Batch { direction: Direction::Read, pieces: &[], notice: None };
    let post = |batch: &Batch<'_>, deadline| connection.post(batch, deadline);
    let asked: Vec<_> =
        (0..ANSWERS).map(|_| post(&question, soon()).expect("it is sent")).collect();
    let place = |region| Place { region, offset: 0 };
    let piece = Piece { local: place(region), remote: place(RegionId(0)), bytes: BYTES as u64 };
    // More than sockets hold.
    let pieces = vec![piece; 16_000];
    let write = Batch { direction: Direction::Write, pieces: &pieces, notice: None };
    let deadline = Deadline::after(&SystemClock, Duration::from_millis(300));
    let error = post(&write, deadline).expect_err("the server takes no bytes");
    assert!(matches!(error, TransportError::Deadline { .. }), "{error}");
    let before = sent.load(Ordering::Relaxed);
    assert!((1..ANSWERS / 2).contains(&before), "{before} of {ANSWERS} answers came before it");
    drop(asked);
    drop(connection);
    liar.join().expect("the server ends");
}
