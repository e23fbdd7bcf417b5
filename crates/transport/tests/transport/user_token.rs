//! Over loopback, where all users of the host connect, both sides know the token of one user.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::print_stderr, reason = "prints why a test was left out")]

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use cascade_transport::conformance::soon;
use cascade_transport::wire::{Header, Kind};
use cascade_transport::{Endpoint, EndpointConfig, Listener, TransportError};

use crate::liar::Liar;
use crate::proxy::Proxy;
use crate::tls::authority::Authority;

fn endpoint(user_token: PathBuf) -> Endpoint {
    Endpoint::new(EndpointConfig { user_token, ..Default::default() }).unwrap()
}

fn listen(endpoint: &Endpoint) -> Result<Listener, TransportError> {
    endpoint.listen_tcp("127.0.0.1:0".parse().unwrap())
}

/// The reason why a client with this token of its user cannot connect.
fn refusal(listener: &Listener, user_token: &Path) -> String {
    let client = endpoint(user_token.to_owned());
    let connected = client.connect_tcp(listener.tcp_address().unwrap(), soon());
    connected.unwrap_err().to_string()
}

#[test]
fn processes_of_one_user_connect_and_others_do_not() {
    let directory = tempfile::tempdir().unwrap();
    let (ours, theirs) = (directory.path().join("ours"), directory.path().join("theirs"));
    let server = endpoint(ours.clone());
    let listener = listen(&server).unwrap();
    let address = listener.tcp_address().unwrap();
    endpoint(ours.clone()).connect_tcp(address, soon()).unwrap();
    let refused = refusal(&listener, &theirs);
    assert!(refused.contains("the token is wrong"), "{refused}");
    assert!(refused.contains(&format!("that of {}", theirs.display())), "{refused}");

    // A cleaner of temporary files removes it: the next two that connect make a new one.
    fs::remove_file(&ours).unwrap();
    endpoint(ours.clone()).connect_tcp(address, soon()).unwrap();

    // A client with a token of its own does not say what it knows to a server without it.
    let config = EndpointConfig { token: Some(vec![7; 16]), ..Default::default() };
    let refused = Endpoint::new(config).unwrap().connect_tcp(address, soon()).unwrap_err();
    assert!(refused.to_string().contains("the configured one"), "{refused}");
}

#[test]
fn an_endpoint_that_cannot_have_the_token_does_not_listen() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file/token");
    fs::write(directory.path().join("file"), "no directory").unwrap();
    let error = listen(&endpoint(path.clone())).unwrap_err().to_string();
    assert!(error.contains(&*path.to_string_lossy()), "{error}");
    assert!(error.contains("configure a token"), "{error}");
    let token = Some(vec![7; 16]);
    let config = EndpointConfig { token, user_token: path, ..Default::default() };
    listen(&Endpoint::new(config).unwrap()).unwrap();
}

#[test]
fn certificates_of_clients_stand_for_the_token() {
    let directory = tempfile::tempdir().unwrap();
    let none = directory.path().join("file/token");
    fs::write(directory.path().join("file"), "no directory").unwrap();
    let authority = Authority::new();
    let with = |name, user_token: &Path| {
        let (tls, user_token) = (Some(authority.config(name)), user_token.to_owned());
        Endpoint::new(EndpointConfig { tls, user_token, ..Default::default() }).unwrap()
    };
    let server = with("server", &none);
    let listener = listen(&server).unwrap();
    with("client", &none).connect_tcp(listener.tcp_address().unwrap(), soon()).unwrap();
}

/// A process of another user listens at the port of an engine that has ended.
#[test]
fn a_server_that_asks_for_no_token_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (address, liar) = Liar::start(|mut liar| {
        liar.challenge(false);
        liar.wait_for_end();
    });
    let client = endpoint(directory.path().join("token"));
    let error = client.connect_tcp(address, soon()).unwrap_err().to_string();
    assert!(error.contains("it asks for no token"), "{error}");
    liar.join().unwrap();
}

/// Runs `run` in a thread of another user. `None` if this process is not root, who can.
fn as_another_user<T: Send>(run: impl FnOnce() -> T + Send) -> Option<T> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("left out: only root can become another user");
        return None;
    }
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let user = rustix::fs::Uid::from_raw(65_534);
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            run()
        });
        Some(thread.join().unwrap())
    })
}

#[test]
fn a_socket_of_another_user_needs_a_token() {
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let path = directory.path().join("socket");
    let token = Some(vec![7; 16]);
    let config = EndpointConfig { token, ..Default::default() };
    let theirs = Endpoint::new(config.clone()).unwrap();
    let Some(_listener) = as_another_user(|| theirs.listen_unix(&path).unwrap()) else {
        return;
    };
    let error = endpoint(PathBuf::new()).connect_unix(&path, soon()).unwrap_err().to_string();
    assert!(error.contains("a process of user 65534 listens there"), "{error}");
    Endpoint::new(config).unwrap().connect_unix(&path, soon()).unwrap();
}

/// A process of another user passes all bytes on, so that it could read and change them.
#[test]
fn a_process_between_two_of_a_user_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let token = directory.path().join("token");
    let server = endpoint(token.clone());
    let listener = listen(&server).unwrap();
    let (_proxy, address) = Proxy::start(listener.tcp_address().unwrap());
    let error = endpoint(token).connect_tcp(address, soon()).unwrap_err().to_string();
    assert!(error.contains("the token is wrong"), "{error}");
}

/// A stranger's message costs no memory of the length in its header, whatever its kind.
#[test]
fn a_stranger_sends_only_a_short_hello() {
    let directory = tempfile::tempdir().unwrap();
    let server = endpoint(directory.path().join("token"));
    let listener = listen(&server).unwrap();
    for (kind, bytes) in [(Kind::Hello, 2 << 20), (Kind::Welcome, 2 << 20), (Kind::Write, 4096)] {
        let mut stranger = TcpStream::connect(listener.tcp_address().unwrap()).unwrap();
        let header = Header { body_bytes: bytes, ..Header::new(kind, 0) };
        stranger.write_all(&header.to_bytes()).unwrap();
        let mut answer = vec![];
        stranger.read_to_end(&mut answer).unwrap();
        let text = String::from_utf8_lossy(&answer);
        let expected = if kind == Kind::Hello { "body_bytes" } else { "instead of Hello" };
        assert!(text.contains(expected), "{kind:?}: {text}");
    }
}
