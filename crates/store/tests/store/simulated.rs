//! A store in simulated worlds: its own threads and three callers on one seed, every byte checked.
//!
//! A failure names its seed, and a seed fails in the same way each time. To look at one, set
//! `SEEDS` to it alone.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_runtime::simulated::{Domain, Ending, Report, Settings, World};
use cascade_runtime::{Plant, SystemClock, random_u64, sleep, thread, yield_now};
use cascade_store::{
    CallOptions, GetOutcome, Put, PutOutcome, Request, Store, StoreConfig, StoreError, ViewOutcome,
};

use crate::blocks::{bytes_of, dram, keys};
use crate::third_party::MapStage;

const SEEDS: Range<u64> = 0..50;
const CALLERS: usize = 3;
const OPERATIONS: usize = 100;
/// More than fit in memory together.
const KEYS: u64 = 256;
const BYTES_MAX: usize = 64_000;

/// What the callers of all worlds saw, to show that the worlds reach what they are to test.
#[derive(Debug, Default)]
struct Seen {
    hits: AtomicU64,
    misses: AtomicU64,
    deleted: AtomicU64,
    evicted: AtomicU64,
    demoted: AtomicU64,
    promoted: AtomicU64,
    closed: AtomicU64,
}

struct Caller {
    store: Store,
    seen: Arc<Seen>,
    /// Whether the store is closed while the callers play.
    closes_early: bool,
}

fn below(limit: u64) -> u64 {
    random_u64().unwrap() % limit
}

/// All blocks, computed once.
fn blocks_by_key() -> &'static BTreeMap<BlockKey, Vec<u8>> {
    static BLOCKS: OnceLock<BTreeMap<BlockKey, Vec<u8>>> = OnceLock::new();
    let block = |key: BlockKey| {
        let length = 1 + usize::try_from(key.fingerprint()).unwrap() % BYTES_MAX;
        (key, bytes_of(&key, length))
    };
    BLOCKS.get_or_init(|| keys(0..KEYS).into_iter().map(block).collect())
}

fn expected_bytes(key: &BlockKey) -> &'static [u8] {
    &blocks_by_key()[key]
}

impl Caller {
    fn play(&self) {
        let all: Vec<BlockKey> = blocks_by_key().keys().copied().collect();
        for _ in 0..OPERATIONS {
            let start = usize::try_from(below(KEYS - 6)).unwrap();
            let some = &all[start..=start + usize::try_from(below(6)).unwrap()];
            match below(16) {
                0..5 => self.put(some),
                5..8 => self.get(some),
                8 | 9 => self.check(some, self.store.view(some, CallOptions::default())),
                10 => {
                    let request = Request::new(some);
                    let views = self.store.acquire(&request, CallOptions::default());
                    self.check(&some[..views.len()], views);
                }
                11 => {
                    let deleted = self.store.delete(&some[..1]);
                    self.seen.deleted.fetch_add(u64::from(deleted[0]), Relaxed);
                }
                12 => self.pin(some),
                13 => match self.store.flush(CallOptions::default()) {
                    Ok(()) => {}
                    Err(error) => self.accept(&error),
                },
                14 => {
                    assert_eq!(self.store.contains(some).len(), some.len());
                    self.store.prefetch(some);
                    assert!(self.store.stats().keys <= KEYS);
                }
                _ => sleep(Duration::from_micros(below(20_000))),
            }
        }
    }

    /// Time-outs are not accepted: no call waits for anything that takes long.
    fn accept(&self, error: &StoreError) {
        match error {
            // The other callers may hold all memory.
            StoreError::NoRoom { .. } | StoreError::Busy { .. } => {}
            StoreError::Closed if self.closes_early => {
                self.seen.closed.fetch_add(1, Relaxed);
            }
            error => panic!("{error:?}"),
        }
    }

    fn put(&self, some: &[BlockKey]) {
        let batch: Vec<_> = some.iter().map(|key| Put::new(*key, expected_bytes(key))).collect();
        for outcome in self.store.put(&batch, CallOptions::default()) {
            if let PutOutcome::Failed(error) = outcome {
                self.accept(&error);
            }
        }
    }

    fn get(&self, some: &[BlockKey]) {
        let mut buffers: Vec<Vec<u8>> = some.iter().map(|_| vec![0; BYTES_MAX]).collect();
        let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
        let outcomes = self.store.get(some, &mut slices, CallOptions::default());
        for ((key, buffer), outcome) in some.iter().zip(&buffers).zip(outcomes) {
            match outcome {
                GetOutcome::Hit { bytes, tier } => {
                    assert!(buffer[..bytes] == *expected_bytes(key), "wrong bytes from {tier}");
                    self.seen.hits.fetch_add(1, Relaxed);
                }
                GetOutcome::Miss => drop(self.seen.misses.fetch_add(1, Relaxed)),
                GetOutcome::TooShort { needed_bytes } => panic!("{needed_bytes} bytes needed"),
                GetOutcome::Failed(error) => self.accept(&error),
            }
        }
    }

    fn check(&self, some: &[BlockKey], views: Vec<ViewOutcome>) {
        for (key, view) in some.iter().zip(views) {
            match view {
                ViewOutcome::Hit { slab, tier } => {
                    assert!(
                        slab.host().expect("host memory") == expected_bytes(key),
                        "wrong bytes from {tier}"
                    );
                    yield_now();
                    assert!(
                        slab.host().expect("host memory") == expected_bytes(key),
                        "bytes changed under a view of {tier}"
                    );
                    self.seen.hits.fetch_add(1, Relaxed);
                }
                ViewOutcome::Miss => drop(self.seen.misses.fetch_add(1, Relaxed)),
                ViewOutcome::Failed(error) => self.accept(&error),
            }
        }
    }

    fn pin(&self, some: &[BlockKey]) {
        let pinned = self.store.pin(some);
        yield_now();
        let pinned = some.iter().zip(pinned).filter(|(_, pinned)| *pinned);
        self.store.unpin(&pinned.map(|(key, _)| *key).collect::<Vec<_>>());
    }
}

/// Opens a store, lets the callers play, and closes it.
fn live(pipeline: &str, closes_early: bool, seen: &Arc<Seen>) {
    let stage = MapStage::new();
    stage.capacity_bytes.store(3 << 20, Relaxed);
    let config = StoreConfig { pipeline: pipeline.to_owned(), ..dram(4) };
    let store = Store::open_with(config, &stage.registry(), Arc::new(SystemClock)).unwrap();
    let callers = std::array::from_fn::<_, CALLERS, _>(|number| {
        let caller = Caller { store: store.clone(), seen: Arc::clone(seen), closes_early };
        let thread = thread::Builder::new().name(format!("caller {number}"));
        thread.spawn(move || caller.play()).unwrap()
    });
    if closes_early {
        sleep(Duration::from_micros(below(60_000)));
        store.close().unwrap();
    }
    for caller in callers {
        caller.join().expect("no caller panics");
    }
    let counters = store.stats().counters;
    assert_eq!(counters.gets, counters.hits + counters.misses + counters.get_failures);
    seen.evicted.fetch_add(counters.evicted_blocks, Relaxed);
    seen.demoted.fetch_add(counters.demoted_blocks, Relaxed);
    seen.promoted.fetch_add(counters.promoted_blocks, Relaxed);
    // Outcomes are part of the event hash by their counts.
    let world = World::current().unwrap();
    for count in [counters.hits, counters.evicted_blocks, counters.demoted_blocks] {
        world.note(count);
    }
    if !closes_early {
        store.clear();
        store.flush(CallOptions::default()).unwrap();
        let stats = store.stats();
        assert_eq!((stats.keys, stats.contents, stats.pending_bytes), (0, 0, 0));
        assert_eq!((stats.dram_blocks, stats.dram_bytes), (0, 0));
        assert_eq!(stats.pool.requested_bytes, 0);
        assert_eq!(stage.block_count(), 0, "the stage is empty too");
        store.close().unwrap();
    }
    assert!(matches!(store.flush(CallOptions::default()), Err(StoreError::Closed)));
    drop(store);
    // Threads for calls to a stage are not joined.
    sleep(Duration::from_secs(1));
    assert_eq!(world.live_threads(Domain::HARNESS), 1, "all threads of the store have ended");
}

fn world(pipeline: &'static str, settings: Settings, seen: &Arc<Seen>) -> Report {
    let (closes_early, seen) = (settings.seed % 5 == 4, Arc::clone(seen));
    World::run(settings, move || live(pipeline, closes_early, &seen))
}

fn run(pipeline: &'static str, seed: u64, seen: &Arc<Seen>) -> Report {
    let settings = Settings { spurious_one_in: 100, ..Settings::from_seed(seed) };
    let report = world(pipeline, settings, seen);
    assert_eq!(report.ending, Ending::Finished, "seed {seed}: {:?}", report.panics);
    assert!(report.panics.is_empty(), "seed {seed}: {:?}", report.panics);
    // Only closing a store waits without a deadline while it holds a lock: that of the threads that
    // it joins.
    let listed = &report.waits_under_lock;
    assert!(listed.iter().all(|it| it.matches("src/store.rs").count() == 2), "{listed:?}");
    report
}

/// Runs each seed twice. Returns what the callers saw.
fn run_all(pipeline: &'static str) -> Seen {
    let seen = Arc::new(Seen::default());
    for seed in SEEDS {
        let first = run(pipeline, seed, &seen);
        // On another OS thread, so hash maps of `std` have other orders.
        let second = run(pipeline, seed, &seen);
        assert_eq!(first.event_hash, second.event_hash, "seed {seed}");
    }
    Arc::into_inner(seen).expect("the worlds have ended")
}

#[test]
fn a_store_in_memory_serves_the_right_bytes_in_every_world() {
    let seen = run_all("Dram");
    let reached = [&seen.hits, &seen.misses, &seen.deleted, &seen.evicted, &seen.closed];
    assert!(reached.iter().all(|count| count.load(Relaxed) > 100), "{seen:?}");
}

#[test]
fn a_store_with_a_lower_tier_serves_the_right_bytes_in_every_world() {
    let seen = run_all("Dram|Map");
    let reached = [&seen.hits, &seen.misses, &seen.deleted, &seen.evicted, &seen.closed];
    let reached = reached.into_iter().chain([&seen.demoted, &seen.promoted]);
    assert!(reached.into_iter().all(|count| count.load(Relaxed) > 100), "{seen:?}");
}

/// The worlds find a planted bug. Without it the same seeds are clean.
#[test]
fn a_wake_up_that_a_call_to_a_stage_loses_is_found() {
    let planted = |seed| Settings { plant: Some(Plant::LostWakeUp), ..Settings::from_seed(seed) };
    let seen = Arc::new(Seen::default());
    let reports = SEEDS.map(|seed| world("Dram|Map", planted(seed), &seen));
    let found = reports.into_iter().find(|report| !report.panics.is_empty());
    let panics = found.expect("some seed loses a wake-up").panics;
    assert!(panics.iter().any(|panic| panic.contains("Timeout")), "{panics:?}");
}
