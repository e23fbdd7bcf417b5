//! A test double of a source: blocks in a map, with delays and faults on demand.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use cascade_block::{BlockKey, NamespaceId, checksum};
use cascade_memory::SlabMut;
use cascade_runtime::{Deadline, SystemClock};
use cascade_store::{HealthState, SourceList, SourceStats, Store, StoreConfig, TierName};
use cascade_tier::source::{LocatedBlock, Source, SourceLimit};
use cascade_tier::tier::{Address, BlockFacts, Load, LoadOutcome, LoadQueue, TierError};

use crate::blocks::bytes_of;

/// What the source does with a block that is fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    /// It no longer has it.
    Gone,
    /// Other bytes than it had stated.
    Flipped,
    /// A slab of another length.
    Short,
    /// It fails.
    Fails,
    /// It reports it twice.
    Twice,
    /// It does not report it.
    Never,
    /// It reports a number that it was not given, then the block.
    Unasked,
    /// It panics.
    Panics,
}

/// Keeps blocks in a map.
#[derive(Debug)]
pub(crate) struct MapSource {
    name: TierName,
    blocks: Mutex<BTreeMap<BlockKey, Vec<u8>>>,
    faults: Mutex<BTreeMap<BlockKey, Fault>>,
    /// Keys of blocks whose facts it states as those of another key.
    pub(crate) confused: Mutex<BTreeSet<BlockKey>>,
    /// Answers `locate` with one result less than there are keys.
    pub(crate) answers_short: AtomicBool,
    /// Every call fails, also the probe.
    pub(crate) fails: AtomicBool,
    pub(crate) locate_panics: AtomicBool,
    /// Fetches and probes end only when the gate is open.
    pub(crate) ignores_limits: AtomicBool,
    /// Does not look at the queue when it is to fetch.
    pub(crate) takes_nothing: AtomicBool,
    /// Gives back blocks in the reverse order.
    pub(crate) is_reversed: AtomicBool,
    pub(crate) located: AtomicU64,
    pub(crate) locate_calls: AtomicU64,
    pub(crate) fetched: AtomicU64,
    pub(crate) cancelled: AtomicU64,
    pub(crate) closed: AtomicBool,
    /// When the blocks expire.
    pub(crate) expires_unix_ms: AtomicU64,
    locates: Gate,
    fetches: Gate,
}

/// A place where calls wait while it is shut.
#[derive(Debug, Default)]
struct Gate {
    is_shut: Mutex<bool>,
    changed: Condvar,
    reached: AtomicU64,
}

/// Keeps a gate shut until it is dropped.
pub(crate) struct Shut<'a>(&'a Gate);

/// Keeps both gates of a source shut until it is dropped.
pub(crate) struct HeldSource(Arc<MapSource>);

impl Drop for HeldSource {
    fn drop(&mut self) {
        drop((Shut(&self.0.locates), Shut(&self.0.fetches)));
    }
}

impl Gate {
    fn set_shut(&self) {
        *self.is_shut.lock().unwrap() = true;
        self.reached.store(0, Ordering::Relaxed);
    }

    fn shut(&self) -> Shut<'_> {
        self.set_shut();
        Shut(self)
    }

    /// Waits until it is open. With a limit, also until that: returns whether it is open.
    fn pass(&self, limit: Option<&SourceLimit<'_>>) -> bool {
        let mut is_shut = self.is_shut.lock().unwrap();
        self.reached.fetch_add(u64::from(*is_shut), Ordering::Relaxed);
        while *is_shut {
            let is_over = |limit: &SourceLimit<'_>| {
                limit.cancel.is_set() || limit.deadline.has_passed(&SystemClock)
            };
            if limit.is_some_and(is_over) {
                return false;
            }
            is_shut = self.changed.wait_timeout(is_shut, Duration::from_millis(1)).unwrap().0;
        }
        true
    }
}

impl Shut<'_> {
    /// Waits until a call waits at the gate.
    pub(crate) fn wait_until_reached(&self) {
        crate::blocks::wait_until("a call reaches the gate", || {
            self.0.reached.load(Ordering::Relaxed) > 0
        });
    }
}

impl Drop for Shut<'_> {
    fn drop(&mut self) {
        *self.0.is_shut.lock().unwrap() = false;
        self.0.changed.notify_all();
    }
}

/// A store with these sources.
pub(crate) fn open(config: StoreConfig, sources: &[&Arc<MapSource>]) -> Store {
    let list = sources.iter().map(|source| Arc::clone(source) as Arc<dyn Source>);
    let sources = SourceList::new(list.collect());
    // No test waits for a source by this time-out, unless it sets a shorter one.
    let locate_timeout = config.locate_timeout.max(Duration::from_secs(20));
    Store::open(StoreConfig { sources, locate_timeout, ..config }).unwrap()
}

/// The statistics of a source.
pub(crate) fn stats_of(store: &Store, source: usize) -> SourceStats {
    store.stats().sources[source].1.clone()
}

/// Waits until the circuit of a source is closed or open.
pub(crate) fn wait_for(store: &Store, source: usize, is_healthy: bool) {
    crate::blocks::wait_until("the circuit changes", || {
        (stats_of(store, source).health.state == HealthState::Healthy) == is_healthy
    });
}

impl MapSource {
    pub(crate) fn new(name: TierName) -> Arc<Self> {
        Arc::new(Self {
            name,
            blocks: Mutex::default(),
            faults: Mutex::default(),
            confused: Mutex::default(),
            answers_short: AtomicBool::default(),
            fails: AtomicBool::default(),
            locate_panics: AtomicBool::default(),
            ignores_limits: AtomicBool::default(),
            takes_nothing: AtomicBool::default(),
            is_reversed: AtomicBool::default(),
            located: AtomicU64::default(),
            locate_calls: AtomicU64::default(),
            fetched: AtomicU64::default(),
            cancelled: AtomicU64::default(),
            closed: AtomicBool::default(),
            expires_unix_ms: AtomicU64::default(),
            locates: Gate::default(),
            fetches: Gate::default(),
        })
    }

    /// Adds blocks of this length; their bytes are a function of the key.
    pub(crate) fn add(&self, keys: &[BlockKey], bytes: usize) {
        let blocks = keys.iter().map(|key| (*key, bytes_of(key, bytes)));
        self.blocks.lock().unwrap().extend(blocks);
    }

    /// Adds a block with these bytes.
    pub(crate) fn add_bytes(&self, key: &BlockKey, bytes: &[u8]) {
        self.blocks.lock().unwrap().insert(*key, bytes.to_vec());
    }

    pub(crate) fn remove(&self, key: &BlockKey) {
        self.blocks.lock().unwrap().remove(key);
    }

    pub(crate) fn set_fault(&self, key: &BlockKey, fault: Option<Fault>) {
        let mut faults = self.faults.lock().unwrap();
        match fault {
            Some(fault) => faults.insert(*key, fault),
            None => faults.remove(key),
        };
    }

    /// Holds all questions which blocks it has, beyond their deadlines.
    pub(crate) fn hold_locates(&self) -> Shut<'_> {
        self.locates.shut()
    }

    /// Holds all calls, until their deadlines.
    pub(crate) fn hold_all(self: &Arc<Self>) -> HeldSource {
        self.locates.set_shut();
        self.fetches.set_shut();
        HeldSource(Arc::clone(self))
    }

    /// Holds all fetches, until their deadlines.
    pub(crate) fn hold_fetches(&self) -> Shut<'_> {
        self.fetches.shut()
    }

    fn facts(&self, key: BlockKey, bytes: usize) -> BlockFacts {
        let expires = self.expires_unix_ms.load(Ordering::Relaxed);
        BlockFacts {
            key,
            digest: None,
            parent: None,
            namespace: NamespaceId::default(),
            bytes: u32::try_from(bytes).unwrap(),
            is_prefix: false,
            written_unix_ms: 0,
            expires_unix_ms: (expires != 0).then_some(expires),
        }
    }

    fn fetch_one(&self, load: Load, fault: Option<Fault>) -> LoadOutcome {
        self.fetched.fetch_add(1, Ordering::Relaxed);
        let Load { key, address, mut slab } = load;
        let blocks = self.blocks.lock().unwrap();
        // The address stands for the bytes that were located.
        let kept = blocks.get(&key).filter(|bytes| address_of(bytes) == address);
        let kept = kept.filter(|bytes| bytes.len() == slab.len() && fault != Some(Fault::Gone));
        let Some(bytes) = kept else { return LoadOutcome::Gone };
        if fault == Some(Fault::Fails) || self.fails.load(Ordering::Relaxed) {
            return LoadOutcome::Failed(eio());
        }
        slab.fill_from(bytes).unwrap();
        if fault == Some(Fault::Flipped) {
            slab.host_mut().unwrap()[0] ^= 1;
        }
        LoadOutcome::Hit(slab)
    }

    fn fetch_taken(
        &self,
        mut taken: Vec<(usize, Load)>,
        queue: &mut dyn LoadQueue,
        limit: &SourceLimit<'_>,
    ) {
        if self.is_reversed.load(Ordering::Relaxed) {
            taken.reverse();
        }
        for (number, load) in taken {
            let limit_now = (!self.ignores_limits.load(Ordering::Relaxed)).then_some(limit);
            if !self.fetches.pass(limit_now) {
                let is_cancelled = limit.cancel.is_set();
                self.cancelled.fetch_add(u64::from(is_cancelled), Ordering::Relaxed);
                queue.ended(number, LoadOutcome::Failed(TierError::Timeout));
                continue;
            }
            let fault = self.faults.lock().unwrap().get(&load.key).copied();
            assert!(fault != Some(Fault::Panics), "injected");
            let outcome = self.fetch_one(load, fault);
            let other = |slab: &SlabMut| slab.len() / 2;
            match (fault, outcome) {
                (Some(Fault::Never), _) => {}
                (Some(Fault::Twice), outcome) => {
                    queue.ended(number, outcome);
                    queue.ended(number, LoadOutcome::Gone);
                }
                (Some(Fault::Unasked), outcome) => {
                    queue.ended(number + 1_000, LoadOutcome::Gone);
                    queue.ended(number, outcome);
                }
                (Some(Fault::Short), LoadOutcome::Hit(slab)) => {
                    let pool = cascade_tier::conformance::tier::pool();
                    let short = pool.allocate(other(&slab)).unwrap();
                    queue.ended(number, LoadOutcome::Hit(short));
                }
                (_, outcome) => queue.ended(number, outcome),
            }
        }
    }
}

fn address_of(bytes: &[u8]) -> Address {
    Address(u64::from(checksum(bytes)))
}

fn eio() -> TierError {
    TierError::Failed(Arc::new(std::io::Error::other("injected")))
}

impl Source for MapSource {
    fn name(&self) -> TierName {
        self.name
    }

    fn locate(
        &self,
        keys: &[BlockKey],
        limit: &SourceLimit<'_>,
    ) -> Result<Vec<Option<LocatedBlock>>, TierError> {
        self.locate_calls.fetch_add(1, Ordering::Relaxed);
        let limit = (!self.ignores_limits.load(Ordering::Relaxed)).then_some(limit);
        if !self.locates.pass(limit) {
            return Err(TierError::Timeout);
        }
        assert!(!self.locate_panics.load(Ordering::Relaxed), "injected");
        if self.fails.load(Ordering::Relaxed) {
            return Err(eio());
        }
        self.located.fetch_add(keys.len() as u64, Ordering::Relaxed);
        let blocks = self.blocks.lock().unwrap();
        let confused = self.confused.lock().unwrap();
        let locate_one = |key: &BlockKey| {
            let bytes = blocks.get(key)?;
            let mut facts = self.facts(*key, bytes.len());
            if confused.contains(key) {
                facts.key = BlockKey::from_bytes([7; 32]);
            }
            let (checksum, address) = (checksum(bytes), address_of(bytes));
            Some(LocatedBlock { facts, checksum, address })
        };
        let mut located: Vec<_> = keys.iter().map(locate_one).collect();
        if self.answers_short.load(Ordering::Relaxed) {
            located.pop();
        }
        Ok(located)
    }

    fn fetch(&self, batch: Vec<Load>, limit: &SourceLimit<'_>) -> Vec<LoadOutcome> {
        let fetch_one = |load| {
            let is_open = self.fetches.pass(Some(limit));
            let late = || LoadOutcome::Failed(TierError::Timeout);
            if is_open { self.fetch_one(load, None) } else { late() }
        };
        batch.into_iter().map(fetch_one).collect()
    }

    fn fetch_each(&self, queue: &mut dyn LoadQueue, limit: &SourceLimit<'_>) {
        if self.takes_nothing.load(Ordering::Relaxed) {
            return;
        }
        while !limit.cancel.is_set() && !limit.deadline.has_passed(&SystemClock) {
            let taken: Vec<_> = std::iter::from_fn(|| queue.next_load()).collect();
            if taken.is_empty() {
                return;
            }
            self.fetch_taken(taken, queue, limit);
        }
    }

    fn probe(&self, deadline: Deadline) -> Result<(), TierError> {
        let cancel = cascade_runtime::Cancel::new();
        let limit = SourceLimit { deadline, cancel: &cancel };
        if !self.fetches.pass(Some(&limit)) {
            return Err(TierError::Timeout);
        }
        if self.fails.load(Ordering::Relaxed) { Err(eio()) } else { Ok(()) }
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }
}
