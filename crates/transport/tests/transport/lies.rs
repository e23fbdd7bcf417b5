//! A server that speaks the protocol and lies: the client believes none of it.

use std::io::{Read, Write};

use cascade_transport::conformance::soon;
use cascade_transport::wire::{Header, Kind};
use cascade_transport::{Batch, Direction, Piece, Place, RegionId, TransportError};

use crate::liar::{Liar, client};

/// Runs a batch whose frame is answered by `answer`; returns the client's error.
fn run(direction: Direction, answer: fn(Header) -> Header) -> TransportError {
    let (address, liar) = Liar::start(move |mut liar| {
        liar.challenge(true);
        liar.welcome();
        let asked = liar.receive();
        let mut payload = vec![0; usize::try_from(asked.payload_bytes).expect("small")];
        liar.0.read_exact(&mut payload).expect("a client");
        if asked.kind == Kind::Write {
            liar.0.read_exact(&mut [0; 4]).expect("the checksum of the piece");
        }
        liar.0.write_all(&answer(asked).to_bytes()).expect("a client");
        liar.wait_for_end();
    });
    let (client, region) = client();
    let connection = client.connect_tcp(address, soon()).expect("the handshake is right");
    let pieces = [Piece {
        local: Place { region, offset: 0 },
        remote: Place { region: RegionId(0), offset: 0 },
        bytes: 100,
    }];
    let batch = Batch { direction, pieces: &pieces, notice: None };
    let mut ticket = connection.post(&batch, soon()).expect("it is sent");
    let error = ticket.wait(soon()).expect_err("the answer is a lie");
    assert!(!connection.is_open(), "the connection has ended");
    liar.join().expect("the server ends");
    error
}

#[test]
fn an_answer_of_another_kind_is_not_taken() {
    for (direction, answer) in [
        // No bytes came.
        (Direction::Read, (|asked| Header::new(Kind::Done, asked.frame)) as fn(Header) -> Header),
        (Direction::Read, |asked| Header::new(Kind::Descriptor, asked.frame)),
        // Nobody said that the bytes arrived.
        (Direction::Write, |asked| Header::new(Kind::Data, asked.frame)),
        (Direction::Write, |asked| Header::new(Kind::Descriptor, asked.frame)),
        (Direction::Write, |asked| Header::new(Kind::Write, asked.frame)),
    ] {
        let error = run(direction, answer);
        assert!(error.to_string().contains("does not belong to the frame"), "{error}");
    }
}

#[test]
fn an_answer_to_another_frame_is_not_taken() {
    for frame in [0, 2, u64::MAX] {
        let answer = match frame {
            0 => |_| Header::new(Kind::Done, 0),
            2 => |_| Header::new(Kind::Done, 2),
            _ => (|_| Header::new(Kind::Done, u64::MAX)) as fn(Header) -> Header,
        };
        let error = run(Direction::Write, answer);
        assert!(error.to_string().contains("wrong order"), "{frame}: {error}");
    }
}

#[test]
fn fewer_bytes_than_were_asked_for_are_not_taken() {
    let error = run(Direction::Read, |asked| Header::new(Kind::Data, asked.frame));
    assert!(error.to_string().contains("other bytes than were asked for"), "{error}");
}

#[test]
fn a_server_that_does_not_know_the_token_is_refused() {
    for needs_token in [true, false] {
        let (address, liar) = Liar::start(move |mut liar| {
            liar.challenge(needs_token);
            if needs_token {
                liar.welcome_with([0; 32]);
            }
            liar.wait_for_end();
        });
        let (client, _) = client();
        let error = client.connect_tcp(address, soon()).expect_err("it does not know the token");
        let expected = if needs_token { "does not know the token" } else { "it has no token" };
        assert!(error.to_string().contains(expected), "{error}");
        liar.join().expect("the server ends");
    }
}
