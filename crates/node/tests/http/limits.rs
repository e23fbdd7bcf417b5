//! Callers that are slow, many, long-winded or gone.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use cascade_node::config::SecurityConfig;

use crate::served::{Served, request, send};

fn connect(served: &Served) -> TcpStream {
    let stream = TcpStream::connect(served.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

/// Waits for the other side to close; what it said before does not matter.
fn is_closed(mut stream: TcpStream) -> bool {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn callers_that_dribble_their_request_are_let_go_and_others_are_served_meanwhile() {
    let served = Served::start_with(SecurityConfig::default(), |config| {
        config.head_timeout = Duration::from_millis(500);
    });
    let slow: Vec<TcpStream> = (0..20)
        .map(|_| {
            let mut stream = connect(&served);
            stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: local").unwrap();
            stream
        })
        .collect();
    assert_eq!(served.get("/healthz").code, 200);
    assert!(slow.into_iter().all(is_closed));
}

#[test]
fn a_connection_too_many_is_closed_and_a_place_that_is_free_again_is_used() {
    let served = Served::start_with(SecurityConfig::default(), |config| {
        config.connections_max = 2;
    });
    let mut held = vec![connect(&served), connect(&served)];
    for stream in &mut held {
        stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let mut first = [0; 12];
        stream.read_exact(&mut first).unwrap();
        assert_eq!(&first, b"HTTP/1.1 200");
    }
    assert!(is_closed(connect(&served)));
    assert_eq!(served.node.traffic().status().http.turned_away, 1);
    drop(held);
    let freed = (0..200).any(|_| {
        let mut stream = connect(&served);
        let asked = request(served.address(), "/healthz", &[]);
        let mut answer = String::new();
        let sent = stream
            .write_all(asked.as_bytes())
            .and_then(|()| stream.read_to_string(&mut answer).map(|_| ()));
        sent.is_ok() && answer.contains("200 OK")
    });
    assert!(freed);
}

#[test]
fn a_connection_does_not_last_for_ever() {
    let served = Served::start_with(SecurityConfig::default(), |config| {
        config.connection_timeout = Duration::from_millis(300);
    });
    assert!(is_closed(connect(&served)));
}

#[test]
fn requests_that_are_no_requests_are_refused() {
    let served = Served::start();
    let long = format!("GET /{} HTTP/1.1\r\nHost: localhost\r\n\r\n", "a".repeat(100_000));
    let many = format!("GET / HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(1000));
    let binary = "\u{16}\u{3}\u{1}\r\n\r\n".to_owned();
    for wrong in [long, many, binary, "GET\r\n\r\n".to_owned()] {
        let mut stream = connect(&served);
        // The other side may have closed before all was sent.
        let sent = stream.write_all(wrong.as_bytes());
        let mut answer = Vec::new();
        let read = stream.read_to_end(&mut answer);
        let is_refused = answer.starts_with(b"HTTP/1.1 4") || sent.is_err() || read.is_err();
        assert!(is_refused, "{:?}", String::from_utf8_lossy(&answer));
    }
    let asked = request(served.address(), "/healthz", &["Content-Length: 999999999999"]);
    assert!(matches!(send(served.address(), &asked).code, 200 | 400), "a body nobody waits for");
    assert_eq!(served.get("/healthz").code, 200);
}

#[test]
fn it_stops_in_time_though_a_caller_keeps_its_connection() {
    let served = Served::start();
    let idle = connect(&served);
    assert_eq!(served.get("/healthz").code, 200);
    let address = served.address();
    served.handle.stop(Duration::from_secs(10));
    assert!(is_closed(idle));
    TcpStream::connect(address).unwrap_err();
}
