//! A peer with many connections beside one with few, on a simulated network: what each gets.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use cascade_runtime::simulated::{Ending, Random, Settings, World};
use cascade_runtime::thread::{self, JoinHandle};
use cascade_runtime::{Deadline, now, sleep};
use cascade_transport::conformance::{self, soon};
use cascade_transport::simulated::{Conditions, Network};
use cascade_transport::{
    Batch, Connection, Direction, Endpoint, EndpointConfig, Limits, Listener, Piece, Place, Region,
    RegionId, Ticket, TransportError,
};

/// A frame that waits for its turn.
const FRAME_BYTES: u64 = 256 << 10;

/// An endpoint that serves two peers.
struct Served {
    network: Network,
    greedy: Endpoint,
    modest: Endpoint,
    local: RegionId,
    remote: RegionId,
    _server: Endpoint,
    listener: Listener,
}

impl Served {
    fn new(limits: Limits) -> Self {
        let network = Network::new(Random::new(1, 9));
        let conditions = Conditions { bytes_per_second: 100 << 20, ..Conditions::default() };
        network.set_conditions(conditions);
        let configs = (EndpointConfig::default(), EndpointConfig { limits, ..Default::default() });
        let (greedy, server, [local, _], [remote, _]) =
            conformance::endpoints_of(configs, Region::private);
        let (modest, ..) = conformance::endpoints(Region::private);
        let listener = server.listen_simulated(&network, "server").expect("nobody else does");
        Self { network, greedy, modest, local, remote, _server: server, listener }
    }

    fn connect(&self, client: &Endpoint) -> Arc<dyn Connection> {
        let network = self.network.clone();
        let dial = move |deadline| network.connect("client", "server", deadline);
        let dialled = dial(soon()).expect("it listens");
        client.connect_simulated(dialled, dial, soon()).expect("it accepts")
    }

    fn post(&self, connection: &dyn Connection, bytes: u64) -> Ticket {
        let place = |region| Place { region, offset: 0 };
        let pieces = [Piece { local: place(self.local), remote: place(self.remote), bytes }];
        let batch = Batch { direction: Direction::Read, pieces: &pieces, notice: None };
        connection.post(&batch, soon()).expect("it is sent")
    }

    /// Reads frames over a connection of its own until it is over, and counts them.
    fn read_all(
        self: &Arc<Self>,
        client: &Endpoint,
        is_over: &Arc<AtomicBool>,
        frames: &Arc<AtomicU64>,
    ) -> JoinHandle<()> {
        let (served, connection) = (Arc::clone(self), self.connect(client));
        let (is_over, frames) = (Arc::clone(is_over), Arc::clone(frames));
        thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                served.post(&*connection, FRAME_BYTES).wait(soon()).expect("it comes");
                frames.fetch_add(1, Ordering::Relaxed);
            }
        })
    }
}

fn run(test: fn()) {
    let report = World::run(Settings::from_seed(1), test);
    assert_eq!(report.ending, Ending::Finished, "{:#?}", report.panics);
    assert!(report.panics.is_empty(), "{:#?}", report.panics);
}

#[test]
fn a_peer_with_sixteen_connections_leaves_one_with_one_its_share() {
    const MODEST: u64 = 64;
    run(|| {
        let served = Arc::new(Served::new(Limits::default()));
        let (is_over, frames) = <(Arc<AtomicBool>, Arc<AtomicU64>)>::default();
        let threads: Vec<_> =
            (0..16).map(|_| served.read_all(&served.greedy, &is_over, &frames)).collect();
        let connection = served.connect(&served.modest);
        sleep(Duration::from_millis(100));
        let before = frames.load(Ordering::Relaxed);
        for _ in 0..MODEST {
            served.post(&*connection, FRAME_BYTES).wait(soon()).expect("it comes");
        }
        let greedy = frames.load(Ordering::Relaxed) - before;
        is_over.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().expect("all of its reads end");
        }
        assert!(greedy > 2 * MODEST, "{greedy} frames: the other connections were not busy");
        assert!(6 * MODEST >= MODEST + greedy, "{greedy} frames beside {MODEST}");
    });
}

#[test]
fn a_peer_alone_uses_all_of_its_connections() {
    run(|| {
        let served = Arc::new(Served::new(Limits::default()));
        let (is_over, frames) = <(Arc<AtomicBool>, Arc<AtomicU64>)>::default();
        let threads: Vec<_> =
            (0..16).map(|_| served.read_all(&served.greedy, &is_over, &frames)).collect();
        sleep(Duration::from_secs(1));
        is_over.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().expect("all of its reads end");
        }
        // Each moves 400 frames a second.
        assert!(frames.load(Ordering::Relaxed) > 16 * 300, "{frames:?} frames");
    });
}

/// Nobody receives the answers of four connections, which are all that are served.
#[test]
fn connections_that_stall_keep_others_of_their_peer_waiting_until_they_end() {
    const STALL: Duration = Duration::from_secs(2);
    run(|| {
        let limits = Limits { stall_timeout: STALL, ..Limits::default() };
        let served = Arc::new(Served::new(limits));
        let (is_over, frames) = <(Arc<AtomicBool>, Arc<AtomicU64>)>::default();
        let other = served.read_all(&served.modest, &is_over, &frames);
        sleep(Duration::from_millis(100));
        let frozen: Vec<_> = (0..4).map(|_| served.connect(&served.greedy)).collect();
        // More than the window of a connection.
        let tickets: Vec<_> = frozen.iter().map(|it| served.post(&**it, 4 * FRAME_BYTES)).collect();
        sleep(Duration::from_millis(100));
        let connection = served.connect(&served.greedy);
        let mut waits = served.post(&*connection, FRAME_BYTES);
        let began = now();
        let early = waits.wait(Deadline::at(began + STALL / 2)).expect_err("it waits its turn");
        assert!(matches!(early, TransportError::Deadline { .. }), "{early}");
        waits.wait(soon()).expect("it gets its turn");
        let took = now().saturating_sub(began);
        assert!(took < STALL + Duration::from_millis(500), "{took:?}");
        let before = frames.load(Ordering::Relaxed);
        assert!(before > 400, "{before} frames: another peer does not wait for this one");
        is_over.store(true, Ordering::Relaxed);
        other.join().expect("all of its reads end");
        for mut ticket in tickets {
            let lost = ticket.wait(soon()).expect_err("it has stalled");
            assert!(matches!(lost, TransportError::Lost { .. }), "{lost}");
        }
    });
}

/// The stream of small reads beside a large one.
#[test]
fn a_stream_that_no_small_read_uses_is_closed_after_a_minute_and_opened_again() {
    run(|| {
        // Nobody receives the large read.
        let stall_timeout = Duration::from_secs(10_000);
        let served = Served::new(Limits { stall_timeout, ..Limits::default() });
        // Behind it, small ones would wait for minutes.
        let slow = Conditions { bytes_per_second: 4 << 10, ..Conditions::default() };
        served.network.set_conditions(slow);
        let connection = served.connect(&served.modest);
        served.network.set_conditions(Conditions::default());
        let large = served.post(&*connection, 8 * FRAME_BYTES);
        for _ in 0..2 {
            // The first one opens the stream, and waits behind the large one.
            let until = now() + Duration::from_secs(2);
            let soon = || Deadline::at(now() + Duration::from_millis(10));
            while served.post(&*connection, 8).wait(soon()).is_err() {
                assert!(now() < until, "no small read passes");
            }
            sleep(Duration::from_secs(59));
            assert_eq!(served.listener.peer_count(), 2);
            sleep(Duration::from_secs(3));
            assert_eq!(served.listener.peer_count(), 1, "it is not closed");
        }
        large.cancel(Deadline::at(now()));
    });
}
