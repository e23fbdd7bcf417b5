//! Callers that are slow, many, long-winded or gone.

use std::io::{BufRead as _, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

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
    assert_eq!(served.get_as_anybody("/healthz").code, 200);
    assert!(slow.into_iter().all(is_closed));
}

/// Reads the first line of an answer.
fn first_line(stream: &mut TcpStream) -> String {
    let mut first = [0; 12];
    stream.read_exact(&mut first).unwrap();
    String::from_utf8_lossy(&first).into_owned()
}

/// Reads the rest of an answer about health.
fn drain(stream: &mut TcpStream) {
    let mut rest = Vec::new();
    let mut byte = [0];
    while !rest.ends_with(b"}") {
        stream.read_exact(&mut byte).unwrap();
        rest.extend(byte);
    }
}

#[test]
fn a_newcomer_takes_the_place_of_the_connection_that_is_idle_longest() {
    let served = Served::start_with(SecurityConfig::default(), |config| {
        config.connections_max = 2;
    });
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut stream = connect(&served);
        stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        assert_eq!(first_line(&mut stream), "HTTP/1.1 200");
        drain(&mut stream);
        held.push(stream);
    }
    let mut stream = held.pop().unwrap();
    // One that was busy just now is left its place; after a moment it is not.
    let clock = Instant::now();
    while served.get_as_anybody("/metrics").code != 200 {
        assert!(clock.elapsed() < Duration::from_secs(60), "no place becomes free");
        stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        assert_eq!(first_line(&mut stream), "HTTP/1.1 200");
        drain(&mut stream);
        std::thread::park_timeout(Duration::from_millis(50));
    }
    assert!(is_closed(held.pop().unwrap()), "it was idle longest");
}

#[test]
fn health_has_a_place_when_no_other_is_left() {
    let served = Served::start_with(SecurityConfig::default(), |config| {
        config.connections_max = 0;
    });
    let silent: Vec<TcpStream> = (0..200).map(|_| connect(&served)).collect();
    for path in ["/healthz", "/readyz"] {
        assert_eq!(served.get_as_anybody(path).code, 200, "{path}");
        assert_eq!(served.get(path).code, 200, "{path} on the Unix socket");
    }
    for path in ["/", "/live", "/metrics", "/status.json"] {
        let refused = served.get_as_anybody(path);
        assert_eq!(refused.code, 503, "{path}");
        assert!(refused.body.contains("ask again"), "{}", refused.body);
    }
    assert!(served.node.traffic().status().http.turned_away >= 200);
    drop(silent);
}

/// What blocked `/healthz` for 15 s: each connection had its place, and each asked for a scrape as
/// soon as it had the last one.
#[test]
fn health_is_answered_beside_connections_that_scrape_without_a_pause() {
    let served = Served::start();
    served.put(0..180);
    let is_over = AtomicBool::new(false);
    let scrapes = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let flood: Vec<_> =
            (0..300).map(|_| scope.spawn(|| scrape_until(&served, &is_over, &scrapes))).collect();
        let mut checks = 0;
        // Every connection had its turn several times while health was asked for.
        while scrapes.load(Relaxed) < 2000 {
            assert_eq!(served.get_as_anybody("/healthz").code, 200);
            assert_eq!(served.get_as_anybody("/readyz").code, 200);
            checks += 1;
        }
        is_over.store(true, Relaxed);
        assert!(checks > 0);
        for thread in flood {
            thread.join().unwrap();
        }
    });
}

/// Scrapes on one connection after another, each kept alive for as long as the node keeps it.
fn scrape_until(served: &Served, is_over: &AtomicBool, scrapes: &AtomicU64) {
    while !is_over.load(Relaxed) {
        let mut stream = BufReader::new(connect(served));
        while !is_over.load(Relaxed) && scrape_once(&mut stream).is_ok() {
            scrapes.fetch_add(1, Relaxed);
        }
    }
}

fn scrape_once(stream: &mut BufReader<TcpStream>) -> std::io::Result<()> {
    let asked = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";
    stream.get_mut().write_all(asked)?;
    let mut length = 0;
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        if let Some(bytes) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = bytes.trim().parse().unwrap();
        }
        if line == "\r\n" {
            return stream.read_exact(&mut vec![0; length]);
        }
    }
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
    assert_eq!(served.get_as_anybody("/healthz").code, 200);
}

#[test]
fn it_stops_in_time_though_a_caller_keeps_its_connection() {
    let served = Served::start();
    let idle = connect(&served);
    assert_eq!(served.get_as_anybody("/healthz").code, 200);
    let address = served.address();
    served.handle.stop(Duration::from_secs(10));
    assert!(is_closed(idle));
    TcpStream::connect(address).unwrap_err();
}
