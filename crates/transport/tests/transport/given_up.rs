//! Batches whose deadline passes while they are sent: the rest of what was begun follows, and the
//! connection stays, because batches of other callers use it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use cascade_runtime::{Deadline, SystemClock};
use cascade_transport::conformance::soon;
use cascade_transport::{Batch, Direction, Limits, Piece, Ticket, TransportError};

use crate::faults::{BYTES, Pair, has};
use crate::proxy::NEVER;
use crate::tls::authority::Authority;

/// More than the buffers of the sockets between the two sides take.
const MANY: usize = 32;
/// Enough to find that a full socket takes nothing.
const SHORT: Duration = Duration::from_millis(200);

fn shortly() -> Deadline {
    Deadline::after(&SystemClock, SHORT)
}

fn post(
    pair: &Pair,
    direction: Direction,
    pieces: &[Piece],
    notice: Option<&[u8]>,
) -> Result<Ticket, TransportError> {
    pair.connection.post(&Batch { direction, pieces, notice }, shortly())
}

fn is_deadline(error: &TransportError) -> bool {
    matches!(error, TransportError::Deadline { .. })
}

/// A connection whose peer receives nothing, until the test lets it.
fn frozen(pair: &Pair) {
    pair.proxy.freeze_at.store(0, Ordering::Relaxed);
}

fn go_on(pair: &Pair) {
    pair.proxy.freeze_at.store(NEVER, Ordering::Relaxed);
}

fn over_plain_and_tls(test: impl Fn(Pair)) {
    test(Pair::new(Limits::default()));
    let authority = Authority::new();
    for kernel in [false, true] {
        let config = |name| cascade_transport::TlsConfig { kernel, ..authority.config(name) };
        test(Pair::with_tls(&config("client"), &config("server")));
    }
}

/// Other callers had lost their connection.
#[test]
fn a_write_that_is_given_up_ends_in_the_background_and_the_next_one_is_whole() {
    over_plain_and_tls(|pair| {
        frozen(&pair);
        pair.client.fill(pair.local, 0, &vec![1; BYTES]).unwrap();
        let [piece] = pair.pieces(BYTES);
        let error = post(&pair, Direction::Write, &[piece; MANY], Some(b"cut")).unwrap_err();
        assert!(is_deadline(&error), "{error}");
        // Nothing of another batch is begun, as long as the peer has not the rest of this one.
        let error = post(&pair, Direction::Write, &[piece], Some(b"late")).unwrap_err();
        assert!(is_deadline(&error), "{error}");
        assert!(pair.connection.is_open());
        // The memory of the caller is not used any more.
        let new = vec![2; BYTES];
        pair.client.fill(pair.local, 0, &new).unwrap();
        go_on(&pair);
        let batch =
            Batch { direction: Direction::Write, pieces: &[piece], notice: Some(b"written") };
        pair.connection.post(&batch, soon()).unwrap().wait(soon()).unwrap();
        assert!(has(&pair.server, pair.remote, &new), "a later write has its bytes");
        assert_eq!(pair.server.next_notice(soon()).unwrap().bytes[..], *b"written");
        pair.client.unregister(pair.local, soon()).unwrap();
    });
}

/// The last frame of a batch has its notice, which says that all bytes are there: they are.
#[test]
fn a_last_frame_that_is_given_up_arrives_whole_without_another_call() {
    over_plain_and_tls(|pair| {
        frozen(&pair);
        let bytes = vec![3; BYTES];
        pair.client.fill(pair.local, 0, &bytes).unwrap();
        let pieces = pair.pieces(BYTES);
        let mut sent = vec![];
        let error = loop {
            match post(&pair, Direction::Write, &pieces, Some(b"arrived")) {
                Ok(ticket) => sent.push(ticket),
                Err(error) => break error,
            }
        };
        assert!(is_deadline(&error), "{error}");
        pair.client.fill(pair.local, 0, &vec![4; BYTES]).unwrap();
        go_on(&pair);
        for _ in 0..=sent.len() {
            assert_eq!(pair.server.next_notice(soon()).unwrap().bytes[..], *b"arrived");
        }
        assert!(has(&pair.server, pair.remote, &bytes));
        for mut ticket in sent {
            ticket.wait(soon()).unwrap();
        }
        assert!(pair.connection.is_open());
    });
}

/// No answer comes, so that frames wait until no more may be sent.
#[test]
fn a_read_that_is_given_up_leaves_its_memory_and_its_connection() {
    over_plain_and_tls(|pair| {
        frozen(&pair);
        pair.server.fill(pair.remote, 0, &vec![5; BYTES]).unwrap();
        let [piece] = pair.pieces(BYTES);
        // Two pieces fill a frame, and as many frames as may wait are not enough.
        let error = post(&pair, Direction::Read, &[piece; 200], Some(b"cut")).unwrap_err();
        assert!(is_deadline(&error), "{error}");
        assert!(pair.connection.is_open());
        let mine = vec![6; BYTES];
        pair.client.fill(pair.local, 0, &mine).unwrap();
        go_on(&pair);
        // Answers come in the order of the frames, so that those before it have all come.
        let batch = Batch { direction: Direction::Read, pieces: &[], notice: Some(b"end") };
        pair.connection.post(&batch, soon()).unwrap().wait(soon()).unwrap();
        assert_eq!(pair.server.next_notice(soon()).unwrap().bytes[..], *b"end");
        assert!(has(&pair.client, pair.local, &mine), "what came was thrown away");
        let batch = Batch { direction: Direction::Read, pieces: &[piece], notice: None };
        pair.connection.post(&batch, soon()).unwrap().wait(soon()).unwrap();
        assert!(has(&pair.client, pair.local, &vec![5; BYTES]));
    });
}

/// A cancel closed all streams, because their threads were sending.
#[test]
fn a_cancelled_write_over_several_streams_leaves_them_open() {
    let pair = Pair::with_streams(Limits::default(), 3);
    frozen(&pair);
    pair.client.fill(pair.local, 0, &vec![7; BYTES]).unwrap();
    let [piece] = pair.pieces(BYTES);
    let pieces = [piece; 2 * MANY];
    let batch = Batch { direction: Direction::Write, pieces: &pieces, notice: Some(b"cut") };
    let mut ticket = pair.connection.post(&batch, soon()).unwrap();
    assert!(is_deadline(&ticket.wait(shortly()).unwrap_err()));
    ticket.cancel(Deadline::at(Duration::ZERO));
    assert!(pair.connection.is_open());
    let new = vec![8; BYTES];
    pair.client.fill(pair.local, 0, &new).unwrap();
    go_on(&pair);
    let batch = Batch { direction: Direction::Write, pieces: &[piece], notice: Some(b"written") };
    pair.connection.post(&batch, soon()).unwrap().wait(soon()).unwrap();
    assert!(has(&pair.server, pair.remote, &new));
    assert_eq!(pair.server.next_notice(soon()).unwrap().bytes[..], *b"written");
}

/// A peer that never takes the rest cannot be spoken to any more.
#[test]
fn a_peer_that_does_not_take_the_rest_is_lost() {
    let limits = Limits { stall_timeout: Duration::from_millis(300), ..Limits::default() };
    let pair = Pair::new(limits);
    frozen(&pair);
    let [piece] = pair.pieces(BYTES);
    let error = post(&pair, Direction::Write, &[piece; MANY], None).unwrap_err();
    assert!(is_deadline(&error), "{error}");
    let deadline = soon();
    while pair.connection.is_open() && !deadline.has_passed(&SystemClock) {
        cascade_runtime::sleep(Duration::from_millis(5));
    }
    assert!(!pair.connection.is_open());
}
