//! How long single calls hold the store's lock, and how long others wait for it meanwhile.

mod evicting;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_runtime::{now, yield_now};
use cascade_store::{
    CallOptions, FilesConfig, Hints, Hold, HoldRecorder, Put, PutOutcome, Request, Store,
    StoreConfig, ViewOutcome,
};

use crate::disk::ScratchDirectory;
use crate::{Bench, FLUSH_OPTIONS, Figure, MeasureError, Target, failed, keys, open};

/// Resident blocks beside those that a call is for.
const RESIDENT: usize = 1_000_000;
/// Blocks of the store in which all are pinned: its pool has room for no other.
const PINNED: usize = 262_144;
const BLOCK: usize = 64;
const PUT_BATCH: usize = 256;
const ROUNDS: usize = 3;
/// Most time of one hold, in microseconds.
const HOLD_MAX_US: f64 = 200.0;
/// Most time of a call for one key while another call runs, in microseconds.
const WAIT_MAX_US: f64 = 1000.0;

/// A store, the blocks in it, and the recorder of its holds.
struct Fixture {
    store: Store,
    holds: HoldRecorder,
    keys: Vec<BlockKey>,
    /// A chain of 32,768 blocks, put with their parents.
    chain: Vec<BlockKey>,
    /// Blocks that single measurements put and delete.
    other: Vec<BlockKey>,
    /// How often a measurement that must differ in each round has run.
    round: AtomicUsize,
    _scratch: Option<ScratchDirectory>,
}

/// One measured call: what it is called, what comes before it, and the call itself.
struct Measured {
    what: &'static str,
    before: fn(&Fixture) -> Result<(), MeasureError>,
    call: fn(&Fixture) -> Result<(), MeasureError>,
    /// Whether another thread's calls are timed beside it.
    has_beside: bool,
}

pub(super) fn run(bench: &mut Bench<'_>) -> Result<(), MeasureError> {
    group(bench, &IN_MEMORY, Fixture::in_memory)?;
    group(bench, &ALL_PINNED, Fixture::all_pinned)?;
    evicting::run(bench)?;
    group(bench, &WITH_FILES, Fixture::with_files)
}

const NOTHING: fn(&Fixture) -> Result<(), MeasureError> = |_| Ok(());

/// Calls to a store of a million blocks in DRAM. `clear` and `erase` come last: they empty it.
const IN_MEMORY: [Measured; 18] = [
    // First: prefixes of the lookups of other rows would be watched in place of the deep ones.
    Measured {
        before: Fixture::watch_prefixes,
        ..plain("status", |it| {
            let hot = it.store.hot_prefixes(HOT_PREFIXES);
            it.store.stats();
            let deep = hot.iter().filter(|hot| hot.depth_blocks >= 8000).count();
            all("hot prefixes", deep >= HOT_PREFIXES / 2)
        })
    },
    Measured { has_beside: true, ..plain("lookup-8192", |it| it.look_up(&it.chain[..8192])) },
    Measured { has_beside: true, ..plain("lookup-32768", |it| it.look_up(&it.chain)) },
    Measured {
        before: Fixture::put_pairs,
        ..plain("lookup-32768-adopt", |it| it.look_up(&it.other[..32_768]))
    },
    plain("hint-32768", |it| {
        let hints = Hints::default();
        it.store.hint(&Request { hints, ..Request::new(&it.chain) });
        Ok(())
    }),
    plain("contains-65536", |it| {
        all("contains", it.store.contains(&it.keys[..65_536]).iter().all(|is_here| *is_here))
    }),
    plain("pin-65536", |it| {
        let keys = &it.keys[..65_536];
        let pinned = it.store.pin(keys).iter().all(|is_pinned| *is_pinned);
        all("pins", pinned && it.store.unpin(keys).iter().all(|was_pinned| *was_pinned))
    }),
    plain("explain-32768", |it| {
        let explained = it.store.explain(&it.chain, None, CallOptions::default());
        explained.map(drop).map_err(failed("explain"))
    }),
    plain("find-keys", |it| {
        it.store.find_keys(|_| false, 1, CallOptions::default()).map(drop).map_err(failed("find"))
    }),
    plain("changes", |it| {
        let mut cursor = None;
        loop {
            let some = it.store.changes(cursor, 1 << 16).map_err(failed("changes"))?;
            if some.is_current {
                return Ok(());
            }
            cursor = Some(some.next);
        }
    }),
    Measured {
        before: |it| it.delete(&it.other[..24_000]),
        has_beside: true,
        ..plain("put-24000", |it| it.put(&it.other[..24_000], PUT_BATCH_NONE))
    },
    Measured {
        before: |it| it.delete(&equal_heads(24_000)),
        ..plain("put-equal-heads", |it| it.put(&equal_heads(24_000), PUT_BATCH_NONE))
    },
    Measured {
        before: |it| it.put(&it.other[..262_144], PUT_BATCH),
        has_beside: true,
        ..plain("delete-262144", |it| it.delete(&it.other[..262_144]))
    },
    plain("get-32768", |it| {
        let mut memory = vec![0; 32_768 * BLOCK];
        let mut buffers: Vec<&mut [u8]> = memory.chunks_exact_mut(BLOCK).collect();
        let outcomes = it.store.get(&it.chain, &mut buffers, CallOptions::default());
        let is_hit = |it: &_| matches!(it, cascade_store::GetOutcome::Hit { .. });
        all("gets", outcomes.iter().all(is_hit))
    }),
    plain("view-32768", |it| {
        let views = it.store.view(&it.chain, CallOptions::default());
        all("views", views.iter().all(|it| matches!(it, ViewOutcome::Hit { .. })))
    }),
    plain("age-after-pause", |it| {
        // An hour later, each unit of blocks moves on, a limited number with each request.
        let hours = it.round.fetch_add(1, Ordering::Relaxed) + 1;
        let at = now() + Duration::from_secs(3600 * hours as u64);
        let request = Request { at: Some(at), ..Request::new(&it.chain[..1]) };
        let is_match = |_| it.store.lookup_prefix(&request).tiers.len() == 1;
        let is_found = is_match(0);
        // Each read of a block touches the policy, too.
        let mut memory = vec![0; 256 * BLOCK];
        let mut buffers: Vec<&mut [u8]> = memory.chunks_exact_mut(BLOCK).collect();
        it.store.get(&it.keys[..256], &mut buffers, CallOptions::default());
        all("lookups", is_found && (0..6000).all(is_match))
    }),
    Measured {
        before: Fixture::fill,
        has_beside: true,
        ..plain("clear-1M", |it| {
            it.store.clear();
            Ok(())
        })
    },
    Measured {
        before: Fixture::fill,
        ..plain("erase-1M", |it| {
            let erased = it.store.erase(FLUSH_OPTIONS).map_err(failed("erase"))?;
            all("erases", erased.is_complete())
        })
    },
];

/// A store in which no block can be evicted, and no memory is free.
const ALL_PINNED: [Measured; 1] = [plain("put-all-pinned", |it| {
    let bytes = [1; BLOCK];
    let puts: Vec<Put<'_>> = it.other[..16].iter().map(|key| Put::new(*key, &bytes)).collect();
    let outcomes = it.store.put(&puts, CallOptions::default());
    all("declined puts", outcomes.iter().all(|it| matches!(it, PutOutcome::Declined(_))))
})];

/// A store with a file tier.
const WITH_FILES: [Measured; 3] = [
    Measured {
        before: |it| it.delete(&it.other[..65_536]),
        ..plain("write-back", |it| {
            it.put(&it.other[..65_536], PUT_BATCH)?;
            it.store.flush(FLUSH_OPTIONS).map_err(failed("flush"))
        })
    },
    plain("flush", |it| it.store.flush(FLUSH_OPTIONS).map_err(failed("flush"))),
    Measured {
        before: |it| it.put(&it.other[..65_536], PUT_BATCH),
        ..plain("delete-65536-files", |it| {
            it.delete(&it.other[..65_536])?;
            it.store.flush(FLUSH_OPTIONS).map_err(failed("flush"))
        })
    },
];

/// A put of all blocks in one call.
const PUT_BATCH_NONE: usize = usize::MAX;

const fn plain(what: &'static str, call: fn(&Fixture) -> Result<(), MeasureError>) -> Measured {
    Measured { what, before: NOTHING, call, has_beside: false }
}

/// Measures those calls of a group that are selected.
fn group(
    bench: &mut Bench<'_>,
    calls: &[Measured],
    fixture: fn(&Bench<'_>) -> Result<Fixture, MeasureError>,
) -> Result<(), MeasureError> {
    let wanted: Vec<&Measured> = calls
        .iter()
        .filter(|it| bench.wants_any(&[&it.longest(), &it.p999()]) || it.wants_beside(bench))
        .collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let fixture = fixture(bench)?;
    for measured in wanted {
        measured.measure(bench, &fixture)?;
    }
    Ok(())
}

impl Measured {
    fn longest(&self) -> String {
        format!("hold/{}/longest", self.what)
    }

    fn p999(&self) -> String {
        format!("hold/{}/p999", self.what)
    }

    fn beside(&self) -> String {
        format!("contains/beside-{}/p999", self.what)
    }

    fn wants_beside(&self, bench: &Bench<'_>) -> bool {
        self.has_beside && bench.wants(&self.beside())
    }

    fn measure(&self, bench: &mut Bench<'_>, fixture: &Fixture) -> Result<(), MeasureError> {
        let (mut longest, mut p999, mut worst) = (Vec::new(), Vec::new(), None);
        for _ in 0..ROUNDS {
            (self.before)(fixture)?;
            fixture.holds.take();
            (self.call)(fixture)?;
            let holds = fixture.holds.take();
            worst = holds.iter().copied().chain(worst).max_by_key(|hold| hold.cpu);
            let mut times: Vec<f64> = holds.iter().map(micros).collect();
            times.sort_by(f64::total_cmp);
            p999.push(percentile_999(&times)?);
            longest.push(times.last().copied().unwrap_or_default());
        }
        let (none, target) = ((Vec::new(), ""), Target::AtMost(HOLD_MAX_US));
        let figure = Figure::cost(self.longest(), "us", longest, none.clone(), target);
        bench.deliver(figure.with_detail(worst.map(described).unwrap_or_default()))?;
        bench.deliver(Figure::cost(self.p999(), "us", p999, none, Target::None))?;
        if !self.wants_beside(bench) {
            return Ok(());
        }
        let mut waits = Vec::new();
        for _ in 0..ROUNDS {
            (self.before)(fixture)?;
            waits.push(percentile_999(&fixture.contains_beside(self.call)?)?);
        }
        let (none, target) = ((Vec::new(), ""), Target::AtMost(WAIT_MAX_US));
        bench.deliver(Figure::cost(self.beside(), "us", waits, none, target))
    }
}

impl Fixture {
    fn in_memory(_: &Bench<'_>) -> Result<Self, MeasureError> {
        let config = StoreConfig { dram_bytes: 192 << 20, ..StoreConfig::default() };
        let fixture = Self::open(config, RESIDENT, None)?;
        fixture.fill()?;
        Ok(fixture)
    }

    fn all_pinned(_: &Bench<'_>) -> Result<Self, MeasureError> {
        let config = StoreConfig { dram_bytes: (PINNED * BLOCK) as u64, ..StoreConfig::default() };
        let mut fixture = Self::open(config, PINNED, None)?;
        fixture.chain.clear();
        // The pool may have room for a few blocks more or less than its size says.
        let bytes = [1; BLOCK];
        for keys in fixture.keys.chunks(PUT_BATCH) {
            let puts: Vec<Put<'_>> = keys.iter().map(|key| Put::new(*key, &bytes)).collect();
            fixture.store.put(&puts, CallOptions::default());
            fixture.store.pin(keys);
        }
        Ok(fixture)
    }

    fn with_files(bench: &Bench<'_>) -> Result<Self, MeasureError> {
        let scratch = ScratchDirectory::new(&bench.directory)?;
        let mut files = FilesConfig::new(scratch.path("store"));
        files.capacity_bytes = 4 << 30;
        let config = StoreConfig {
            pipeline: "Dram|Files".to_owned(),
            dram_bytes: 128 << 20,
            files: Some(files),
            ..StoreConfig::default()
        };
        Self::open(config, 0, Some(scratch))
    }

    fn open(
        config: StoreConfig,
        count: usize,
        scratch: Option<ScratchDirectory>,
    ) -> Result<Self, MeasureError> {
        let holds = HoldRecorder::new();
        let store = open("holds", StoreConfig { holds: Some(holds.clone()), ..config })?;
        let (keys, chain) = (keys("resident", count), self::keys("chain", 32_768));
        let other = self::keys("other", 262_144);
        let round = AtomicUsize::new(0);
        Ok(Self { store, holds, keys, chain, other, round, _scratch: scratch })
    }

    /// Looks up as many long prefixes of the chain as are watched.
    fn watch_prefixes(&self) -> Result<(), MeasureError> {
        (0..HOT_PREFIXES).try_for_each(|at| self.look_up(&self.chain[..8192 - at]))
    }

    /// Puts all resident blocks that are missing.
    fn fill(&self) -> Result<(), MeasureError> {
        self.put(&self.keys, PUT_BATCH)?;
        self.put_chain()
    }

    /// Puts the chain, each block with its parent.
    fn put_chain(&self) -> Result<(), MeasureError> {
        let bytes = [1; BLOCK];
        for at in (0..self.chain.len()).step_by(PUT_BATCH) {
            let keys = &self.chain[at..(at + PUT_BATCH).min(self.chain.len())];
            let put = |(to, key): (usize, &BlockKey)| Put {
                parent: (at + to).checked_sub(1).map(|parent| self.chain[parent]),
                ..Put::new(*key, &bytes)
            };
            let puts: Vec<Put<'_>> = keys.iter().enumerate().map(put).collect();
            check(&self.store.put(&puts, CallOptions::default()))?;
        }
        Ok(())
    }

    /// Puts blocks without parents, and looks up each with its predecessor.
    fn put_pairs(&self) -> Result<(), MeasureError> {
        let keys = &self.other[..32_768];
        self.delete(keys)?;
        self.put(keys, PUT_BATCH)?;
        keys.windows(2).step_by(2).try_for_each(|pair| self.look_up(pair))
    }

    fn put(&self, keys: &[BlockKey], batch: usize) -> Result<(), MeasureError> {
        let bytes = [1; BLOCK];
        for keys in keys.chunks(batch) {
            let puts: Vec<Put<'_>> = keys.iter().map(|key| Put::new(*key, &bytes)).collect();
            check(&self.store.put(&puts, CallOptions::default()))?;
        }
        Ok(())
    }

    fn look_up(&self, chain: &[BlockKey]) -> Result<(), MeasureError> {
        all("lookups", self.store.lookup_prefix(&Request::new(chain)).tiers.len() == chain.len())
    }

    fn delete(&self, keys: &[BlockKey]) -> Result<(), MeasureError> {
        all("deletions", self.store.delete(keys).len() == keys.len())
    }

    /// Times `contains` of one key in a second thread while the call runs, in microseconds,
    /// ascending.
    fn contains_beside(
        &self,
        call: fn(&Self) -> Result<(), MeasureError>,
    ) -> Result<Vec<f64>, MeasureError> {
        let (has_begun, has_ended) = (AtomicBool::new(false), AtomicBool::new(false));
        let key = &self.chain[..1];
        std::thread::scope(|scope| {
            let timing = scope.spawn(|| {
                let mut times = Vec::new();
                while !has_ended.load(Ordering::Acquire) {
                    let began = now();
                    std::hint::black_box(self.store.contains(key));
                    times.push(now().saturating_sub(began).as_secs_f64() * 1e6);
                    has_begun.store(true, Ordering::Release);
                    // As a caller would: some work between two calls.
                    std::thread::yield_now();
                }
                times
            });
            while !has_begun.load(Ordering::Acquire) {
                yield_now();
            }
            let called = call(self);
            has_ended.store(true, Ordering::Release);
            let times = timing.join();
            called?;
            let mut times =
                times.map_err(|_| MeasureError::measure("contains", "its thread failed"))?;
            times.sort_by(f64::total_cmp);
            Ok(times)
        })
    }
}

/// Hot prefixes of the store that are watched at most.
const HOT_PREFIXES: usize = 192;

/// Keys that differ in their last eight bytes only.
fn equal_heads(count: u64) -> Vec<BlockKey> {
    let key = |number: u64| {
        let mut bytes = [0xab; 32];
        bytes[24..].copy_from_slice(&number.to_le_bytes());
        BlockKey::from_bytes(bytes)
    };
    (0..count).map(key).collect()
}

fn micros(hold: &Hold) -> f64 {
    Duration::as_secs_f64(&hold.cpu) * 1e6
}

/// What a hold did, for the report of the longest one.
fn described(hold: Hold) -> String {
    let Hold { cpu, time, keys, at } = hold;
    let count = if keys == 1 { "key" } else { "keys" };
    format!("longest hold: {cpu:.0?} of CPU in {time:.0?} for {keys} {count}, taken at {at}")
}

/// The value of ascending values that 99.9 % do not exceed.
fn percentile_999(sorted: &[f64]) -> Result<f64, MeasureError> {
    let value = sorted.get(sorted.len() * 999 / 1000).copied();
    value.ok_or_else(|| MeasureError::measure("holds", "the call took no lock"))
}

fn check(outcomes: &[PutOutcome]) -> Result<(), MeasureError> {
    let is_bad = |it: &&PutOutcome| !matches!(it, PutOutcome::Stored | PutOutcome::Present);
    match outcomes.iter().find(is_bad) {
        Some(bad) => Err(MeasureError::measure("holds", format!("a put returned {bad:?}"))),
        None => Ok(()),
    }
}

fn all(what: &str, is_as_expected: bool) -> Result<(), MeasureError> {
    let failure =
        || MeasureError::measure("holds", format!("not all {what} had the expected result"));
    is_as_expected.then_some(()).ok_or_else(failure)
}
