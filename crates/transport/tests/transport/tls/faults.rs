//! Connections with TLS through a proxy that flips bits, cuts, freezes and drips.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cascade_runtime::{Deadline, SystemClock};
use cascade_transport::conformance::{Numbers, soon};
use cascade_transport::{
    Access, Batch, Connection, Direction, Endpoint, EndpointConfig, Limits, Listener, Piece, Place,
    RegionId, TlsConfig, TransportError,
};

use super::authority::Authority;
use super::subject::private;
use crate::proxy::{NEVER, Proxy};

const BYTES: usize = 1 << 20;

/// A server, and a client that reaches it through a proxy.
pub(crate) struct Setup {
    client: Endpoint,
    local: RegionId,
    server: Endpoint,
    remote: RegionId,
    pub(crate) proxy: Arc<Proxy>,
    address: std::net::SocketAddr,
    _listener: Listener,
}

impl Setup {
    pub(crate) fn new(authority: &Authority, kernel: bool, limits: Limits) -> Self {
        let tls = |file| Some(TlsConfig { kernel, ..authority.config(file) });
        let endpoint = |file, access| {
            let config = EndpointConfig { tls: tls(file), limits, ..Default::default() };
            let endpoint = Endpoint::new(config).unwrap();
            let region = endpoint.register(private(BYTES, access)).unwrap();
            (endpoint, region)
        };
        let (client, local) = endpoint("client", Access::LOCAL);
        let (server, remote) = endpoint("server", Access::BOTH);
        let listener = server.listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
        let (proxy, address) = Proxy::start(listener.tcp_address().unwrap());
        Self { client, local, server, remote, proxy, address, _listener: listener }
    }

    pub(crate) fn connect(
        &self,
        deadline: Deadline,
    ) -> Result<Arc<dyn Connection>, TransportError> {
        self.client.connect_tcp(self.address, deadline)
    }

    fn run(
        &self,
        connection: &dyn Connection,
        direction: Direction,
        deadline: Deadline,
    ) -> Result<(), TransportError> {
        self.run_and_tell(connection, direction, b"arrived", deadline)
    }

    fn run_and_tell(
        &self,
        connection: &dyn Connection,
        direction: Direction,
        notice: &[u8],
        deadline: Deadline,
    ) -> Result<(), TransportError> {
        let place = |region| Place { region, offset: 0 };
        let (local, remote) = (place(self.local), place(self.remote));
        let pieces = [Piece { local, remote, bytes: BYTES as u64 }];
        let batch = Batch { direction, pieces: &pieces, notice: Some(notice) };
        connection.post(&batch, deadline)?.wait(deadline)
    }

    /// Source and target of a direction.
    fn sides(&self, direction: Direction) -> [(&Endpoint, RegionId); 2] {
        let (here, there) = ((&self.client, self.local), (&self.server, self.remote));
        match direction {
            Direction::Write => [here, there],
            Direction::Read => [there, here],
        }
    }
}

fn has((endpoint, region): (&Endpoint, RegionId), expected: &[u8]) -> bool {
    let mut actual = vec![0; expected.len()];
    endpoint.fetch(region, 0, &mut actual).unwrap();
    actual == expected
}

pub(crate) fn no_flipped_bit_is_taken_for_success(kernel: bool) {
    let authority = Authority::new();
    let limits = Limits { stall_timeout: Duration::from_millis(500), ..Limits::default() };
    let setup = Setup::new(&authority, kernel, limits);
    let mut numbers = Numbers(1);
    let mut found = 0;
    for round in 0..40 {
        let direction = [Direction::Write, Direction::Read][round % 2];
        let connection = setup.connect(soon()).unwrap();
        let bytes = numbers.bytes(BYTES);
        let [from, into] = setup.sides(direction);
        from.0.fill(from.1, 0, &bytes).unwrap();
        // Half of the flips are in the first and last bytes, where the small records are.
        let near = [numbers.below(300), BYTES as u64 + numbers.below(1700)];
        let far = numbers.below(BYTES as u64 + 1700);
        let at = if round % 4 < 2 { near[round / 4 % 2] } else { far };
        setup.proxy.at(&setup.proxy.flip_at, at);
        let told = (round as u64).to_le_bytes();
        match setup.run_and_tell(&*connection, direction, &told, soon()) {
            // The flip was after the last byte of the batch.
            Ok(()) => assert!(has(into, &bytes), "round {round}: wrong bytes confirmed"),
            Err(error) => {
                found += 1;
                let is_lost = matches!(error, TransportError::Lost { .. });
                assert!(is_lost, "round {round}, byte {at}: {error}");
                assert!(!connection.is_open());
            }
        }
        setup.proxy.flip_at.store(NEVER, Ordering::Relaxed);
        // That of an earlier round may come late.
        let notice = || setup.server.next_notice(Deadline::at(Duration::ZERO));
        let is_told = std::iter::from_fn(notice).any(|notice| *notice.bytes == told);
        if is_told && direction == Direction::Write {
            assert!(has(into, &bytes), "round {round}: told of bytes that are wrong");
        }
    }
    assert!(found > 25, "only {found} flips hit the batch");
}

pub(crate) fn a_cut_stream_is_an_error_and_no_silent_end(kernel: bool) {
    let authority = Authority::new();
    let setup = Setup::new(&authority, kernel, Limits::default());
    let mut numbers = Numbers(2);
    for round in 0..16 {
        let direction = [Direction::Write, Direction::Read][round % 2];
        let connection = setup.connect(soon()).unwrap();
        setup.proxy.at(&setup.proxy.cut_at, numbers.below(BYTES as u64));
        let error = setup.run(&*connection, direction, soon()).unwrap_err();
        assert!(matches!(error, TransportError::Lost { .. }), "round {round}: {error}");
        assert!(!connection.is_open());
        setup.proxy.cut_at.store(NEVER, Ordering::Relaxed);
    }
    setup.client.unregister(setup.local, soon()).unwrap();
    setup.server.unregister(setup.remote, soon()).unwrap();
}

pub(crate) fn a_frozen_peer_holds_nobody_beyond_the_deadline(kernel: bool) {
    let authority = Authority::new();
    for direction in [Direction::Write, Direction::Read] {
        for after in [0, 20, 1000, 700_000] {
            let limits = Limits { stall_timeout: Duration::from_millis(300), ..Limits::default() };
            let setup = Setup::new(&authority, kernel, limits);
            let connection = setup.connect(soon()).unwrap();
            setup.proxy.at(&setup.proxy.freeze_at, after);
            let deadline = Deadline::after(&SystemClock, Duration::from_millis(200));
            let error = setup.run(&*connection, direction, deadline).unwrap_err();
            let is_expected =
                matches!(error, TransportError::Deadline { .. } | TransportError::Lost { .. });
            assert!(is_expected, "{error}");
            setup.client.unregister(setup.local, soon()).unwrap();
            // The server gives up by itself.
            setup.server.unregister(setup.remote, soon()).unwrap();
        }
    }
}

pub(crate) fn bytes_that_arrive_one_by_one_arrive(kernel: bool) {
    let authority = Authority::new();
    let setup = Setup::new(&authority, kernel, Limits::default());
    setup.proxy.piece.store(1, Ordering::Relaxed);
    let connection = setup.connect(soon()).unwrap();
    let bytes = Numbers(3).bytes(40_000);
    setup.client.fill(setup.local, 0, &bytes).unwrap();
    let place = |region| Place { region, offset: 0 };
    let (local, remote) = (place(setup.local), place(setup.remote));
    let pieces = [Piece { local, remote, bytes: bytes.len() as u64 }];
    for direction in [Direction::Write, Direction::Read] {
        let batch = Batch { direction, pieces: &pieces, notice: Some(b"slow") };
        connection.post(&batch, soon()).unwrap().wait(soon()).unwrap();
        assert!(has((&setup.server, setup.remote), &bytes));
    }
}

pub(crate) fn a_peer_that_sends_byte_by_byte_holds_nobody_for_ever(kernel: bool) {
    let authority = Authority::new();
    let limits = Limits { stall_timeout: Duration::from_secs(1), ..Limits::default() };
    let setup = Setup::new(&authority, kernel, limits);
    let connection = setup.connect(soon()).unwrap();
    setup.proxy.piece.store(1, Ordering::Relaxed);
    setup.proxy.answer_delay_ms.store(20, Ordering::Relaxed);
    let error = setup.run(&*connection, Direction::Read, soon()).unwrap_err();
    assert!(matches!(error, TransportError::Lost { .. }), "{error}");
    setup.server.unregister(setup.remote, soon()).unwrap();
}
