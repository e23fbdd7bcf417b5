//! The transport over a simulated network, for some seeds: its conformance suite, and races.

use std::sync::Arc;
use std::time::Duration;

use cascade_runtime::simulated::{Ending, Random, Settings, World};
use cascade_runtime::thread::{self, JoinHandle};
use cascade_runtime::{Deadline, now, sleep};
use cascade_transport::conformance::{self, Subject, soon};
use cascade_transport::simulated::{Conditions, Network};
use cascade_transport::{
    Batch, Connection, Direction, Endpoint, Piece, Place, Region, RegionId, Ticket, TransportError,
};

/// Networks without faults that differ in all else.
fn conditions(random: &mut Random) -> Conditions {
    Conditions {
        latency: Duration::from_micros(random.below(500)),
        jitter: Duration::from_micros(random.below(2000)),
        bytes_per_second: [0, 1 << 30][random.index_below(2)],
        window_bytes: [64 << 10, 256 << 10, 4 << 20][random.index_below(3)],
        call_bytes: [100 << 10, 1 << 20, usize::MAX][random.index_below(3)],
        late_one_in: [0, 5000][random.index_below(2)],
        late: Duration::from_millis(300),
        ..Conditions::default()
    }
}

fn conforms(seed: u64) {
    let mut random = Random::new(seed, 7);
    let report = World::run(Settings::from_seed(seed), move || {
        conformance::all(&mut || {
            let network = Network::new(Random::new(random.next_u64(), 0));
            network.set_conditions(conditions(&mut random));
            let (client, server, local, remote) = conformance::endpoints(Region::private);
            let listener = server.listen_simulated(&network, "server").expect("nobody else does");
            let connection = connect(&client, &network);
            let sees_unregistered = true;
            Subject { client, server, listener, connection, local, remote, sees_unregistered }
        });
    });
    assert_eq!(report.ending, Ending::Finished, "seed {seed}: {:#?}", report.panics);
    assert!(report.panics.is_empty(), "seed {seed}: {:#?}", report.panics);
}

fn connect(client: &Endpoint, network: &Network) -> Arc<dyn Connection> {
    let network = network.clone();
    let dial = move |deadline| network.connect("client", "server", deadline);
    let dialled = dial(soon()).expect("it listens");
    client.connect_simulated(dialled, dial, soon()).expect("it accepts")
}

#[test]
fn a_simulated_network_conforms() {
    conforms(0);
}

#[test]
fn simulated_networks_conform() {
    (1..8).for_each(conforms);
}

/// A read whose answer another thread received, until this moment: it waits for a second read.
struct Race {
    client: Endpoint,
    region: RegionId,
    connection: Arc<dyn Connection>,
    first: Ticket,
    /// Waits for the second read again after 5 s.
    waiting: JoinHandle<Result<(), TransportError>>,
}

/// Runs a race, in which `act` is what happens at that moment.
fn run_race(seed: u64, act: fn(Race)) {
    let report = World::run(Settings::from_seed(seed), move || {
        let network = Network::new(Random::new(seed, 8));
        // A part of the answer comes each 25 ms.
        let (bytes_per_second, call_bytes) = (4 << 10, 100);
        let conditions = Conditions { bytes_per_second, call_bytes, ..Conditions::default() };
        network.set_conditions(conditions);
        let (client, server, [region, _], [remote, _]) = conformance::endpoints(Region::private);
        let _listener = server.listen_simulated(&network, "server").expect("nobody else does");
        let connection = connect(&client, &network);
        let post = |bytes| {
            let place = |region| Place { region, offset: 0 };
            let pieces = [Piece { local: place(region), remote: place(remote), bytes }];
            let batch = Batch { direction: Direction::Read, pieces: &pieces, notice: None };
            connection.post(&batch, soon()).expect("it is sent")
        };
        let (first, mut second) = (post(4096), post(1));
        let until = now() + Duration::from_millis(300);
        let waiting = thread::spawn(move || {
            second.wait(Deadline::at(until)).expect_err("its answer is the second");
            // No thread receives from here on.
            sleep(Duration::from_secs(5));
            second.wait(soon())
        });
        sleep(until.saturating_sub(now()));
        act(Race { client, region, connection, first, waiting });
    });
    assert_eq!(report.ending, Ending::Finished, "seed {seed}: {:#?}", report.panics);
    assert!(report.panics.is_empty(), "seed {seed}: {:#?}", report.panics);
}

/// What happened: the thread that received had not seen the cancel, nor the cancel that it had
/// stopped, and the cancel waited for somebody to receive again.
#[test]
fn a_cancel_does_not_wait_for_a_thread_that_stops() {
    let cancel = |race: Race| {
        let began = now();
        race.first.cancel(Deadline::at(began));
        let late = now().saturating_sub(began);
        assert!(late < Duration::from_millis(150), "the cancel took {late:?}");
        race.waiting.join().expect("it does not panic").expect("its answer comes");
    };
    (0..200).for_each(|seed| run_race(seed, cancel));
}

/// What happened: the thread that received put the answer back after the connection had ended, and
/// with it the region, for as long as the connection was kept.
#[test]
fn a_closed_connection_keeps_no_region() {
    let close = |mut race: Race| {
        race.connection.close();
        race.first.wait(soon()).expect_err("its connection was closed");
        race.waiting.join().expect("it does not panic").expect_err("its connection was closed");
        let soon = Deadline::at(now() + Duration::from_millis(10));
        race.client.unregister(race.region, soon).expect("no batch uses it");
    };
    (0..200).for_each(|seed| run_race(seed, close));
}
