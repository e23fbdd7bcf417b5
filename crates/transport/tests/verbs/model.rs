//! Random batches over a real device, compared with a model: two arrays of bytes.

use std::time::Duration;

use cascade_runtime::thread;
use cascade_transport::Direction;
use cascade_transport::verbs::{FlushPlace, Link, Move, OpenLink, RemoteMemory, VerbsSettings};

use super::buffer::{BOTH, Buffer};
use super::{device, pair, soon};

const BYTES: usize = 1 << 20;

/// The generator `SplitMix64`.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((word ^ (word >> 31)) % limit as u64).unwrap()
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| u8::try_from(self.below(256)).unwrap()).collect()
    }
}

/// A piece of a batch: (local offset, remote offset, length). Targets do not overlap, because
/// each piece has a slot of its own on both sides.
fn pieces(random: &mut Random, base: usize, span: usize) -> Vec<(usize, usize, usize)> {
    let slot = [64, 1000, 4096, 9000][random.below(4)];
    let count = 1 + random.below(span / slot);
    let first = random.below(count);
    let piece = |at: usize| {
        let bytes = 1 + random.below(slot);
        let shift = random.below(slot - bytes + 1);
        (base + at * slot + shift, base + (at + first) % count * slot + shift, bytes)
    };
    (0..count).map(piece).collect()
}

fn run(
    link: &Link,
    direction: Direction,
    local: &Buffer,
    remote: &RemoteMemory,
    pieces: &[(usize, usize, usize)],
    is_flushed: bool,
) {
    let moves = pieces.iter().map(|&(from, to, bytes)| {
        let (local, remote) = ((&local.memory, from as u64), (remote, to as u64));
        Move::new(direction, local, remote, u32::try_from(bytes).unwrap()).unwrap()
    });
    let start = [FlushPlace::start_of(remote).unwrap()];
    let flushes = if is_flushed { &start[..] } else { &[] };
    let posted = link.post(direction, moves, flushes, soon()).unwrap();
    link.wait(&posted, soon()).unwrap();
}

fn compare(settings: &VerbsSettings, batches: usize, seed: u64) {
    let device = device(settings);
    let (link, _other) = pair(&device);
    let (local, remote) = (Buffer::new(&device, BYTES, BOTH), Buffer::new(&device, BYTES, BOTH));
    // The description goes over the wire.
    let description = RemoteMemory::from_bytes(&remote.memory.remote().to_bytes()).unwrap();
    let mut random = Random(seed);
    let mut here = random.bytes(BYTES);
    let mut there = random.bytes(BYTES);
    local.fill(0, &here);
    remote.fill(0, &there);
    for batch in 0..batches {
        let pieces = pieces(&mut random, 0, BYTES);
        let direction = [Direction::Write, Direction::Read][batch % 2];
        for &(from, to, bytes) in &pieces {
            match direction {
                Direction::Write => {
                    there[to..to + bytes].copy_from_slice(&here[from..from + bytes]);
                }
                Direction::Read => here[from..from + bytes].copy_from_slice(&there[to..to + bytes]),
            }
        }
        run(&link, direction, &local, &description, &pieces, batch % 4 < 2);
        assert!(local.bytes() == here, "batch {batch}, seed {seed}: local bytes differ");
        assert!(remote.bytes() == there, "batch {batch}, seed {seed}: remote bytes differ");
    }
}

#[test]
#[ignore = "needs a verbs device: make test-rdma"]
fn random_batches_move_the_bytes_that_a_model_moves() {
    compare(&VerbsSettings::default(), 24, 1);
}

/// A queue that holds four chains is filled many times over by one batch.
#[test]
#[ignore = "needs a verbs device: make test-rdma"]
fn a_batch_longer_than_the_queues_waits_for_room() {
    let small = VerbsSettings { queue_pairs: 2, chain: 4, depth: 16, ..VerbsSettings::default() };
    compare(&small, 12, 2);
    let least = VerbsSettings { queue_pairs: 1, chain: 1, depth: 4, ..VerbsSettings::default() };
    compare(&least, 6, 3);
}

#[test]
#[ignore = "needs a verbs device: make test-rdma"]
fn relaxed_ordering_is_taken_or_ignored() {
    compare(&VerbsSettings { relaxed_ordering: true, ..VerbsSettings::default() }, 2, 4);
}

/// As the one that makes a device read memory of a GPU.
#[test]
#[ignore = "needs a verbs device: make test-rdma"]
fn a_queue_pair_connects_to_itself() {
    let device = device(&VerbsSettings { queue_pairs: 1, ..VerbsSettings::default() });
    let open = OpenLink::open(&device).unwrap();
    let own = open.address();
    let link = open.connect(&own).unwrap();
    let (local, remote) = (Buffer::new(&device, 4096, BOTH), Buffer::new(&device, 4096, BOTH));
    local.fill(8, b"a block");
    let description = remote.memory.remote();
    run(&link, Direction::Write, &local, &description, &[(8, 100, 7)], false);
    assert_eq!(remote.bytes()[100..107], *b"a block");
}

/// Threads share the link; each has its own part of both buffers.
#[test]
#[ignore = "needs a verbs device: make test-rdma"]
fn many_threads_share_a_link() {
    let settings = VerbsSettings { queue_pairs: 2, depth: 128, ..VerbsSettings::default() };
    let device = device(&settings);
    let (link, _other) = pair(&device);
    let (local, remote) = (Buffer::new(&device, BYTES, BOTH), Buffer::new(&device, BYTES, BOTH));
    let shared = std::sync::Arc::new((link, local, remote));
    let span = BYTES / 8;
    let threads: Vec<_> = (0..8)
        .map(|number: usize| {
            let shared = std::sync::Arc::clone(&shared);
            thread::Builder::new()
                .spawn(move || {
                    let (link, local, remote) = &*shared;
                    let description = remote.memory.remote();
                    let mut random = Random(number as u64);
                    let base = number * span;
                    for _ in 0..6 {
                        let pieces = pieces(&mut random, base, span);
                        let bytes = random.bytes(span);
                        local.fill(base, &bytes);
                        run(link, Direction::Write, local, &description, &pieces, false);
                        let there = remote.bytes();
                        for (from, to, count) in pieces {
                            let from = from - base;
                            assert_eq!(there[to..to + count], bytes[from..from + count]);
                        }
                    }
                })
                .unwrap()
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

/// Waiting for an event and not only looking: the device is given much more than a look takes.
#[test]
#[ignore = "needs a verbs device: make test-rdma"]
fn a_long_batch_is_waited_for() {
    let device = device(&VerbsSettings::default());
    let (link, _other) = pair(&device);
    let bytes = 4 << 20;
    let (local, remote) = (Buffer::new(&device, bytes, BOTH), Buffer::new(&device, bytes, BOTH));
    local.fill(bytes - 4, b"last");
    let description = remote.memory.remote();
    let mut looks = 0;
    let part = 1 << 20;
    let moves = [0_u32, 1, 2, 3].into_iter().map(|at| {
        let at = u64::from(at * part);
        Move::new(Direction::Write, (&local.memory, at), (&description, at), part).unwrap()
    });
    let posted = link.post(Direction::Write, moves, &[], soon()).unwrap();
    // A wait that times out may be called again.
    let short = Duration::from_micros(1);
    let until = || cascade_runtime::Deadline::after(&cascade_runtime::SystemClock, short);
    while link.wait(&posted, until()).is_err() {
        assert!(link.is_open(), "only the deadline passed");
        looks += 1;
        assert!(looks < 50_000_000, "the batch ends");
    }
    assert!(remote.bytes().ends_with(b"last"));
}
