//! Limits of the HTTP port: slow clients, floods of connections, oversized requests.

use std::io::{BufRead as _, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use cascade_node::config::SecurityConfig;

use super::served::{Served, request, send};

fn connect(served: &Served) -> TcpStream {
    let stream = TcpStream::connect(served.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

/// Waits until the server closes the connection, and discards what it sent before.
fn is_closed(mut stream: TcpStream) -> bool {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn connections_with_slow_requests_are_closed_and_others_are_served() {
    let served = Served::start_with(SecurityConfig::default(), |config| {
        // Long enough for the requests that are not slow.
        config.head_timeout = Duration::from_secs(3);
    });
    let slow: Vec<TcpStream> = (0..20)
        .map(|_| {
            let mut stream = connect(&served);
            stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: local").unwrap();
            stream
        })
        .collect();
    assert_eq!(served.get_over_tcp("/healthz").code, 200);
    assert!(slow.into_iter().all(is_closed));
}

/// Reads the status line of an answer.
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
fn at_the_limit_a_new_connection_replaces_the_one_idle_longest() {
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
    // A connection is replaced only after a short idle time.
    let clock = Instant::now();
    while served.get_over_tcp("/metrics").code != 200 {
        assert!(clock.elapsed() < Duration::from_secs(60), "no connection is replaced");
        stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        assert_eq!(first_line(&mut stream), "HTTP/1.1 200");
        drain(&mut stream);
        cascade_runtime::sleep(Duration::from_millis(50));
    }
    assert!(is_closed(held.pop().unwrap()), "it was idle longest");
}

#[test]
fn health_is_answered_at_the_connection_limit() {
    let served = Served::start_with(SecurityConfig::default(), |config| {
        config.connections_max = 0;
    });
    let idle: Vec<TcpStream> = (0..200).map(|_| connect(&served)).collect();
    for path in ["/healthz", "/readyz"] {
        assert_eq!(served.get_over_tcp(path).code, 200, "{path}");
        assert_eq!(served.get(path).code, 200, "{path} on the Unix socket");
    }
    for path in ["/", "/live", "/metrics", "/status.json"] {
        let refused = served.get_over_tcp(path);
        assert_eq!(refused.code, 503, "{path}");
        assert!(refused.body.contains("retry"), "{}", refused.body);
    }
    assert!(served.node.traffic().status().http.turned_away >= 200);
    drop(idle);
}

/// `/healthz` was blocked for 15 s while each connection requested a scrape right after the last.
#[test]
fn health_is_answered_while_many_connections_scrape() {
    let served = Served::start();
    served.put(0..180);
    let is_over = AtomicBool::new(false);
    let scrapes = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let flood: Vec<_> =
            (0..300).map(|_| scope.spawn(|| scrape_until(&served, &is_over, &scrapes))).collect();
        let _stopper = StopOnDrop(&is_over);
        let clock = Instant::now();
        let mut checks = 0;
        // So every connection scrapes several times between the health checks.
        while scrapes.load(Relaxed) < 2000 {
            assert!(clock.elapsed() < Duration::from_secs(100), "waited in vain for 2000 scrapes");
            assert_eq!(served.get_over_tcp("/healthz").code, 200);
            assert_eq!(served.get_over_tcp("/readyz").code, 200);
            checks += 1;
        }
        is_over.store(true, Relaxed);
        assert!(checks > 0);
        for thread in flood {
            thread.join().unwrap();
        }
    });
}

/// Sets a flag when it is dropped, also by a panic: a scope waits for the threads that run until it
/// is set.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Scrapes on keep-alive connections, with a new one whenever the node closes the last.
fn scrape_until(served: &Served, is_over: &AtomicBool, scrapes: &AtomicU64) {
    while !is_over.load(Relaxed) {
        let mut stream = BufReader::new(connect(served));
        while !is_over.load(Relaxed) && scrape_once(&mut stream).is_ok() {
            scrapes.fetch_add(1, Relaxed);
        }
    }
}

fn scrape_once(stream: &mut BufReader<TcpStream>) -> std::io::Result<()> {
    let request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";
    stream.get_mut().write_all(request)?;
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
fn a_connection_is_closed_at_its_time_limit() {
    let served = Served::start_with(SecurityConfig::default(), |config| {
        config.connection_timeout = Duration::from_millis(300);
    });
    assert!(is_closed(connect(&served)));
}

#[test]
fn malformed_requests_are_refused() {
    let served = Served::start();
    let long = format!("GET /{} HTTP/1.1\r\nHost: localhost\r\n\r\n", "a".repeat(100_000));
    let many = format!("GET / HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(1000));
    let binary = "\u{16}\u{3}\u{1}\r\n\r\n".to_owned();
    for wrong in [long, many, binary, "GET\r\n\r\n".to_owned()] {
        let mut stream = connect(&served);
        // The server may close the connection before it has read everything.
        let sent = stream.write_all(wrong.as_bytes());
        let mut answer = Vec::new();
        let read = stream.read_to_end(&mut answer);
        let is_refused = answer.starts_with(b"HTTP/1.1 4") || sent.is_err() || read.is_err();
        assert!(is_refused, "{:?}", String::from_utf8_lossy(&answer));
    }
    let with_body = request(served.address(), "/healthz", &["Content-Length: 999999999999"]);
    let answer = send(served.address(), &with_body);
    assert!(matches!(answer.code, 200 | 400), "the server does not wait for the body");
    assert_eq!(served.get_over_tcp("/healthz").code, 200);
}

#[test]
fn the_port_stops_in_time_despite_an_idle_connection() {
    let served = Served::start();
    let idle = connect(&served);
    assert_eq!(served.get_over_tcp("/healthz").code, 200);
    let address = served.address();
    served.handle.stop(Duration::from_secs(10));
    assert!(is_closed(idle));
    TcpStream::connect(address).unwrap_err();
}
