//! Small reads beside large batches of one connection.
#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::sync::atomic::Ordering;
use std::time::Duration;

use cascade_runtime::{Deadline, SystemClock, sleep};
use cascade_transport::conformance::soon;
use cascade_transport::{Batch, Direction, Limits, Piece, Place, Ticket, TransportError};

use crate::faults::{BYTES, Pair, has};
use crate::proxy::NEVER;

const SMALL: u64 = 4096;
/// Long enough for an answer that is not held back.
const SHORT: Duration = Duration::from_millis(500);

fn small_read(pair: &Pair) -> Result<(), TransportError> {
    let place = |region| Place { region, offset: BYTES as u64 - SMALL };
    let piece = Piece { local: place(pair.local), remote: place(pair.remote), bytes: SMALL };
    let batch = Batch { direction: Direction::Read, pieces: &[piece], notice: None };
    let deadline = Deadline::after(&SystemClock, SHORT);
    pair.connection.post(&batch, deadline)?.wait(deadline)
}

/// A connection whose large read does not get its answer, with the other stream open.
fn with_large_read() -> (Pair, Ticket) {
    let pair = Pair::new(Limits::default());
    pair.server.fill(pair.remote, 0, &vec![9; BYTES]).unwrap();
    let [piece] = pair.pieces(BYTES - usize::try_from(SMALL).unwrap());
    let batch = Batch { direction: Direction::Read, pieces: &[piece; 8], notice: None };
    // Of each connection: the other stream does not come to this byte.
    pair.proxy.at(&pair.proxy.freeze_at, 1 << 20);
    let large = pair.connection.post(&batch, soon()).unwrap();
    // The first one opens the stream, and waits behind the large read.
    let until = soon();
    while let Err(error) = small_read(&pair) {
        assert!(matches!(error, TransportError::Deadline { .. }), "{error}");
        assert!(!until.has_passed(&SystemClock), "no small read passes");
    }
    (pair, large)
}

#[test]
fn a_small_read_passes_a_large_one() {
    let (pair, mut large) = with_large_read();
    let mut last = vec![0; usize::try_from(SMALL).unwrap()];
    pair.client.fetch(pair.local, BYTES as u64 - SMALL, &mut last).unwrap();
    assert!(last.iter().all(|byte| *byte == 9));
    let waited = large.wait(Deadline::after(&SystemClock, Duration::from_millis(50)));
    assert!(matches!(waited, Err(TransportError::Deadline { .. })), "{waited:?}");
    pair.proxy.freeze_at.store(NEVER, Ordering::Relaxed);
    large.wait(soon()).unwrap();
    assert!(has(&pair.client, pair.local, &vec![9; BYTES]));
    assert_eq!(pair.listener.peer_count(), 2);
    pair.connection.close();
    let until = soon();
    while pair.listener.peer_count() > 0 {
        assert!(!until.has_passed(&SystemClock), "a stream is left");
        sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_small_read_whose_stream_is_lost_is_read_by_the_other_one() {
    let (pair, large) = with_large_read();
    pair.proxy.freeze_at.store(NEVER, Ordering::Relaxed);
    // The next bytes of the last connection, which is the stream of small reads.
    pair.proxy.at(&pair.proxy.cut_at, 10);
    small_read(&pair).unwrap();
    assert!(pair.connection.is_open());
    drop(large);
    small_read(&pair).unwrap();
}

#[test]
fn without_large_batches_there_is_no_other_stream() {
    let pair = Pair::new(Limits::default());
    for _ in 0..20 {
        small_read(&pair).unwrap();
    }
    assert_eq!(pair.listener.peer_count(), 1);
}
