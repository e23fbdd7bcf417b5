//! Questions: text, and blocks that go straight into the memory of who asks.
#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cascade_runtime::{Cancel, Deadline, SystemClock};
use cascade_transport::conformance::{Numbers, soon};
use cascade_transport::wire::{Header, Kind};
use cascade_transport::{
    ANSWER_BLOCKS_MAX, Access, Answer, Answers, AskLimit, BlockBytes, Connection, EndpointConfig,
    EndpointId, QUESTION_BYTES_MAX, Reply, TransportError,
};

use crate::faults::{Pair, with_region};
use crate::liar::{Liar, client_with};
use crate::proofs::TOKEN;
use crate::proxy::NEVER;
use crate::tls::authority::Authority;
use crate::tls::subject;

const SHORT: Duration = Duration::from_millis(300);

/// Block `n` of a question has bytes `n`. It has those whose number is not divisible by three.
struct Blocks;

impl Answers for Blocks {
    fn answer(&self, _: EndpointId, question: &[u8], targets: &[u32]) -> Reply {
        let block = |(length, number): (&u32, u8)| {
            let bytes: Box<dyn BlockBytes> = Box::new(vec![number; *length as usize]);
            (number % 3 > 0).then_some((number.into(), bytes))
        };
        let blocks = targets.iter().zip(0_u8..).filter_map(block).collect();
        Reply { text: [b"re: ", question].concat(), blocks }
    }
}

fn answering(config: EndpointConfig) -> EndpointConfig {
    EndpointConfig { answers: Some(Arc::new(Blocks)), ..config }
}

fn pair_of(server: EndpointConfig, client: EndpointConfig) -> Pair {
    let server = with_region(Access::BOTH, answering(server));
    Pair::of(server, with_region(Access::LOCAL, client))
}

fn pair(streams: usize) -> Pair {
    let config = |streams| EndpointConfig {
        token: Some(TOKEN.to_vec()),
        streams,
        ..EndpointConfig::default()
    };
    pair_of(config(1), config(streams))
}

fn ask(
    connection: &dyn Connection,
    lengths: &[usize],
    deadline: Deadline,
) -> (Vec<Vec<u8>>, Result<Answer, TransportError>) {
    let mut targets: Vec<Vec<u8>> = lengths.iter().map(|length| vec![0xee; *length]).collect();
    let mut slices: Vec<&mut [u8]> = targets.iter_mut().map(Vec::as_mut_slice).collect();
    let answer = connection.ask(b"which?", &mut slices, AskLimit::until(deadline));
    (targets, answer)
}

/// Asks for blocks of these lengths, and checks the answer.
fn check(connection: &dyn Connection, lengths: &[usize]) {
    let (targets, answer) = ask(connection, lengths, soon());
    let answer = answer.unwrap();
    assert_eq!(answer.text, b"re: which?");
    let has: Vec<u32> = (0..).take(lengths.len()).filter(|number| number % 3 > 0).collect();
    assert_eq!(answer.filled, has);
    for (target, number) in targets.iter().zip(0..) {
        let expected = if number % 3 > 0 { number } else { 0xee };
        assert!(target.iter().all(|byte| *byte == expected), "block {number}");
    }
}

#[test]
fn blocks_come_into_their_targets_and_the_others_stay() {
    let authority = Authority::new();
    let tls = |kernel, name| {
        let tls = cascade_transport::TlsConfig { kernel, ..authority.config(name) };
        subject::config(Some(tls))
    };
    let with_tls = |kernel| pair_of(tls(kernel, "server"), tls(kernel, "client"));
    for pair in [pair(1), pair(4), with_tls(false), with_tls(true)] {
        for lengths in [&[][..], &[5], &[1, 0, 700_000, 262_145, 9], &[3 << 20; 4], &[64; 100]] {
            check(&*pair.connection, lengths);
        }
    }
}

#[test]
fn blocks_come_over_a_unix_socket() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let (server, _) = with_region(Access::BOTH, answering(EndpointConfig::default()));
    let _listener = server.listen_unix(&path).unwrap();
    let (client, _) = with_region(Access::LOCAL, EndpointConfig::default());
    let connection = client.connect_unix(&path, soon()).unwrap();
    check(&*connection, &[10, 300_000, 4096]);
}

/// The rest can be asked for again.
#[test]
fn an_answer_has_the_leading_blocks_of_eight_mebibytes() {
    let pair = pair(1);
    let (targets, answer) = ask(&*pair.connection, &[3 << 20; 6], soon());
    // Blocks 1 and 2, of 3 MiB each. Block 4 is the third one.
    assert_eq!(answer.unwrap().filled, [1, 2]);
    assert!(targets[4].iter().all(|byte| *byte == 0xee));
}

#[test]
fn what_is_too_large_is_refused_before_it_is_sent() {
    let pair = pair(1);
    let long = vec![0; QUESTION_BYTES_MAX + 1];
    let error = pair.connection.ask(&long, &mut [], AskLimit::until(soon())).unwrap_err();
    assert!(error.to_string().contains("a question is 131073, the limit is 131072"), "{error}");
    for lengths in [vec![0; ANSWER_BLOCKS_MAX + 1], vec![(8 << 20) + 1]] {
        let error = ask(&*pair.connection, &lengths, soon()).1.unwrap_err();
        assert!(matches!(error, TransportError::TooLarge { .. }), "{error}");
    }
    let longest = pair.connection.ask(&long[1..], &mut [], AskLimit::until(soon())).unwrap();
    // The text is cut at its limit.
    assert_eq!(longest.text.len(), QUESTION_BYTES_MAX);
    check(&*pair.connection, &[8, 8 << 20]);
}

/// An older version does not know the message, and would end the connection.
#[test]
fn a_peer_that_answers_no_questions_is_not_asked() {
    let pair = Pair::new(cascade_transport::Limits::default());
    let error = ask(&*pair.connection, &[8], soon()).1.unwrap_err();
    assert!(matches!(error, TransportError::Unavailable(_)), "{error}");
    assert!(pair.connection.is_open());
}

/// After its deadline nobody writes into the memory of a caller, at whatever byte the answer was.
#[test]
fn an_answer_that_comes_too_late_is_thrown_away() {
    const LENGTHS: [usize; 3] = [10, 2 << 20, 2 << 20];
    let mut numbers = Numbers(7);
    for round in 0..12 {
        let pair = pair(if round % 2 == 0 { 1 } else { 2 });
        let freeze_at = [0, 10, 60, 100, numbers.below(4 << 20)][round % 5];
        pair.proxy.at(&pair.proxy.freeze_at, freeze_at);
        let late = Deadline::after(&SystemClock, SHORT);
        let (mut targets, answer) = ask(&*pair.connection, &LENGTHS, late);
        let error = answer.unwrap_err();
        assert!(matches!(error, TransportError::Deadline { .. }), "byte {freeze_at}: {error}");
        for target in &mut targets {
            target.fill(0x11);
        }
        pair.proxy.freeze_at.store(NEVER, Ordering::Relaxed);
        // The stream that was frozen is the one after the next, or the same.
        check(&*pair.connection, &LENGTHS);
        check(&*pair.connection, &LENGTHS);
        assert!(targets.iter().flatten().all(|byte| *byte == 0x11), "byte {freeze_at}");
    }
}

#[test]
fn a_cancelled_question_ends() {
    let pair = pair(1);
    pair.proxy.freeze_at.store(0, Ordering::Relaxed);
    let cancel = Cancel::new();
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| {
            let limit = AskLimit { deadline: soon(), cancel: Some(&cancel) };
            let mut target = vec![0xee; 1 << 20];
            let error = pair.connection.ask(b"", &mut [&mut target[..]; 1], limit).unwrap_err();
            assert!(matches!(error, TransportError::Deadline { .. }), "{error}");
        });
        cancel.set();
        asked.join().unwrap();
    });
    pair.proxy.freeze_at.store(NEVER, Ordering::Relaxed);
    check(&*pair.connection, &[8, 8]);
}

#[test]
fn no_flipped_bit_is_taken_for_an_answer() {
    const LENGTHS: [usize; 4] = [100, 5000, 300_000, 700];
    let mut numbers = Numbers(3);
    let mut found = 0;
    for round in 0..60 {
        let pair = pair(1);
        let at = if round % 2 == 0 { numbers.below(400) } else { numbers.below(306_000) };
        pair.proxy.at(&pair.proxy.flip_at, at);
        let (targets, answer) = ask(&*pair.connection, &LENGTHS, soon());
        match answer {
            Ok(answer) => {
                assert_eq!(answer.text, b"re: which?", "byte {at}");
                assert_eq!(answer.filled, [1, 2], "byte {at}");
                let is_right =
                    |number: usize| targets[number].iter().all(|b| usize::from(*b) == number);
                assert!(is_right(1) && is_right(2), "byte {at}");
            }
            Err(TransportError::Lost { .. } | TransportError::Refused { .. }) => found += 1,
            Err(error) => panic!("byte {at}: {error}"),
        }
    }
    assert!(found > 40, "only {found} flips hit the answer");
}

#[test]
fn questions_and_batches_of_many_threads_share_a_connection() {
    for streams in [1, 3] {
        let pair = pair(streams);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let pair = &pair;
                scope.spawn(move || {
                    for round in 0..20 {
                        if thread == 0 {
                            pair.run(cascade_transport::Direction::Read, soon()).unwrap();
                        } else {
                            check(&*pair.connection, &[10, 1 << thread, 40_000 * round]);
                        }
                    }
                });
            }
        });
    }
}

/// Asks for blocks of 10 and 20 bytes.
fn asks_a_liar(answer: impl Fn(Header) -> Vec<u8> + Send + 'static) -> TransportError {
    let (address, liar) = Liar::start(move |mut liar| {
        liar.challenge_with(true, cascade_transport::wire::ANSWERS_QUESTIONS);
        liar.welcome();
        let asked = liar.receive();
        assert_eq!(asked.kind, Kind::Ask);
        liar.0.write_all(&answer(asked)).expect("a client");
        liar.wait_for_end();
    });
    let (client, _) = client_with(EndpointConfig::default());
    let connection = client.connect_tcp(address, soon()).expect("the handshake is right");
    let (targets, answer) = ask(&*connection, &[10, 20], soon());
    assert!(targets.iter().flatten().all(|byte| *byte == 0xee), "nothing is received of a lie");
    assert!(!connection.is_open());
    drop(connection);
    liar.join().expect("the server ends");
    answer.unwrap_err()
}

#[test]
fn an_answer_with_other_blocks_is_not_taken() {
    let answer = |numbers: &'static [u32], pieces, payload: &'static [u8]| {
        move |asked: Header| {
            let mut body = u32::try_from(numbers.len()).unwrap().to_le_bytes().to_vec();
            for number in numbers {
                body.extend(number.to_le_bytes());
            }
            let header = Header {
                pieces,
                payload_bytes: payload.len() as u64,
                ..Header::new(Kind::Answer, asked.frame).with_body(&body)
            };
            [&header.to_bytes()[..], &body, payload, &[0; 8]].concat()
        }
    };
    for error in [
        asks_a_liar(answer(&[2], 1, &[1; 10])),
        asks_a_liar(answer(&[1, 0], 2, &[1; 30])),
        asks_a_liar(answer(&[1, 1], 2, &[1; 40])),
        asks_a_liar(answer(&[0], 1, &[1; 20])),
        asks_a_liar(answer(&[0], 2, &[1; 10])),
        asks_a_liar(answer(&[], 1, &[1; 10])),
    ] {
        assert!(error.to_string().contains("other blocks than were asked for"), "{error}");
    }
    let count_beyond = |asked: Header| {
        let body = 9_u32.to_le_bytes();
        let header = Header::new(Kind::Answer, asked.frame).with_body(&body);
        [&header.to_bytes()[..], &body].concat()
    };
    let error = asks_a_liar(count_beyond);
    assert!(error.to_string().contains("the body of an answer is invalid"), "{error}");
    let wrong_body = |asked: Header| {
        let header = Header::new(Kind::Answer, asked.frame).with_body(&[0; 4]);
        [&header.to_bytes()[..], &[1, 0, 0, 0]].concat()
    };
    let error = asks_a_liar(wrong_body);
    assert!(error.to_string().contains("the checksum of a body does not match"), "{error}");
}
