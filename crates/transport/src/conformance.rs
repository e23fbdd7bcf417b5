//! Conformance checks of a transport: each runs on fresh endpoints and panics on a violation.
//!
//! Call [`all`] from a test. Bytes are compared with a model of both sides' regions.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use cascade_runtime::thread::spawn;
use cascade_runtime::{Deadline, SystemClock};

use crate::{
    Access, Batch, Connection, Direction, Endpoint, EndpointConfig, Listener, Piece, Place,
    Refusal, Region, RegionId, TransportError,
};

/// Two endpoints with a connection from one to the other.
pub struct Subject {
    /// The endpoint that connected.
    pub client: Endpoint,
    /// The endpoint that listens.
    pub server: Endpoint,
    /// What it listens with.
    pub listener: Listener,
    /// The connection.
    pub connection: Arc<dyn Connection>,
    /// The regions of the client, of [`REGION_BYTES`] each.
    pub local: [RegionId; 2],
    /// The regions of the server.
    pub remote: [RegionId; 2],
    /// Whether a batch to a region that was unregistered after it was used is refused. A process
    /// that has mapped it can still reach its memory.
    pub sees_unregistered: bool,
}

impl fmt::Debug for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Subject({:?})", self.connection)
    }
}

/// Length of each region.
pub const REGION_BYTES: usize = 12 << 20;
/// A limit for calls that are expected to succeed, also on a slow machine.
const LONG: Duration = Duration::from_secs(60);

type Check = fn(&Subject);

/// Makes two endpoints with two regions each, from memory that `region` makes.
///
/// # Panics
/// If an endpoint or a region cannot be made.
pub fn endpoints(
    region: impl Fn(usize, Access) -> Region,
) -> (Endpoint, Endpoint, [RegionId; 2], [RegionId; 2]) {
    let config = |name: &str| EndpointConfig { name: name.to_owned(), ..Default::default() };
    endpoints_of((config("client"), config("server")), region)
}

/// As [`endpoints`], with the configurations of client and server.
///
/// # Panics
/// If an endpoint or a region cannot be made.
pub fn endpoints_of(
    (client, server): (EndpointConfig, EndpointConfig),
    region: impl Fn(usize, Access) -> Region,
) -> (Endpoint, Endpoint, [RegionId; 2], [RegionId; 2]) {
    let client = Endpoint::new(client).expect("the configuration is valid");
    let server = Endpoint::new(server).expect("the configuration is valid");
    let register = |endpoint: &Endpoint, access| {
        endpoint.register(region(REGION_BYTES, access)).expect("there is room for regions")
    };
    let local = [(); 2].map(|()| register(&client, Access::LOCAL));
    let remote = [(); 2].map(|()| register(&server, Access::BOTH));
    (client, server, local, remote)
}

/// Runs every check, each on a fresh subject.
///
/// # Panics
/// If the transport violates a check.
pub fn all(open: &mut dyn FnMut() -> Subject) {
    let checks: [Check; 15] = [
        written_pieces_arrive,
        read_pieces_arrive,
        a_batch_of_many_frames_arrives,
        pieces_out_of_bounds_are_refused,
        local_pieces_out_of_bounds_are_errors,
        access_that_was_not_given_is_refused,
        an_unknown_region_is_refused,
        a_notice_comes_after_its_bytes,
        a_refused_batch_gives_no_notice,
        an_empty_batch_carries_a_notice,
        a_cancelled_batch_holds_no_region,
        batches_of_both_directions_are_posted_before_any_is_waited_for,
        many_threads_share_a_connection,
        a_closed_connection_refuses_batches,
        a_dropped_listener_ends_connections,
    ];
    for check in checks {
        check(&open());
    }
}

/// A deadline that is not meant to be reached.
pub fn soon() -> Deadline {
    Deadline::after(&SystemClock, LONG)
}

/// Pseudo-random numbers: the same in each run.
#[derive(Debug)]
pub struct Numbers(pub u64);

impl Numbers {
    /// A number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        // The generator of Numerical Recipes; its high bits are the better ones.
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (self.0 >> 11) % limit
    }

    /// That many bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        let (words, rest) = bytes.as_chunks_mut();
        for word in words {
            *word = self.below(u64::MAX).to_le_bytes();
        }
        rest.copy_from_slice(&self.below(u64::MAX).to_le_bytes()[..rest.len()]);
        bytes
    }
}

fn piece(local: (RegionId, u64), remote: (RegionId, u64), bytes: u64) -> Piece {
    Piece {
        local: Place { region: local.0, offset: local.1 },
        remote: Place { region: remote.0, offset: remote.1 },
        bytes,
    }
}

impl Subject {
    fn run(&self, direction: Direction, pieces: &[Piece]) -> Result<(), TransportError> {
        self.run_with(direction, pieces, None)
    }

    fn run_with(
        &self,
        direction: Direction,
        pieces: &[Piece],
        notice: Option<&[u8]>,
    ) -> Result<(), TransportError> {
        let batch = Batch { direction, pieces, notice };
        self.connection.post(&batch, soon())?.wait(soon())
    }

    /// Fills all regions with random bytes and returns them: the client's, then the server's.
    fn fill(&self, numbers: &mut Numbers) -> [Vec<Vec<u8>>; 2] {
        let fill = |(endpoint, regions): (&Endpoint, &[RegionId; 2])| {
            let mut filled = vec![];
            for region in regions {
                let bytes = numbers.bytes(REGION_BYTES);
                endpoint.fill(*region, 0, &bytes).expect("it fits");
                filled.push(bytes);
            }
            filled
        };
        [(&self.client, &self.local), (&self.server, &self.remote)].map(fill)
    }

    /// Compares all regions with the expected bytes.
    fn compare(&self, expected: &[Vec<Vec<u8>>; 2]) {
        let sides = [(&self.client, &self.local), (&self.server, &self.remote)];
        for ((endpoint, regions), side) in sides.into_iter().zip(expected) {
            for (region, bytes) in regions.iter().zip(side) {
                let mut actual = vec![0; REGION_BYTES];
                endpoint.fetch(*region, 0, &mut actual).expect("it is there");
                // Without optimisation the search for the byte takes a hundred times longer.
                if actual != *bytes {
                    let differs = actual.iter().zip(bytes).position(|(is, right)| is != right);
                    panic!("first wrong byte of region {}: {differs:?}", region.0);
                }
            }
        }
    }

    /// Pieces of many lengths in random order, without overlaps on the target's side.
    fn random_pieces(&self, numbers: &mut Numbers, direction: Direction) -> Vec<Piece> {
        let mut pieces = vec![];
        for target in 0..2 {
            let mut at = numbers.below(5000);
            loop {
                let most = [64, 1024, 5000, 70_000, 3_000_000][pieces.len() % 5];
                let bytes = numbers.below(most);
                if at + bytes > REGION_BYTES as u64 {
                    break;
                }
                let source = usize::try_from(numbers.below(2)).expect("0 or 1");
                let from = numbers.below(REGION_BYTES as u64 - bytes);
                pieces.push(match direction {
                    Direction::Write => {
                        piece((self.local[source], from), (self.remote[target], at), bytes)
                    }
                    Direction::Read => {
                        piece((self.local[target], at), (self.remote[source], from), bytes)
                    }
                });
                at += bytes + numbers.below(3) * numbers.below(100);
            }
        }
        for index in (1..pieces.len()).rev() {
            let other = numbers.below(index as u64 + 1);
            pieces.swap(index, usize::try_from(other).expect("an index"));
        }
        pieces
    }

    /// What the regions hold after the pieces were moved.
    fn model(&self, sides: &mut [Vec<Vec<u8>>; 2], pieces: &[Piece], direction: Direction) {
        let index = |regions: &[RegionId; 2], place: Place| {
            regions.iter().position(|region| *region == place.region).expect("one of the two")
        };
        let range = |place: Place, bytes: u64| {
            let start = usize::try_from(place.offset).expect("inside");
            start..start + usize::try_from(bytes).expect("inside")
        };
        for piece in pieces {
            let local = (index(&self.local, piece.local), range(piece.local, piece.bytes));
            let remote = (index(&self.remote, piece.remote), range(piece.remote, piece.bytes));
            let [here, there] = &mut *sides;
            match direction {
                Direction::Write => {
                    there[remote.0][remote.1].copy_from_slice(&here[local.0][local.1]);
                }
                Direction::Read => {
                    here[local.0][local.1].copy_from_slice(&there[remote.0][remote.1]);
                }
            }
        }
    }

    fn random_batches_match_the_model(&self, direction: Direction) {
        let mut numbers = Numbers(direction as u64 + 7);
        let mut sides = self.fill(&mut numbers);
        for _ in 0..3 {
            let pieces = self.random_pieces(&mut numbers, direction);
            self.run(direction, &pieces).expect("the pieces are valid");
            self.model(&mut sides, &pieces, direction);
        }
        self.compare(&sides);
    }

    fn is_refused(&self, direction: Direction, pieces: &[Piece], expected: Refusal) {
        let error = self.run(direction, pieces).expect_err("it is not allowed");
        let is_expected =
            matches!(error, TransportError::Refused { refusal, .. } if refusal == expected);
        assert!(is_expected, "{error}");
    }
}

fn written_pieces_arrive(subject: &Subject) {
    subject.random_batches_match_the_model(Direction::Write);
}

fn read_pieces_arrive(subject: &Subject) {
    subject.random_batches_match_the_model(Direction::Read);
}

fn a_batch_of_many_frames_arrives(subject: &Subject) {
    for direction in [Direction::Write, Direction::Read] {
        let mut sides = subject.fill(&mut Numbers(3));
        // More than a frame takes, by count and by bytes. The gaps keep them from being merged.
        let pieces: Vec<_> = (0..11_000)
            .map(|at| piece((subject.local[0], at * 1100), (subject.remote[1], at * 1100), 1000))
            .collect();
        subject.run(direction, &pieces).expect("the pieces are valid");
        subject.model(&mut sides, &pieces, direction);
        subject.compare(&sides);
    }
}

fn pieces_out_of_bounds_are_refused(subject: &Subject) {
    let sides = subject.fill(&mut Numbers(4));
    let (local, remote) = (subject.local[0], subject.remote[0]);
    let end = REGION_BYTES as u64;
    for offset in [end, end - 99, u64::MAX, u64::MAX - 99, 1 << 63] {
        let bad = [piece((local, 0), (remote, 0), 50), piece((local, 0), (remote, offset), 100)];
        subject.is_refused(Direction::Read, &bad, Refusal::OutOfBounds);
        // Of a write, what was sent before the refusal may have arrived.
        subject.is_refused(Direction::Write, &bad[1..], Refusal::OutOfBounds);
    }
    subject.compare(&sides);
    let good = [piece((local, 0), (remote, end - 100), 100)];
    subject.run(Direction::Write, &good).expect("the connection is usable after refusals");
}

fn local_pieces_out_of_bounds_are_errors(subject: &Subject) {
    let end = REGION_BYTES as u64;
    let bad = [
        piece((subject.local[0], end - 99), (subject.remote[0], 0), 100),
        piece((RegionId(77), 0), (subject.remote[0], 0), 100),
    ];
    for piece in bad {
        for direction in [Direction::Write, Direction::Read] {
            let error = subject.run(direction, &[piece]).expect_err("it is out of bounds");
            assert!(matches!(error, TransportError::Local { piece: 0, .. }), "{error}");
        }
    }
}

fn access_that_was_not_given_is_refused(subject: &Subject) {
    let register = |access| {
        let region = Region::shared(4096, access).expect("a page is there");
        subject.server.register(region).expect("there is room")
    };
    let [readable, writable] = [Access::READ, Access::WRITE].map(register);
    let at = |region| [piece((subject.local[0], 0), (region, 0), 100)];
    subject.is_refused(Direction::Write, &at(readable), Refusal::NotAllowed);
    subject.run(Direction::Read, &at(readable)).expect("it may be read");
    subject.is_refused(Direction::Read, &at(writable), Refusal::NotAllowed);
    subject.run(Direction::Write, &at(writable)).expect("it may be written");
}

fn an_unknown_region_is_refused(subject: &Subject) {
    let pieces = |region| [piece((subject.local[0], 0), (region, 0), 100)];
    for direction in [Direction::Write, Direction::Read] {
        subject.is_refused(direction, &pieces(RegionId(99)), Refusal::UnknownRegion);
    }
    subject.run(Direction::Write, &pieces(subject.remote[0])).expect("it is registered");
    if subject.sees_unregistered {
        subject.server.unregister(subject.remote[0], soon()).expect("no batch uses it");
        subject.is_refused(Direction::Write, &pieces(subject.remote[0]), Refusal::UnknownRegion);
    }
}

fn a_notice_comes_after_its_bytes(subject: &Subject) {
    let mut numbers = Numbers(5);
    for round in 0..20_u8 {
        let bytes = numbers.bytes(3 << 20);
        subject.client.fill(subject.local[0], 0, &bytes).expect("it fits");
        let pieces = [piece((subject.local[0], 0), (subject.remote[0], 0), bytes.len() as u64)];
        let batch = Batch { direction: Direction::Write, pieces: &pieces, notice: Some(&[round]) };
        let mut ticket = subject.connection.post(&batch, soon()).expect("it can be posted");
        let notice = subject.server.next_notice(soon()).expect("a notice arrives");
        assert_eq!((notice.from, &*notice.bytes), (subject.client.id(), &[round][..]));
        let mut arrived = vec![0; bytes.len()];
        subject.server.fetch(subject.remote[0], 0, &mut arrived).expect("it is there");
        assert!(arrived == bytes, "round {round}: the notice came before the bytes");
        ticket.wait(soon()).expect("it has arrived");
    }
}

fn a_refused_batch_gives_no_notice(subject: &Subject) {
    let end = REGION_BYTES as u64;
    // More pieces than a frame takes: the notice comes with another frame than the bad piece.
    let mut pieces = vec![piece((subject.local[0], 0), (subject.remote[0], end), 1)];
    pieces.extend((0..9000).map(|at| {
        let at = at * 2;
        piece((subject.local[0], at), (subject.remote[0], at), 1)
    }));
    for direction in [Direction::Read, Direction::Write] {
        let error = subject.run_with(direction, &pieces, Some(b"refused")).expect_err("it is bad");
        let is_expected =
            matches!(error, TransportError::Refused { refusal: Refusal::OutOfBounds, .. });
        assert!(is_expected, "{error}");
        subject.run_with(direction, &pieces[1..], Some(b"moved")).expect("it is good");
        let notice = subject.server.next_notice(soon()).expect("a notice arrives");
        assert_eq!(&*notice.bytes, b"moved", "{direction:?}");
    }
}

fn an_empty_batch_carries_a_notice(subject: &Subject) {
    for direction in [Direction::Write, Direction::Read] {
        subject.run_with(direction, &[], Some(b"done")).expect("it is valid");
        let notice = subject.server.next_notice(soon()).expect("a notice arrives");
        assert_eq!(&*notice.bytes, b"done");
        subject.run(direction, &[]).expect("it is valid");
    }
    let long = vec![0; 4097];
    let error = subject.run_with(Direction::Write, &[], Some(&long)).expect_err("it is too long");
    assert!(matches!(error, TransportError::TooLarge { limit: 4096, .. }), "{error}");
}

fn a_cancelled_batch_holds_no_region(subject: &Subject) {
    let pieces = [piece((subject.local[0], 0), (subject.remote[0], 0), 4096)];
    for direction in [Direction::Read, Direction::Write] {
        for pieces in [&pieces[..], &[]] {
            let batch = Batch { direction, pieces, notice: None };
            let ticket = subject.connection.post(&batch, soon()).expect("it can be posted");
            ticket.cancel(soon());
        }
    }
    // No thread receives answers any more.
    for region in subject.local {
        subject.client.unregister(region, soon()).expect("no batch uses it");
    }
}

fn batches_of_both_directions_are_posted_before_any_is_waited_for(subject: &Subject) {
    // More than sockets hold: a peer that sends what nobody receives would take no more frames.
    let mut sides = subject.fill(&mut Numbers(8));
    let bytes = REGION_BYTES as u64;
    let reads = [piece((subject.local[0], 0), (subject.remote[0], 0), bytes)];
    let writes = [piece((subject.local[1], 0), (subject.remote[1], 0), bytes)];
    let mut tickets = vec![];
    for _ in 0..3 {
        for (direction, pieces) in [(Direction::Read, &reads), (Direction::Write, &writes)] {
            let batch = Batch { direction, pieces, notice: None };
            tickets.push(subject.connection.post(&batch, soon()).expect("it can be posted"));
        }
    }
    for mut ticket in tickets {
        ticket.wait(soon()).expect("it arrives");
    }
    subject.model(&mut sides, &reads, Direction::Read);
    subject.model(&mut sides, &writes, Direction::Write);
    subject.compare(&sides);
}

fn many_threads_share_a_connection(subject: &Subject) {
    const THREADS: u64 = 4;
    const PART: u64 = REGION_BYTES as u64 / THREADS;
    let mut sides = subject.fill(&mut Numbers(6));
    let mut threads = vec![];
    for thread in 0..THREADS {
        let connection = Arc::clone(&subject.connection);
        let (local, remote) = (subject.local, subject.remote);
        threads.push(spawn(move || {
            let mut numbers = Numbers(thread);
            for _ in 0..30 {
                let bytes = 1 + numbers.below(PART / 2);
                let at = thread * PART + numbers.below(PART - bytes);
                let write = [piece((local[0], at), (remote[0], at), bytes)];
                let read = [piece((local[1], at), (remote[1], at), bytes)];
                for (direction, pieces) in [(Direction::Write, write), (Direction::Read, read)] {
                    let batch = Batch { direction, pieces: &pieces, notice: None };
                    let mut ticket = connection.post(&batch, soon()).expect("it is valid");
                    ticket.wait(soon()).expect("it arrives");
                }
            }
        }));
    }
    for thread in threads {
        thread.join().expect("the thread met no error");
    }
    for thread in 0..THREADS {
        let mut numbers = Numbers(thread);
        for _ in 0..30 {
            let bytes = 1 + numbers.below(PART / 2);
            let at = thread * PART + numbers.below(PART - bytes);
            let write = piece((subject.local[0], at), (subject.remote[0], at), bytes);
            let read = piece((subject.local[1], at), (subject.remote[1], at), bytes);
            subject.model(&mut sides, &[write], Direction::Write);
            subject.model(&mut sides, &[read], Direction::Read);
        }
    }
    subject.compare(&sides);
}

fn a_closed_connection_refuses_batches(subject: &Subject) {
    assert!(subject.connection.is_open());
    subject.connection.close();
    assert!(!subject.connection.is_open());
    let error = subject.run(Direction::Write, &[]).expect_err("it is closed");
    assert!(matches!(error, TransportError::Lost { .. }), "{error}");
}

fn a_dropped_listener_ends_connections(subject: &Subject) {
    let pieces = [piece((subject.local[0], 0), (subject.remote[0], 0), 100)];
    subject.run(Direction::Write, &pieces).expect("it is connected");
    subject.listener.stop();
    let error = subject.run(Direction::Write, &pieces).expect_err("the peer has gone");
    assert!(matches!(error, TransportError::Lost { .. }), "{error}");
}
