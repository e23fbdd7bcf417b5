//! Listeners: which files they replace, and how many connections they hold.
#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::io::Read as _;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use cascade_runtime::{Deadline, SystemClock, sleep, thread};
use cascade_transport::conformance::soon;
use cascade_transport::{Endpoint, EndpointConfig, Limits, TransportError};

fn endpoint(limits: Limits) -> Endpoint {
    let config = EndpointConfig { limits, ..Default::default() };
    Endpoint::new(config).unwrap()
}

/// Only a socket on which no process listens is replaced.
#[test]
fn a_listener_replaces_no_file_of_others() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("weights");
    std::fs::write(&path, "weights").unwrap();
    let endpoint = endpoint(Limits::default());
    let refused = endpoint.listen_unix(&path).unwrap_err();
    assert!(matches!(refused, TransportError::Listen { .. }), "{refused}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "weights");

    // A process that accepts nothing, with as many connections as its queue holds.
    let path = directory.path().join("busy");
    let busy = UnixListener::bind(&path).unwrap();
    rustix::net::listen(&busy, 0).unwrap();
    for _ in 0..4 {
        let path = path.clone();
        thread::spawn(move || UnixStream::connect(path));
    }
    sleep(Duration::from_millis(50));
    let refused = endpoint.listen_unix(&path).unwrap_err();
    assert!(matches!(refused, TransportError::Listen { .. }), "{refused}");
    drop(busy);
    endpoint.listen_unix(&path).unwrap();
}

#[test]
fn a_listener_that_ends_leaves_the_socket_of_its_successor() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let endpoint = endpoint(Limits::default());
    let first = endpoint.listen_unix(&path).unwrap();
    first.stop();
    let second = endpoint.listen_unix(&path).unwrap();
    drop(first);
    endpoint.connect_unix(&path, soon()).unwrap();
    drop(second);
    assert!(!path.exists());
}

/// Connections that send nothing take no place of a peer, and of them a limited number is held.
#[test]
fn strangers_keep_nobody_out() {
    let limits =
        Limits { peers_max: 4, handshake_timeout: Duration::from_secs(60), ..Limits::default() };
    let listener = endpoint(limits).listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.tcp_address().unwrap();
    let strangers: Vec<_> = (0..80).map(|_| TcpStream::connect(address).unwrap()).collect();
    let client = endpoint(Limits::default());
    let peers = [(); 2].map(|()| client.connect_tcp(address, soon()).unwrap());
    assert_eq!(listener.peer_count(), 2);
    // The oldest one was ended.
    assert_eq!((&strangers[0]).read(&mut [0]).unwrap(), 0);
    let refused = client.connect_tcp(address, soon()).unwrap_err();
    let expected = "this endpoint has 2 connections to it, and 2 places are free there";
    assert!(refused.to_string().contains(expected), "{refused}");
    let other = endpoint(Limits::default()).connect_tcp(address, soon()).unwrap_err();
    assert!(other.to_string().contains("this host has 2 connections to it"), "{other}");
    drop(peers);
    let until = soon();
    while listener.peer_count() > 0 {
        assert!(!until.has_passed(&SystemClock), "a connection is left");
        sleep(Duration::from_millis(5));
    }
    client.connect_tcp(address, soon()).unwrap();
}

/// A host with many connections that send nothing does not end the handshakes of other hosts.
#[test]
fn a_host_ends_only_handshakes_of_its_own() {
    let limits = Limits { handshake_timeout: Duration::from_secs(60), ..Limits::default() };
    let listener = endpoint(limits).listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.tcp_address().unwrap();
    let first = connect_from("127.0.0.2", address);
    let many: Vec<_> = (0..80).map(|_| connect_from("127.0.0.3", address)).collect();
    assert_eq!((&many[0]).read(&mut [0]).unwrap(), 0, "the oldest one was ended");
    first.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let waited = (&first).read(&mut [0]).unwrap_err();
    assert_eq!(waited.kind(), std::io::ErrorKind::WouldBlock, "it is still open");
}

/// Connects from an address of loopback.
fn connect_from(host: &str, to: SocketAddr) -> TcpStream {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket};

    let from: SocketAddr = format!("{host}:0").parse().unwrap();
    let stream = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&stream, &from).unwrap();
    connect(&stream, &to).unwrap();
    stream.into()
}

/// What happened: a connection that was reset before it was accepted counted as a failure of the
/// listener, which paused for 0.1 s for each.
#[test]
fn connections_that_are_reset_do_not_stop_the_listener() {
    let endpoint = endpoint(Limits::default());
    let listener = endpoint.listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.tcp_address().unwrap();
    for _ in 0..100 {
        let stream = TcpStream::connect(address).unwrap();
        rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
    }
    let deadline = Deadline::after(&SystemClock, Duration::from_secs(5));
    endpoint.connect_tcp(address, deadline).expect("the listener accepts at once");
}
