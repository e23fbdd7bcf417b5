//! rustls's own records against those of this crate: a client that the test writes by hand.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use cascade_transport::wire::{HEADER_BYTES, Header, Hello, Kind};
use cascade_transport::{Endpoint, EndpointConfig, Listener};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::authority::Authority;
use super::{TlsConfig, config};
use crate::proofs::{TOKEN, proof};

type Stream = StreamOwned<ClientConnection, TcpStream>;

fn connect(authority: &Authority, address: SocketAddr, protocol: &[u8]) -> Stream {
    let mut roots = RootCertStore::empty();
    let root = CertificateDer::from_pem_file(authority.path("authority.pem")).unwrap();
    roots.add(root).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![protocol.to_vec()];
    let name = "localhost".try_into().unwrap();
    let connection = ClientConnection::new(Arc::new(config), name).unwrap();
    let socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    StreamOwned::new(connection, socket)
}

fn server(authority: &Authority) -> TlsConfig {
    TlsConfig { client_certificates: false, kernel: false, ..authority.config("server") }
}

fn hello(stream: &mut Stream) {
    let hello = Hello {
        version_min: 1,
        version_max: 1,
        capabilities: 0,
        id: [1; 16],
        nonce: [2; 32],
        name: "by hand".to_owned(),
        geometry: vec![7; 40_000],
        number: 1,
        live: vec![],
    };
    let hello = hello.to_bytes();
    send(stream, Kind::Hello, &hello);
    let (header, challenge) = receive_body(stream);
    assert_eq!(header.kind, Kind::Challenge);
    send(stream, Kind::Proof, &proof("client", &hello, &challenge));
    assert_eq!(receive(stream).kind, Kind::Welcome);
}

fn listen_with(tls: TlsConfig) -> (Listener, SocketAddr) {
    let config = EndpointConfig { token: Some(TOKEN.to_vec()), ..config(Some(tls)) };
    let server = Endpoint::new(config).unwrap();
    let listener = server.listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.tcp_address().unwrap();
    (listener, address)
}

fn send(stream: &mut Stream, kind: Kind, body: &[u8]) {
    stream.write_all(&Header::new(kind, 1).with_body(body).to_bytes()).unwrap();
    stream.write_all(body).unwrap();
}

fn receive(stream: &mut Stream) -> Header {
    receive_body(stream).0
}

fn receive_body(stream: &mut Stream) -> (Header, Vec<u8>) {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).unwrap();
    let header = Header::parse(&header).unwrap();
    let mut body = vec![0; header.body_bytes as usize];
    stream.read_exact(&mut body).unwrap();
    (header, body)
}

#[test]
fn records_keys_and_the_end_are_those_of_tls() {
    let authority = Authority::new();
    let (_listener, address) = listen_with(server(&authority));
    let mut stream = connect(&authority, address, b"cascade-transport");
    hello(&mut stream);
    for _ in 0..5 {
        // A write without pieces is answered at once. The client asks for a new key of the server.
        send(&mut stream, Kind::Write, &[]);
        assert_eq!(receive(&mut stream).kind, Kind::Done);
        stream.conn.refresh_traffic_keys().unwrap();
    }
    stream.conn.send_close_notify();
    stream.flush().unwrap();
    // Without `close_notify`, this would be an error.
    assert_eq!(stream.read_to_end(&mut vec![]).unwrap(), 0);
}

/// The server replaces its key by itself.
#[test]
fn a_key_that_the_server_replaces_is_followed() {
    let authority = Authority::new();
    let config = TlsConfig { key_records_max: 70, ..server(&authority) };
    let (_listener, address) = listen_with(config);
    let mut stream = connect(&authority, address, b"cascade-transport");
    hello(&mut stream);
    for _ in 0..50 {
        send(&mut stream, Kind::Write, &[]);
        assert_eq!(receive(&mut stream).kind, Kind::Done);
    }
}

#[test]
fn a_client_of_another_protocol_is_refused() {
    let authority = Authority::new();
    let (_listener, address) = listen_with(server(&authority));
    let mut stream = connect(&authority, address, b"http/1.1");
    let error = stream
        .write_all(b"GET / HTTP/1.1\r\n\r\n")
        .and_then(|()| stream.read_to_end(&mut vec![]).map(|_| ()));
    assert!(error.unwrap_err().to_string().contains("NoApplicationProtocol"));
}
