//! A store with two sources in simulated worlds: slow, hung, wrong and stale answers, every byte
//! checked, and every call back by its deadline in virtual time.
//!
//! A failure names its seed, and a seed fails in the same way each time.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cascade_block::{BlockKey, NamespaceId, checksum};
use cascade_runtime::simulated::{Domain, Ending, Report, Settings, World};
use cascade_runtime::{SystemClock, now, random_u64, sleep, thread};
use cascade_store::{
    CallOptions, GetOutcome, HealthConfig, Put, Request, SourceList, Store, StoreConfig,
    StoreError, TierName, ViewOutcome,
};
use cascade_tier::source::{LocatedBlock, Source, SourceLimit};
use cascade_tier::tier::{Address, BlockFacts, Load, LoadOutcome, LoadQueue, TierError};

use crate::blocks::{bytes_of, dram, keys};
use crate::third_party::MapStage;

const SEEDS: Range<u64> = 0..40;
const CALLERS: usize = 3;
const OPERATIONS: usize = 80;
const KEYS: u64 = 192;
const BYTES_MAX: usize = 64_000;
const TIMEOUT: Duration = Duration::from_millis(400);
/// What a call may take after its deadline: several waits for the lock of the store.
const LATENESS_MAX: Duration = Duration::from_millis(50);

/// What the callers of all worlds saw, to show that the worlds reach what they are to test.
#[derive(Debug, Default)]
struct Seen {
    fetched: AtomicU64,
    stale: AtomicU64,
    damaged: AtomicU64,
    failed: AtomicU64,
    matched: AtomicU64,
    late: AtomicU64,
    openings: AtomicU64,
    misses: AtomicU64,
}

/// A test double: has every block whose number fits, and answers at random.
#[derive(Debug)]
struct RandomSource {
    name: TierName,
    /// It has the blocks whose fingerprints have this remainder.
    remainder: u64,
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

fn eio() -> TierError {
    TierError::Failed(Arc::new(std::io::Error::other("injected")))
}

impl RandomSource {
    /// Takes time: usually a little, seldom more than any call has.
    fn work(limit: &SourceLimit<'_>) -> Result<(), TierError> {
        let most = match below(40) {
            0 => 2_000_000,
            1..4 => 300_000,
            _ => 500,
        };
        sleep(Duration::from_micros(below(most)));
        match below(60) {
            0 => panic!("injected"),
            1 | 2 => Err(eio()),
            _ if limit.deadline.has_passed(&SystemClock) => Err(TierError::Timeout),
            _ => Ok(()),
        }
    }

    fn fetch_one(mut load: Load) -> LoadOutcome {
        let bytes = &blocks_by_key()[&load.key];
        assert_eq!(load.address, Address(u64::from(checksum(bytes))), "the address of the block");
        assert_eq!(load.slab.len(), bytes.len(), "the length of the block");
        load.slab.fill_from(bytes).unwrap();
        match below(20) {
            0 => LoadOutcome::Gone,
            1 => {
                load.slab.host_mut().unwrap()[0] ^= 1;
                LoadOutcome::Hit(load.slab)
            }
            2 => LoadOutcome::Failed(eio()),
            _ => LoadOutcome::Hit(load.slab),
        }
    }
}

impl Source for RandomSource {
    fn name(&self) -> TierName {
        self.name
    }

    fn locate(
        &self,
        keys: &[BlockKey],
        limit: &SourceLimit<'_>,
    ) -> Result<Vec<Option<LocatedBlock>>, TierError> {
        Self::work(limit)?;
        let locate = |key: &BlockKey| {
            let bytes = &blocks_by_key()[key];
            let sum = checksum(bytes);
            let facts = BlockFacts {
                key: *key,
                digest: None,
                parent: None,
                namespace: NamespaceId::default(),
                bytes: u32::try_from(bytes.len()).unwrap(),
                is_prefix: false,
                written_unix_ms: 0,
                expires_unix_ms: None,
            };
            let address = Address(u64::from(sum));
            let is_here = key.fingerprint() % 3 != self.remainder;
            is_here.then_some(LocatedBlock { facts, checksum: sum, address })
        };
        Ok(keys.iter().map(locate).collect())
    }

    fn fetch(&self, batch: Vec<Load>, _: &SourceLimit<'_>) -> Vec<LoadOutcome> {
        batch.into_iter().map(Self::fetch_one).collect()
    }

    fn fetch_each(&self, queue: &mut dyn LoadQueue, limit: &SourceLimit<'_>) {
        let mut in_flight: Vec<(usize, Load)> = Vec::new();
        loop {
            while in_flight.len() < 4
                && let Some(next) = queue.next_load()
            {
                in_flight.push(next);
            }
            if in_flight.is_empty() {
                return;
            }
            let at = usize::try_from(below(in_flight.len() as u64)).unwrap();
            let (number, load) = in_flight.swap_remove(at);
            let outcome = match Self::work(limit) {
                Ok(()) => Self::fetch_one(load),
                Err(error) => LoadOutcome::Failed(error),
            };
            if below(30) == 0 {
                queue.ended(number + 7, LoadOutcome::Gone);
            }
            queue.ended(number, outcome);
        }
    }

    fn probe(&self, _: cascade_runtime::Deadline) -> Result<(), TierError> {
        if below(3) == 0 { Err(eio()) } else { Ok(()) }
    }
}

struct Caller {
    store: Store,
    seen: Arc<Seen>,
}

impl Caller {
    fn play(&self) {
        let all: Vec<BlockKey> = blocks_by_key().keys().copied().collect();
        for _ in 0..OPERATIONS {
            let start = usize::try_from(below(KEYS - 12)).unwrap();
            let some = &all[start..=start + usize::try_from(below(12)).unwrap()];
            let began = now();
            match below(12) {
                0 | 1 => self.put(some),
                2..5 => self.get(some),
                5 => self.check(some, self.store.view(some, CallOptions::default())),
                6 | 7 => self.view_each(some),
                8 => {
                    let request = Request::new(some);
                    let views = self.store.acquire(&request, CallOptions::default());
                    self.check(&some[..views.len()], views);
                }
                9 => {
                    let matched = self.store.lookup_prefix(&Request::new(some)).tiers;
                    self.seen.matched.fetch_add(matched.len() as u64, Relaxed);
                    sleep(Duration::from_micros(below(5_000)));
                    self.get(&some[..matched.len()]);
                }
                10 => drop(self.store.delete(&some[..1])),
                _ if below(8) == 0 => self.store.clear(),
                _ => sleep(Duration::from_micros(below(20_000))),
            }
            // A lookup, and the read of what it matched.
            let took = now().saturating_sub(began);
            assert!(took <= 2 * (TIMEOUT + LATENESS_MAX), "a call took {took:?}");
        }
    }

    fn put(&self, some: &[BlockKey]) {
        let blocks = blocks_by_key();
        let batch: Vec<_> = some.iter().map(|key| Put::new(*key, &blocks[key])).collect();
        assert_eq!(self.store.put(&batch, CallOptions::default()).len(), some.len());
    }

    fn get(&self, some: &[BlockKey]) {
        let mut buffers: Vec<Vec<u8>> = some.iter().map(|_| vec![0; BYTES_MAX]).collect();
        let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
        let outcomes = self.store.get(some, &mut slices, CallOptions::default());
        for ((key, buffer), outcome) in some.iter().zip(&buffers).zip(outcomes) {
            match outcome {
                GetOutcome::Hit { bytes, tier } => {
                    assert!(buffer[..bytes] == *blocks_by_key()[key], "wrong bytes from {tier}");
                }
                GetOutcome::Miss => drop(self.seen.misses.fetch_add(1, Relaxed)),
                GetOutcome::TooShort { needed_bytes } => panic!("{needed_bytes} bytes needed"),
                GetOutcome::Failed(error) => self.accept(&error),
            }
        }
    }

    fn view_each(&self, some: &[BlockKey]) {
        let mut views: Vec<Option<ViewOutcome>> = some.iter().map(|_| None).collect();
        self.store.view_each(some, CallOptions::default(), &mut |at, view| {
            assert!(views[at].replace(view).is_none(), "given twice");
        });
        self.check(some, views.into_iter().map(|view| view.expect("given once")).collect());
    }

    fn check(&self, some: &[BlockKey], views: Vec<ViewOutcome>) {
        for (key, view) in some.iter().zip(views) {
            match view {
                ViewOutcome::Hit { slab, tier } => {
                    assert!(
                        slab.host() == Some(&blocks_by_key()[key][..]),
                        "wrong bytes from {tier}"
                    );
                }
                ViewOutcome::Miss => drop(self.seen.misses.fetch_add(1, Relaxed)),
                ViewOutcome::Failed(error) => self.accept(&error),
            }
        }
    }

    fn accept(&self, error: &StoreError) {
        match error {
            StoreError::NoRoom { .. } | StoreError::Tier { .. } => {}
            StoreError::Timeout { .. } | StoreError::Busy { .. } => {
                self.seen.late.fetch_add(1, Relaxed);
            }
            error => panic!("{error:?}"),
        }
    }
}

/// Opens a store, lets the callers play, and closes it.
fn live(pipeline: &str, seen: &Arc<Seen>) {
    let stage = MapStage::new();
    let sources = [("near", 0), ("far", 1)]
        .map(|(name, remainder)| Arc::new(RandomSource { name, remainder }) as Arc<dyn Source>);
    let config = StoreConfig {
        pipeline: pipeline.to_owned(),
        sources: SourceList::new(sources.to_vec()),
        timeout: TIMEOUT,
        locate_timeout: Duration::from_millis(20),
        health: HealthConfig {
            probe_interval: Duration::from_millis(50),
            probe_timeout: Duration::from_millis(200),
            ..HealthConfig::default()
        },
        ..dram(4)
    };
    let store = Store::open_with(config, &stage.registry(), Arc::new(SystemClock)).unwrap();
    let callers = std::array::from_fn::<_, CALLERS, _>(|number| {
        let caller = Caller { store: store.clone(), seen: Arc::clone(seen) };
        let thread = thread::Builder::new().name(format!("caller {number}"));
        thread.spawn(move || caller.play()).unwrap()
    });
    for caller in callers {
        caller.join().expect("no caller panics");
    }
    let stats = store.stats();
    let counters = stats.counters;
    assert_eq!(counters.gets, counters.hits + counters.misses + counters.get_failures);
    assert_eq!(stats.hits_by_tier.iter().map(|tier| tier.blocks).sum::<u64>(), counters.hits);
    let matched: u64 = stats.hits_by_tier.iter().map(|tier| tier.matched_blocks).sum();
    assert_eq!(matched, counters.matched());
    assert!(counters.matched() <= counters.requested(), "{counters:?}");
    let world = World::current().unwrap();
    for (_, source) in &stats.sources {
        seen.fetched.fetch_add(source.fetched_blocks, Relaxed);
        seen.stale.fetch_add(source.stale_blocks, Relaxed);
        seen.damaged.fetch_add(source.damaged_blocks, Relaxed);
        seen.failed.fetch_add(source.failed_blocks, Relaxed);
        seen.openings.fetch_add(source.health.opened_count, Relaxed);
        // Outcomes are part of the event hash by their counts.
        world.note(source.fetched_blocks);
    }
    // Late calls still hold slabs.
    sleep(Duration::from_secs(60));
    store.clear();
    let stats = store.stats();
    assert_eq!((stats.keys, stats.contents, stats.dram_bytes), (0, 0, 0));
    assert_eq!(stats.pool.requested_bytes, 0, "no slab is lost");
    store.close().unwrap();
    drop(store);
    // Threads for calls are not joined.
    sleep(Duration::from_secs(60));
    assert_eq!(world.live_threads(Domain::HARNESS), 1, "all threads of the store have ended");
}

fn run(pipeline: &'static str, seed: u64, seen: &Arc<Seen>) -> Report {
    let settings = Settings { spurious_one_in: 100, ..Settings::from_seed(seed) };
    let seen = Arc::clone(seen);
    let report = World::run(settings, move || live(pipeline, &seen));
    assert_eq!(report.ending, Ending::Finished, "seed {seed}: {:?}", report.panics);
    let unexpected: Vec<_> =
        report.panics.iter().filter(|panic| !panic.contains("injected")).collect();
    assert!(unexpected.is_empty(), "seed {seed}: {unexpected:?}");
    report
}

/// Runs each seed twice.
fn run_all(pipeline: &'static str) {
    let seen = Arc::new(Seen::default());
    for seed in SEEDS {
        let first = run(pipeline, seed, &seen);
        let second = run(pipeline, seed, &seen);
        assert_eq!(first.event_hash, second.event_hash, "seed {seed}");
    }
    let Seen { fetched, stale, damaged, failed, matched, late, openings, misses } = &*seen;
    let reached = [fetched, stale, damaged, failed, matched, late, openings, misses];
    assert!(reached.iter().all(|count| count.load(Relaxed) > 10), "{seen:?}");
}

#[test]
fn a_store_in_memory_reads_from_sources_in_every_world() {
    run_all("Dram");
}

#[test]
fn a_store_with_a_lower_tier_reads_from_sources_in_every_world() {
    run_all("Dram|Map");
}
