//! A server that a test writes by hand.

#![allow(dead_code, reason = "each test file uses its own part of these")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use cascade_runtime::thread::{self, JoinHandle};
use cascade_transport::wire::{Challenge, HEADER_BYTES, Header, Kind, OfferedRegion, Welcome};
use cascade_transport::{Access, Endpoint, EndpointConfig, Region, RegionId};

use crate::proofs::{TOKEN, proof};

pub(crate) const BYTES: usize = 4096;

/// One connection of such a server, and its proof of the token.
pub(crate) struct Liar(pub(crate) TcpStream, [u8; 32]);

impl Liar {
    /// Runs `lie` with the first connection to the address.
    pub(crate) fn start(lie: impl FnOnce(Self) + Send + 'static) -> (SocketAddr, JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("it works on loopback");
        let address = listener.local_addr().expect("it works on loopback");
        let thread = thread::spawn(move || {
            let (stream, _) = listener.accept().expect("a client connects");
            stream.set_read_timeout(Some(Duration::from_secs(20))).expect("it works on loopback");
            lie(Self(stream, [0; 32]));
        });
        (address, thread)
    }

    pub(crate) fn send(&mut self, kind: Kind, body: &[u8]) {
        self.0.write_all(&Header::new(kind, 0).with_body(body).to_bytes()).expect("a client");
        self.0.write_all(body).expect("a client");
    }

    pub(crate) fn receive(&mut self) -> Header {
        self.receive_body().0
    }

    fn receive_body(&mut self) -> (Header, Vec<u8>) {
        let mut bytes = [0; HEADER_BYTES];
        self.0.read_exact(&mut bytes).expect("a client");
        let header = Header::parse(&bytes).expect("a client's header");
        let mut body = vec![0; header.body_bytes as usize];
        self.0.read_exact(&mut body).expect("a client");
        (header, body)
    }

    pub(crate) fn challenge(&mut self, needs_token: bool) {
        self.challenge_with(needs_token, 0);
    }

    pub(crate) fn challenge_with(&mut self, needs_token: bool, capabilities: u64) {
        let (header, hello) = self.receive_body();
        assert_eq!(header.kind, Kind::Hello);
        let (id, nonce) = ([7; 16], [8; 32]);
        let challenge = Challenge { version: 1, capabilities, id, nonce, needs_token };
        let challenge = challenge.to_bytes();
        self.send(Kind::Challenge, &challenge);
        self.1 = proof("server", &hello, &challenge);
    }

    pub(crate) fn welcome(&mut self) {
        self.welcome_with(self.1);
    }

    pub(crate) fn welcome_with(&mut self, proof: [u8; 32]) {
        assert_eq!(self.receive().kind, Kind::Proof);
        let bytes = BYTES as u64;
        let offered =
            OfferedRegion { id: RegionId(0), access: Access::BOTH, is_mappable: false, bytes };
        let name = "liar".to_owned();
        let welcome = Welcome { proof, name, geometry: vec![], regions: vec![offered] };
        self.send(Kind::Welcome, &welcome.to_bytes());
    }

    /// Waits until the client closes the connection.
    pub(crate) fn wait_for_end(&mut self) {
        let mut rest = vec![];
        // A reset is an end, too.
        drop(self.0.read_to_end(&mut rest));
    }
}

pub(crate) fn client() -> (Endpoint, RegionId) {
    client_with(EndpointConfig::default())
}

pub(crate) fn client_with(config: EndpointConfig) -> (Endpoint, RegionId) {
    let config = EndpointConfig { token: Some(TOKEN.to_vec()), ..config };
    let client = Endpoint::new(config).expect("valid");
    let region = client
        .register(Region::shared(BYTES, Access::LOCAL).expect("memory"))
        .expect("it works on loopback");
    (client, region)
}
