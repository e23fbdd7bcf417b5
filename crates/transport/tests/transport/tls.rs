//! Connections with TLS: the conformance suite, certificates that do not fit, peers without TLS,
//! and connections through a proxy that misbehaves.
#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

pub(crate) mod authority;
pub(crate) mod faults;
mod interop;
pub(crate) mod subject;

use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::Ordering;
use std::time::Duration;

use cascade_runtime::{Deadline, SystemClock, sleep, thread};
use cascade_transport::conformance::{self, Numbers, soon};
use cascade_transport::{
    Batch, Direction, Endpoint, EndpointConfig, Limits, Listener, Piece, Place, RecordLayer,
    TlsConfig, TransportError,
};

use self::authority::{Authority, write_secret};
use self::subject::{config, conforms, private};
use crate::proxy::NEVER;

fn endpoint(tls: Option<TlsConfig>) -> Endpoint {
    Endpoint::new(config(tls)).unwrap()
}

fn listen(tls: Option<TlsConfig>) -> (Listener, SocketAddr) {
    let listener = endpoint(tls).listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.tcp_address().unwrap();
    (listener, address)
}

fn in_userspace(config: TlsConfig) -> TlsConfig {
    TlsConfig { kernel: false, ..config }
}

#[test]
fn mutual_tls_conforms() {
    let authority = Authority::new();
    conforms(
        &in_userspace(authority.config("client")),
        &in_userspace(authority.config("server")),
        RecordLayer::Userspace,
    );
}

/// The client has no certificate, and both sides replace their keys after some records.
#[test]
fn tls_without_client_certificates_conforms_while_keys_are_replaced() {
    let authority = Authority::new();
    let server = TlsConfig {
        client_certificates: false,
        key_records_max: 80,
        ..in_userspace(authority.config("server"))
    };
    let client = TlsConfig { identity: None, ..server.clone() };
    conforms(&client, &server, RecordLayer::Userspace);
}

fn connect(client: TlsConfig, address: SocketAddr) -> Result<(), TransportError> {
    endpoint(Some(client)).connect_tcp(address, soon()).map(|_| ())
}

/// The reason why a connection is refused, which is no loss of the connection and no deadline.
fn refusal(client: TlsConfig, server: TlsConfig) -> String {
    let (_listener, address) = listen(Some(server));
    reason(connect(client, address))
}

fn reason(connected: Result<(), TransportError>) -> String {
    match connected {
        Err(TransportError::Handshake { reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_peer_of_another_authority_is_refused() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    // The client finds out.
    let reason = refusal(ours.config("client"), theirs.config("server"));
    assert!(reason.contains("its certificate is not accepted: UnknownIssuer"), "{reason}");
    // The server finds out: the client trusts it.
    let of_client = ours.config("client");
    let trusting = TlsConfig { authority: theirs.path("authority.pem"), ..of_client };
    let reason = refusal(trusting, theirs.config("server"));
    assert!(reason.contains("an authority that it does not know"), "{reason}");
}

#[test]
fn a_certificate_that_has_expired_is_refused() {
    let authority = Authority::new();
    let old = |file| {
        let identity = authority.issue_with(file, &["127.0.0.1"], |params| {
            params.not_after = rcgen::date_time_ymd(2001, 1, 1);
        });
        TlsConfig { identity: Some(identity), ..authority.config("other") }
    };
    let reason = refusal(authority.config("client"), old("server"));
    assert!(reason.contains("expired"), "{reason}");
    let reason = refusal(old("client"), authority.config("server"));
    assert!(reason.contains("expired"), "{reason}");
}

#[test]
fn a_server_whose_certificate_has_another_name_is_refused() {
    let authority = Authority::new();
    let named = |names: &[&str]| {
        let identity = Some(authority.issue("named", names));
        TlsConfig { identity, ..authority.config("other") }
    };
    let client = || authority.config("client");
    let reason = refusal(client(), named(&["localhost"]));
    assert!(reason.contains("not valid for name"), "the address was checked: {reason}");
    // With the name that the certificate has.
    let overridden = TlsConfig { server_name: Some("prefill.example".to_owned()), ..client() };
    let (_listener, address) = listen(Some(named(&["prefill.example"])));
    connect(overridden.clone(), address).unwrap();
    let reason = refusal(overridden, named(&["127.0.0.1"]));
    assert!(reason.contains("not valid for name"), "the override was checked: {reason}");
    // By host name.
    let (_listener, address) = listen(Some(named(&["localhost"])));
    let endpoint = endpoint(Some(client()));
    endpoint.connect_tcp(format!("localhost:{}", address.port()).as_str(), soon()).unwrap();
    let invalid = TlsConfig { server_name: Some("no name".to_owned()), ..client() };
    let error = Endpoint::new(config(Some(invalid))).unwrap_err();
    assert!(error.to_string().contains("no host name"), "{error}");
}

#[test]
fn a_client_without_a_certificate_is_refused_where_one_is_required() {
    let authority = Authority::new();
    let client = TlsConfig { identity: None, ..authority.config("client") };
    let reason = refusal(client, authority.config("server"));
    assert!(reason.contains("requires a certificate, and this side presented none"), "{reason}");
}

/// Neither side falls back to a connection without TLS, and both say which side has it.
#[test]
fn with_tls_at_one_side_there_is_no_connection() {
    let authority = Authority::new();
    let (_plain, address) = listen(None);
    let reason_there = reason(connect(authority.config("client"), address));
    assert_eq!(reason_there, "it does not use TLS, and this side does");
    let (_secure, address) = listen(Some(authority.config("server")));
    let reason_here = reason(endpoint(None).connect_tcp(address, soon()).map(|_| ()));
    assert_eq!(reason_here, "this endpoint uses TLS, and the client does not");
}

#[test]
fn other_hosts_need_a_token_or_a_client_certificate() {
    let authority = Authority::new();
    let everywhere = "0.0.0.0:0".parse().unwrap();
    let mutual = authority.config("server");
    endpoint(Some(mutual.clone())).listen_tcp(everywhere).unwrap();
    let open = TlsConfig { client_certificates: false, ..mutual.clone() };
    let error = endpoint(Some(open.clone())).listen_tcp(everywhere).unwrap_err();
    assert!(error.to_string().contains("a token or client certificates"), "{error}");
    let token = Some(b"0123456789abcdef".to_vec());
    let with_token = EndpointConfig { token, ..config(Some(open)) };
    Endpoint::new(with_token).unwrap().listen_tcp(everywhere).unwrap();
    let anonymous = TlsConfig { identity: None, ..mutual };
    let error = endpoint(Some(anonymous)).listen_tcp(everywhere).unwrap_err();
    assert!(error.to_string().contains("needs a certificate"), "{error}");
}

#[test]
fn a_file_that_cannot_be_used_is_named() {
    use std::os::unix::fs::PermissionsExt as _;
    let authority = Authority::new();
    let good = authority.config("good");
    let identity = good.identity.clone().unwrap();
    let error = |config: TlsConfig| Endpoint::new(subject::config(Some(config))).unwrap_err();
    let with = |certificate: &str, key: &str, root: &str| {
        TlsConfig::mutual(authority.path(certificate), authority.path(key), authority.path(root))
    };
    authority.issue("other", &["localhost"]);
    write_secret(&authority.path("empty.pem"), "");
    for (config, file, text) in [
        (with("none.pem", "good.key", "authority.pem"), "none.pem", "cannot be read"),
        (with("empty.pem", "good.key", "authority.pem"), "empty.pem", "no PEM certificate"),
        (with("good.pem", "empty.pem", "authority.pem"), "empty.pem", "no PEM private key"),
        (with("good.pem", "other.key", "authority.pem"), "good.pem", "does not fit its key"),
        (with("good.pem", "good.key", "."), ".", "not a regular file"),
    ] {
        let error = error(config).to_string();
        assert!(error.contains(file) && error.contains(text), "{error}");
    }
    let open = std::fs::Permissions::from_mode(0o640);
    std::fs::set_permissions(&identity.key, open).unwrap();
    assert!(error(good).to_string().contains("chmod 600"));
}

/// Certificates are replaced while an endpoint runs; a pair that does not fit changes nothing.
#[test]
fn a_replaced_certificate_is_used_by_the_next_connection() {
    let authority = Authority::new();
    let (_listener, address) = listen(Some(authority.config("server")));
    let client = authority.config("client");
    connect(client.clone(), address).unwrap();
    let identity = authority.issue_with("new", &["127.0.0.1"], |params| {
        params.not_after = rcgen::date_time_ymd(2001, 1, 1);
    });
    let replace = |from: &std::path::Path, to: &str| {
        write_secret(&authority.path(to), &std::fs::read_to_string(from).unwrap());
    };
    replace(&identity.certificate, "server.pem");
    connect(client.clone(), address).unwrap();
    replace(&identity.key, "server.key");
    assert!(reason(connect(client.clone(), address)).contains("expired"));
    authority.issue("server", &["127.0.0.1"]);
    connect(client, address).unwrap();
}

/// Both directions are full at the same time, and keys are replaced in between.
#[test]
fn many_threads_write_and_read_at_once() {
    let authority = Authority::new();
    let tls = |file| TlsConfig { key_records_max: 500, ..in_userspace(authority.config(file)) };
    let configs = (config(Some(tls("client"))), config(Some(tls("server"))));
    let (client, server, local, remote) = conformance::endpoints_of(configs, private);
    let listener = server.listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
    let connection = client.connect_tcp(listener.tcp_address().unwrap(), soon()).unwrap();
    let part = 1 << 20;
    let bytes = Numbers(4).bytes(part * 8);
    client.fill(local[0], 0, &bytes).unwrap();
    server.fill(remote[1], 0, &bytes).unwrap();
    let threads = (0..8_u64).map(|number| {
        let connection = std::sync::Arc::clone(&connection);
        thread::spawn(move || {
            let offset = number * part as u64;
            for _ in 0..6 {
                for (direction, region) in [(Direction::Write, 0), (Direction::Read, 1)] {
                    let place = |region| Place { region, offset };
                    let (local, remote) = (place(local[region]), place(remote[region]));
                    let pieces = [Piece { local, remote, bytes: part as u64 }];
                    let batch = Batch { direction, pieces: &pieces, notice: None };
                    connection.post(&batch, soon()).unwrap().wait(soon()).unwrap();
                }
            }
        })
    });
    let threads: Vec<_> = threads.collect();
    for thread in threads {
        thread.join().unwrap();
    }
    let mut written = vec![0; bytes.len()];
    server.fetch(remote[0], 0, &mut written).unwrap();
    assert!(written == bytes);
    client.fetch(local[1], 0, &mut written).unwrap();
    assert!(written == bytes);
}

#[test]
fn a_handshake_that_is_not_answered_ends_with_the_deadline() {
    let authority = Authority::new();
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let client = endpoint(Some(authority.config("client")));
    let deadline = Deadline::after(&SystemClock, Duration::from_millis(200));
    let error = client.connect_tcp(silent.local_addr().unwrap(), deadline).unwrap_err();
    assert!(matches!(error, TransportError::Deadline { .. }), "{error}");
}

/// Sends a long record of a handshake byte by byte, until the peer has closed the connection.
/// Returns whether it was sent whole.
fn drip(mut stream: TcpStream) -> bool {
    let record = [&[22, 3, 3, 0x40, 0][..], &[0; 1 << 14]].concat();
    record.iter().all(|byte| {
        sleep(Duration::from_millis(1));
        stream.write_all(&[*byte]).is_ok()
    })
}

/// A peer that makes progress, byte by byte, holds a client no longer than its deadline, and a
/// server no longer than its time for a handshake.
#[test]
fn a_handshake_that_arrives_byte_by_byte_ends_with_the_deadline() {
    let authority = Authority::new();
    let short = Duration::from_millis(300);
    let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = server.local_addr().unwrap();
    let dripping = thread::spawn(move || drip(server.accept().unwrap().0));
    let client = endpoint(Some(authority.config("client")));
    let error = client.connect_tcp(address, Deadline::after(&SystemClock, short)).unwrap_err();
    assert!(matches!(error, TransportError::Deadline { .. }), "{error}");
    assert!(!dripping.join().unwrap());

    let limits = Limits { handshake_timeout: short, ..Limits::default() };
    let config = EndpointConfig { limits, ..config(Some(authority.config("server"))) };
    let server = Endpoint::new(config).unwrap();
    let listener = server.listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
    assert!(!drip(TcpStream::connect(listener.tcp_address().unwrap()).unwrap()));
}

#[test]
fn no_flipped_bit_is_taken_for_success() {
    faults::no_flipped_bit_is_taken_for_success(false);
}

#[test]
fn a_cut_stream_is_an_error_and_no_silent_end() {
    faults::a_cut_stream_is_an_error_and_no_silent_end(false);
}

#[test]
fn a_frozen_peer_holds_nobody_beyond_the_deadline() {
    faults::a_frozen_peer_holds_nobody_beyond_the_deadline(false);
}

#[test]
fn bytes_that_arrive_one_by_one_arrive() {
    faults::bytes_that_arrive_one_by_one_arrive(false);
}

#[test]
fn a_peer_that_sends_byte_by_byte_holds_nobody_for_ever() {
    faults::a_peer_that_sends_byte_by_byte_holds_nobody_for_ever(false);
}

/// A handshake that is cut at any byte, or that has a flipped bit in any byte, is an error.
#[test]
fn a_handshake_that_is_cut_or_altered_at_any_byte_fails() {
    let authority = Authority::new();
    let limits = Limits {
        handshake_timeout: Duration::from_millis(150),
        stall_timeout: Duration::from_millis(150),
        ..Limits::default()
    };
    let setup = faults::Setup::new(&authority, false, limits);
    let connection = setup.connect(soon()).unwrap();
    let bytes = setup.proxy.passed();
    drop(connection);
    assert!((1500..8000).contains(&bytes), "{bytes}");
    // The last record is `Welcome`. Signatures differ in length, by a few bytes.
    for at in 0..bytes - 100 {
        setup.proxy.cut_at.store(at, Ordering::Relaxed);
        let error = setup.connect(soon()).unwrap_err();
        let is_expected =
            matches!(error, TransportError::Lost { .. } | TransportError::Handshake { .. });
        assert!(is_expected, "cut at {at}: {error}");
        setup.proxy.cut_at.store(NEVER, Ordering::Relaxed);
    }
    let mut ignored = 0;
    for at in (0..bytes - 100).step_by(37) {
        setup.proxy.flip_at.store(at, Ordering::Relaxed);
        let deadline = Deadline::after(&SystemClock, Duration::from_millis(400));
        // TLS ignores the version in the header of a record (RFC 8446, 5.1).
        ignored += usize::from(setup.connect(deadline).is_ok());
        setup.proxy.flip_at.store(NEVER, Ordering::Relaxed);
    }
    assert!(ignored < 5, "{ignored} flips changed nothing");
    setup.connect(soon()).unwrap();
}
