//! What our code costs for a work request, over the stand-in for a device, which walks the list of
//! requests and moves nothing. Figures, and no tests: `docs/verbs.md` has them.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::chain::Move;
use super::device::Device;
use super::fake;
use super::link::{Link, OpenLink};
use super::memory::RegisteredMemory;
use super::settings::VerbsSettings;
use crate::conformance::soon;
use crate::{
    Access, Batch, Connection, Direction, Endpoint, EndpointConfig, Listener, Piece, Place, Region,
    RegionId,
};

/// Pieces of a batch, in an order in which no two can be merged.
const PIECES: u64 = 1538;
const PIECE_BYTES: u64 = 16;
const BYTES: usize = 1 << 16;

fn offsets() -> Vec<u64> {
    (0..PIECES).map(|at| at * 7919 % 4000 * PIECE_BYTES).collect()
}

fn null_device(chain: usize) -> Arc<Device> {
    let device = fake::device(&VerbsSettings { queue_pairs: 1, chain, ..Default::default() });
    fake::state(&device).is_null.store(true, Ordering::Relaxed);
    device
}

/// A link to itself: batches are lists of moves.
struct LinkBatches {
    link: Link,
    memory: RegisteredMemory,
    offsets: Vec<u64>,
}

impl LinkBatches {
    fn new(chain: usize) -> Self {
        let device = null_device(chain);
        let open = OpenLink::open(&device).unwrap();
        let address = open.address();
        let link = open.connect(&address).unwrap();
        let region = Arc::new(Region::shared(BYTES, Access::BOTH).unwrap());
        let memory = RegisteredMemory::of_region_of_endpoint(&device, region).unwrap();
        Self { link, memory, offsets: offsets() }
    }

    fn run(&self, count: usize) {
        let remote = self.memory.remote();
        let bytes = u32::try_from(PIECE_BYTES).unwrap();
        for _ in 0..count {
            let moves = black_box(&self.offsets).iter().map(|&at| {
                Move::new(Direction::Write, (&self.memory, at), (&remote, at), bytes).unwrap()
            });
            let posted = self.link.post(Direction::Write, moves, &[], soon()).unwrap();
            self.link.wait(&posted, soon()).unwrap();
        }
    }
}

/// A connection between endpoints: batches are lists of pieces, as all callers have them.
struct ConnectionBatches {
    connection: Arc<dyn Connection>,
    _listener: Listener,
    pieces: Vec<Piece>,
}

impl ConnectionBatches {
    fn new() -> Self {
        let device = null_device(VerbsSettings::default().chain);
        let endpoint = || {
            let endpoint = Endpoint::new(EndpointConfig::default()).unwrap();
            endpoint.use_device(Arc::clone(&device)).unwrap();
            let region = endpoint.register(Region::shared(BYTES, Access::BOTH).unwrap()).unwrap();
            (endpoint, region)
        };
        let ((client, local), (server, remote)) = (endpoint(), endpoint());
        let listener = server.listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
        let connection = client.connect_rdma(listener.tcp_address().unwrap(), soon()).unwrap();
        let place = |region: RegionId, offset| Place { region, offset };
        let piece = |offset| {
            let (local, remote) = (place(local, offset), place(remote, offset));
            Piece { local, remote, bytes: PIECE_BYTES }
        };
        let pieces = offsets().into_iter().map(piece).collect();
        Self { connection, _listener: listener, pieces }
    }

    fn run(&self, count: usize) {
        for _ in 0..count {
            let pieces = black_box(&self.pieces);
            let batch = Batch { direction: Direction::Write, pieces, notice: None };
            self.connection.post(&batch, soon()).unwrap().wait(soon()).unwrap();
        }
    }
}

#[expect(clippy::print_stdout, reason = "prints figures")]
fn print_time(what: &str, run: impl Fn(usize)) {
    let mut rounds: Vec<f64> = (0..5)
        .map(|_| {
            let started = cascade_runtime::thread_cpu_time();
            run(2000);
            let spent = cascade_runtime::thread_cpu_time().saturating_sub(started);
            spent.as_secs_f64() * 1e9 / (2000.0 * 1538.0)
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    println!("{what}: {:.1} ns a request ({rounds:.1?})", rounds[2]);
}

#[test]
#[ignore = "a measurement: see docs/verbs.md"]
fn time_of_a_request() {
    for chain in [1, 32, 128, 256] {
        let batches = LinkBatches::new(chain);
        print_time(&format!("a link with chains of {chain}"), |count| batches.run(count));
    }
    let batches = ConnectionBatches::new();
    print_time("a connection", |count| batches.run(count));
}

// For `.ci/count-verbs`: what 100 more batches cost is what the longer one of two has more.

#[test]
#[ignore = "a measurement: see docs/verbs.md"]
fn link_batches_100() {
    LinkBatches::new(VerbsSettings::default().chain).run(100);
}

#[test]
#[ignore = "a measurement: see docs/verbs.md"]
fn link_batches_200() {
    LinkBatches::new(VerbsSettings::default().chain).run(200);
}

#[test]
#[ignore = "a measurement: see docs/verbs.md"]
fn connection_batches_100() {
    ConnectionBatches::new().run(100);
}

#[test]
#[ignore = "a measurement: see docs/verbs.md"]
fn connection_batches_200() {
    ConnectionBatches::new().run(200);
}
