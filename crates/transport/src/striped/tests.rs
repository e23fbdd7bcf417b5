//! Streams that are lost, through a proxy on real sockets.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use cascade_runtime::{Mutex, RwLock, sleep, thread};

use super::*;
use crate::conformance::{Numbers, soon};
use crate::{Access, Endpoint, EndpointConfig, Listener, Place, Region, RegionId};

const BYTES: usize = 1 << 20;
const STREAMS: usize = 4;
const DIVISION: Division = Division { part_bytes_min: 64 << 10, open_pause: Duration::ZERO };
const SHORT: Duration = Duration::from_millis(200);

/// Passes connections on to targets in turn, and cuts them.
struct Proxy {
    address: SocketAddr,
    /// The client's side of each connection.
    clients: Mutex<Vec<TcpStream>>,
    /// After so many bytes of answers, the connection that they belong to is cut; 0 for never.
    cut_after: AtomicUsize,
    /// Requests pass while it is not held. The other side of a connection that is cut stays until
    /// all of its requests have passed.
    gate: RwLock<()>,
}

impl Proxy {
    fn start(targets: Vec<SocketAddr>) -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Arc::new(Self {
            address: listener.local_addr().unwrap(),
            clients: Mutex::default(),
            cut_after: AtomicUsize::new(0),
            gate: RwLock::default(),
        });
        let of_thread = Arc::clone(&proxy);
        thread::spawn(move || {
            for (client, target) in listener.incoming().zip(targets.iter().cycle()) {
                let (client, server) = (client.unwrap(), TcpStream::connect(target).unwrap());
                // Else the small messages of a handshake wait for each other.
                client.set_nodelay(true).unwrap();
                server.set_nodelay(true).unwrap();
                of_thread.clients.lock().unwrap().push(client.try_clone().unwrap());
                let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let proxy = Arc::clone(&of_thread);
                thread::spawn(move || proxy.pass_requests(from, to));
                let proxy = Arc::clone(&of_thread);
                thread::spawn(move || proxy.pass_answers(server, client));
            }
        });
        proxy
    }

    fn pass_requests(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            let _open = self.gate.read().unwrap();
            if to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        drop(to.shutdown(Shutdown::Both));
    }

    fn pass_answers(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut buffer = vec![0; 1 << 14];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            let less = |left: usize| Some(left.saturating_sub(count));
            let left = self.cut_after.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
            let left = left.unwrap_or_default();
            if (1..=count).contains(&left) {
                drop(to.write_all(&buffer[..left - 1]));
                break;
            }
            if to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        drop(to.shutdown(Shutdown::Both));
    }

    /// Cuts the connection that was made as this one, at the side of the client.
    fn cut(&self, number: usize) {
        self.clients.lock().unwrap()[number].shutdown(Shutdown::Both).unwrap();
    }
}

struct Pair {
    client: Endpoint,
    local: RegionId,
    server: Endpoint,
    remote: RegionId,
    listener: Listener,
    proxy: Arc<Proxy>,
}

fn endpoint(access: Access) -> (Endpoint, RegionId) {
    let token = Some(b"the token of this test".to_vec());
    let config = EndpointConfig { token, streams: STREAMS, ..Default::default() };
    let endpoint = Endpoint::new(config).unwrap();
    let region = endpoint.register(Region::private(BYTES, access)).unwrap();
    (endpoint, region)
}

fn listen(endpoint: &Endpoint) -> (Listener, SocketAddr) {
    let listener = endpoint.listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.tcp_address().unwrap();
    (listener, address)
}

impl Pair {
    fn new() -> Self {
        let (server, remote) = endpoint(Access::BOTH);
        let (client, local) = endpoint(Access::LOCAL);
        let (listener, address) = listen(&server);
        let proxy = Proxy::start(vec![address]);
        Self { client, local, server, remote, listener, proxy }
    }

    fn connect(&self) -> StripedConnection {
        self.client.connect_divided(self.proxy.address, DIVISION, soon()).unwrap()
    }

    fn piece(&self, bytes: usize) -> [Piece; 1] {
        let place = |region| Place { region, offset: 0 };
        [Piece { local: place(self.local), remote: place(self.remote), bytes: bytes as u64 }]
    }

    fn run(
        &self,
        connection: &StripedConnection,
        (direction, bytes): (Direction, usize),
        notice: Option<&[u8]>,
    ) -> Result<(), TransportError> {
        let batch = Batch { direction, pieces: &self.piece(bytes), notice };
        connection.post(&batch, soon())?.wait(soon())
    }

    fn at_server(&self) -> Vec<u8> {
        let mut bytes = vec![0; BYTES];
        self.server.fetch(self.remote, 0, &mut bytes).unwrap();
        bytes
    }
}

fn lanes(connection: &StripedConnection) -> usize {
    connection.streams.all().unwrap().len()
}

/// Waits until all streams live. Reads open them again.
fn wait_for_all(pair: &Pair, connection: &StripedConnection) {
    let until = soon();
    while lanes(connection) < STREAMS {
        assert!(!until.has_passed(&SystemClock), "a stream is not opened again");
        pair.run(connection, (Direction::Read, 1), None).unwrap();
    }
}

fn cut_in_reads(connections: usize, cuts: usize) {
    let pair = Pair::new();
    let mut numbers = Numbers(1);
    let bytes = numbers.bytes(BYTES);
    pair.server.fill(pair.remote, 0, &bytes).unwrap();
    for _ in 0..connections {
        let connection = pair.connect();
        for round in 0..cuts {
            wait_for_all(&pair, &connection);
            // One of three is divided. Each is cut before its last byte.
            let length = if round % 3 == 0 { BYTES } else { 32 << 10 };
            let byte = 1 + usize::try_from(numbers.below(length as u64 - 1)).unwrap();
            pair.client.fill(pair.local, 0, &vec![0; length]).unwrap();
            let notice = u64::try_from(round).unwrap().to_le_bytes();
            let notice = (round % 2 == 0).then_some(&notice[..]);
            pair.proxy.cut_after.store(byte, Ordering::Release);
            pair.run(&connection, (Direction::Read, length), notice).unwrap();
            assert_eq!(pair.proxy.cut_after.load(Ordering::Acquire), 0, "nothing was cut");
            let mut read = vec![0; length];
            pair.client.fetch(pair.local, 0, &mut read).unwrap();
            assert!(read == bytes[..length], "round {round}: wrong bytes");
            assert!(connection.is_open());
            // The peer gives the notice once it has sent all bytes.
            let until = if notice.is_some() { soon() } else { Deadline::at(Duration::ZERO) };
            let came = pair.server.next_notice(until);
            assert_eq!(came.as_ref().map(|it| &*it.bytes), notice, "round {round}");
        }
    }
    assert_eq!(pair.server.next_notice(Deadline::after(&SystemClock, SHORT)), None);
}

#[test]
fn a_thousand_streams_are_lost_in_reads_and_no_read_fails() {
    cut_in_reads(4, 250);
}

/// The bytes of a write wait in the proxy when its stream is lost.
#[test]
fn a_write_whose_stream_is_lost_ends_the_connection_and_never_arrives_later() {
    // A write that one stream takes, and one that is divided.
    for length in [4096, BYTES] {
        let pair = Pair::new();
        let connection = pair.connect();
        pair.client.fill(pair.local, 0, &vec![1; BYTES]).unwrap();
        let closed = pair.proxy.gate.write().unwrap();
        let batch = Batch {
            direction: Direction::Write,
            pieces: &pair.piece(length),
            notice: Some(b"written"),
        };
        let mut ticket = connection.post(&batch, soon()).unwrap();
        sleep(SHORT);
        // The first batch takes the first stream; a divided one has a part in each.
        for number in 0..if length == BYTES { STREAMS } else { 1 } {
            pair.proxy.cut(number);
        }
        let lost = ticket.wait(soon());
        assert!(matches!(lost, Err(TransportError::Lost { .. })), "{lost:?}");
        assert!(!connection.is_open(), "its bytes may still arrive");
        for direction in [Direction::Read, Direction::Write] {
            let refused = pair.run(&connection, (direction, 1), None);
            assert!(matches!(refused, Err(TransportError::Lost { .. })), "{refused:?}");
        }
        drop(connection);
        pair.client.fill(pair.local, 0, &vec![2; BYTES]).unwrap();
        // Its requests do not pass the gate.
        let (_second, address) = listen(&pair.server);
        let successor = pair.client.connect_divided(address, DIVISION, soon()).unwrap();
        pair.run(&successor, (Direction::Write, BYTES), None).unwrap();
        drop(closed);
        sleep(SHORT);
        assert!(pair.at_server().iter().all(|byte| *byte == 2), "{length} bytes");
        assert_eq!(pair.server.next_notice(Deadline::at(cascade_runtime::now())), None);
    }
}

#[test]
fn a_stream_that_ends_idle_is_replaced_and_writes_go_on() {
    let pair = Pair::new();
    let connection = pair.connect();
    for round in 0..20 {
        pair.client.fill(pair.local, 0, &vec![round; BYTES]).unwrap();
        pair.run(&connection, (Direction::Write, BYTES), None).unwrap();
        assert!(pair.at_server().iter().all(|byte| *byte == round));
        wait_for_all(&pair, &connection);
        let last = pair.proxy.clients.lock().unwrap().len() - 1;
        pair.proxy.cut(last);
    }
    assert!(connection.is_open());
}

#[test]
fn the_last_stream_that_is_lost_ends_the_connection() {
    let pair = Pair::new();
    let connection = pair.connect();
    pair.listener.stop();
    let until = soon();
    while connection.is_open() {
        assert!(!until.has_passed(&SystemClock), "the peer has closed all of them");
        sleep(Duration::from_millis(5));
    }
    let refused = pair.run(&connection, (Direction::Read, BYTES), None);
    assert!(matches!(refused, Err(TransportError::Lost { .. })), "{refused:?}");
}

/// A load balancer: the first streams lead to one endpoint, and the one that is opened again to
/// another.
#[test]
fn a_stream_to_another_endpoint_is_not_used() {
    let pair = Pair::new();
    let (other, elsewhere) = endpoint(Access::BOTH);
    let (_listener, address) = listen(&other);
    other.fill(elsewhere, 0, &vec![7; BYTES]).unwrap();
    let own = pair.listener.tcp_address().unwrap();
    let proxy = Proxy::start(vec![own, own, own, own, address, address, address, own]);
    let pair = Pair { proxy, ..pair };
    let connection = pair.connect();
    pair.proxy.cut(2);
    let until = soon();
    while pair.proxy.clients.lock().unwrap().len() < 8 {
        assert!(!until.has_passed(&SystemClock), "it is tried again");
        pair.run(&connection, (Direction::Read, BYTES), None).unwrap();
        let mut read = vec![1; BYTES];
        pair.client.fetch(pair.local, 0, &mut read).unwrap();
        assert!(read.iter().all(|byte| *byte == 0));
    }
    wait_for_all(&pair, &connection);
}

/// While one stream is being lost, its batches are cancelled.
#[test]
fn a_cancelled_read_of_a_lost_stream_leaves_the_memory() {
    let pair = Pair::new();
    let connection = pair.connect();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut numbers = Numbers(2);
            for _ in 0..5000 {
                if is_done.load(Ordering::Relaxed) {
                    break;
                }
                let byte = 1 + usize::try_from(numbers.below(BYTES as u64)).unwrap();
                pair.proxy.cut_after.store(byte, Ordering::Release);
                sleep(Duration::from_millis(2));
            }
        });
        for _ in 0..100 {
            wait_for_all_or_lost(&pair, &connection);
            if !connection.is_open() {
                break;
            }
            let pieces = pair.piece(BYTES);
            let batch = Batch { direction: Direction::Read, pieces: &pieces, notice: None };
            let Ok(ticket) = connection.post(&batch, soon()) else { break };
            ticket.cancel(soon());
            pair.client.fill(pair.local, 0, &vec![3; BYTES]).unwrap();
            sleep(Duration::from_millis(1));
            let mut after = vec![0; BYTES];
            pair.client.fetch(pair.local, 0, &mut after).unwrap();
            assert!(after.iter().all(|byte| *byte == 3), "the server has zeros");
        }
        is_done.store(true, Ordering::Relaxed);
    });
    drop(connection);
    pair.client.unregister(pair.local, soon()).unwrap();
}

/// All streams may be lost at the same time, and with them the connection.
fn wait_for_all_or_lost(pair: &Pair, connection: &StripedConnection) {
    while connection.streams.all().is_ok_and(|lanes| lanes.len() < STREAMS) {
        if pair.run(connection, (Direction::Read, 1), None).is_err() {
            return;
        }
    }
}
