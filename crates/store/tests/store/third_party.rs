//! A stage that a third party might write: blocks in a map, with faults on demand.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use cascade_block::{BlockKey, Namespace, NamespaceId};
use cascade_memory::Slab;
use cascade_runtime::{Clock as _, Deadline, ManualClock, SystemClock};
use cascade_store::stages::StageRegistry;
use cascade_store::{CallOptions, HealthConfig, HealthState, Store, StoreConfig, TierName};
use cascade_tier::tier::{
    Address, BlockFacts, EraseOutcome, Load, LoadOutcome, MakeRoomOutcome, Tier, TierError,
    TierStats,
};

/// A store over DRAM and a fresh map stage.
pub(crate) fn open(config: StoreConfig) -> (Store, Arc<MapStage>) {
    let stage = MapStage::new();
    let config = StoreConfig { pipeline: "Dram|Map".to_owned(), ..config };
    let store = Store::open_with(config, &stage.registry(), Arc::new(SystemClock)).unwrap();
    (store, stage)
}

/// A health configuration with frequent probes, so that tests need not wait long.
pub(crate) fn frequent_probes() -> HealthConfig {
    let probe_interval = Duration::from_millis(20);
    HealthConfig {
        probe_interval,
        probe_timeout: Duration::from_secs(3),
        ..HealthConfig::default()
    }
}

/// The two circuits of a stage, for reads and for writes. A stage that fails opens the one before
/// the other: which one is seen first depends on the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Circuits {
    BothClosed,
    /// For a stage that fails in one direction only.
    OneOpen,
    BothOpen,
}

impl Circuits {
    fn are_those_of(self, store: &Store, stage: usize) -> bool {
        let health = store.stats().health.remove(stage).1;
        let circuits = [health.reads, health.writes];
        let open = circuits.iter().filter(|circuit| circuit.state != HealthState::Healthy).count();
        match self {
            Self::BothClosed => open == 0,
            Self::OneOpen => open > 0,
            Self::BothOpen => open == 2,
        }
    }
}

/// Waits until the circuits of a stage are closed or open.
#[expect(clippy::disallowed_methods, reason = "waits for another thread of the store")]
pub(crate) fn wait_for(store: &Store, stage: usize, circuits: Circuits) {
    let limit = Deadline::after(&SystemClock, Duration::from_secs(60));
    while !circuits.are_those_of(store, stage) {
        assert!(!limit.has_passed(&SystemClock), "{:?}", store.stats().health);
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Advances the clock in steps of 250 ms until the circuits of the first stage are closed or open.
/// Returns the time that it took.
#[expect(clippy::disallowed_methods, reason = "lets the prober run")]
pub(crate) fn pass_until(store: &Store, clock: &ManualClock, circuits: Circuits) -> Duration {
    let began = clock.monotonic();
    let limit = Deadline::after(&SystemClock, Duration::from_secs(120));
    while !circuits.are_those_of(store, 0) {
        assert!(!limit.has_passed(&SystemClock), "{:?}", store.stats().health);
        clock.advance(Duration::from_millis(250));
        std::thread::sleep(Duration::from_millis(2));
    }
    clock.monotonic().saturating_sub(began)
}

/// Waits until a stage has a hung call that its caller has abandoned.
#[expect(clippy::disallowed_methods, reason = "waits for another thread of the store")]
pub(crate) fn wait_for_stuck(store: &Store, stage: usize) {
    let limit = Deadline::after(&SystemClock, Duration::from_secs(60));
    while store.stats().health[stage].1.stuck_calls == 0 {
        assert!(!limit.has_passed(&SystemClock), "{:?}", store.stats().health);
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) fn flush(store: &Store) {
    store.flush(CallOptions::default()).unwrap();
}

/// Keeps blocks in a map.
#[derive(Debug, Default)]
pub(crate) struct MapStage {
    blocks: Mutex<BTreeMap<u64, StoredBlock>>,
    /// The next address.
    pub(crate) next: AtomicU64,
    pub(crate) capacity_bytes: AtomicU64,
    pub(crate) fails: AtomicBool,
    /// Loads fail, and probes of reads.
    pub(crate) fails_reads: AtomicBool,
    /// Everything but loads fails.
    pub(crate) fails_writes: AtomicBool,
    /// This many stores fail from now on.
    pub(crate) fails_stores: AtomicU64,
    /// The next flush fails, as a sync does that has lost blocks.
    pub(crate) fails_flush: AtomicBool,
    /// Storing a block removes its key from earlier ones, as a file for each key does.
    pub(crate) has_one_block_a_key: AtomicBool,
    /// Making room drops blocks without asking the store, such as those that have expired.
    pub(crate) drops_unasked: AtomicBool,
    /// Has to give space back, and has none that it can give.
    pub(crate) gives_nothing_back: AtomicBool,
    /// Calls to make room.
    pub(crate) rooms: AtomicU64,
    /// Removing names fails.
    pub(crate) fails_removes: AtomicBool,
    /// Calls that remove names.
    pub(crate) removes: AtomicU64,
    pub(crate) damages: AtomicBool,
    /// How long each call takes, in milliseconds.
    pub(crate) delay_ms: AtomicU64,
    pub(crate) loads: AtomicU64,
    pub(crate) stored: AtomicU64,
    pub(crate) panics: AtomicBool,
    /// Returns one result less than the batch has blocks.
    pub(crate) answers_short: AtomicBool,
    /// How long a flush takes, in milliseconds.
    pub(crate) flush_delay_ms: AtomicU64,
    /// How long adding a name takes, in milliseconds.
    pub(crate) name_delay_ms: AtomicU64,
    /// Blocks whose bytes did not have their stated length.
    pub(crate) wrong_lengths: AtomicU64,
    hung: Arc<HangSwitch>,
    stores_held: Arc<HangSwitch>,
    names_held: Arc<HangSwitch>,
    loads_held: Arc<HangSwitch>,
    loaded_held: Arc<HangSwitch>,
    rooms_held: Arc<HangSwitch>,
    /// Whether it can erase what it keeps.
    pub(crate) erases: AtomicBool,
    /// Whether it fails to keep manifests.
    pub(crate) fails_to_register: AtomicBool,
    erase_hung: Arc<HangSwitch>,
    /// Blocks that it returns as recovered from an earlier run.
    pub(crate) survivors: Mutex<Vec<(BlockFacts, Address)>>,
}

/// Whether calls hang, as on a device that does not answer.
#[derive(Debug, Default)]
struct HangSwitch {
    is_hung: Mutex<bool>,
    released: Condvar,
    /// Number of calls that have met it while it was on.
    reached: AtomicU64,
}

impl HangSwitch {
    fn wait(&self) {
        let is_hung = self.is_hung.lock().unwrap();
        self.reached.fetch_add(u64::from(*is_hung), Ordering::Relaxed);
        drop(self.released.wait_while(is_hung, |is_hung| *is_hung).unwrap());
    }
}

/// Calls hang until this is dropped.
pub(crate) struct HangGuard(Arc<HangSwitch>);

impl HangGuard {
    fn new(switch: &Arc<HangSwitch>) -> Self {
        *switch.is_hung.lock().unwrap() = true;
        switch.reached.store(0, Ordering::Relaxed);
        Self(Arc::clone(switch))
    }

    /// Waits until a call hangs.
    #[expect(clippy::disallowed_methods, reason = "waits for another thread of the store")]
    pub(crate) fn wait_until_reached(&self) {
        let limit = Deadline::after(&SystemClock, Duration::from_secs(60));
        while self.0.reached.load(Ordering::Relaxed) == 0 {
            assert!(!limit.has_passed(&SystemClock), "no call has come");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for HangGuard {
    fn drop(&mut self) {
        *self.0.is_hung.lock().unwrap() = false;
        self.0.released.notify_all();
    }
}

#[derive(Debug)]
struct StoredBlock {
    /// Of the name with which it was stored.
    facts: BlockFacts,
    names: BTreeSet<BlockKey>,
    bytes: Vec<u8>,
}

impl MapStage {
    pub(crate) fn new() -> Arc<Self> {
        let stage = Self::default();
        stage.capacity_bytes.store(u64::MAX, Ordering::Relaxed);
        Arc::new(stage)
    }

    /// A registry in which pipelines can name this stage `Map`.
    pub(crate) fn registry(self: &Arc<Self>) -> StageRegistry {
        let mut registry = StageRegistry::default();
        let stage = Arc::clone(self);
        registry.register("Map", Arc::new(move |_| Ok(stage.clone())));
        registry
    }

    /// Makes every call hang, whatever its deadline.
    pub(crate) fn hang(&self) -> HangGuard {
        HangGuard::new(&self.hung)
    }

    /// Makes erasing hang, and nothing else.
    pub(crate) fn hang_erase(&self) -> HangGuard {
        HangGuard::new(&self.erase_hung)
    }

    /// Holds calls to store blocks, before they store any.
    pub(crate) fn hold_stores(&self) -> HangGuard {
        HangGuard::new(&self.stores_held)
    }

    /// Holds calls to add names, before they add any.
    pub(crate) fn hold_names(&self) -> HangGuard {
        HangGuard::new(&self.names_held)
    }

    /// Holds calls to load blocks, before they look for any.
    pub(crate) fn hold_loads(&self) -> HangGuard {
        HangGuard::new(&self.loads_held)
    }

    /// Holds calls to load blocks, once they have the results.
    pub(crate) fn hold_loaded(&self) -> HangGuard {
        HangGuard::new(&self.loaded_held)
    }

    /// Holds calls to make room, once they have removed blocks.
    pub(crate) fn hold_rooms(&self) -> HangGuard {
        HangGuard::new(&self.rooms_held)
    }

    /// Number of stored blocks.
    pub(crate) fn block_count(&self) -> usize {
        self.blocks.lock().unwrap().len()
    }

    fn used(blocks: &BTreeMap<u64, StoredBlock>) -> u64 {
        blocks.values().map(|kept| kept.bytes.len() as u64).sum()
    }

    /// The bytes that it keeps.
    pub(crate) fn used_bytes(&self) -> u64 {
        Self::used(&self.blocks.lock().unwrap())
    }

    /// Stores a block as if by an earlier run.
    pub(crate) fn add_survivor(&self, facts: BlockFacts, bytes: Vec<u8>) {
        let address = self.next.fetch_add(1, Ordering::Relaxed);
        let names = BTreeSet::from([facts.key]);
        self.blocks.lock().unwrap().insert(address, StoredBlock { facts, names, bytes });
        self.survivors.lock().unwrap().push((facts, Address(address)));
    }

    /// The facts with which a block was stored.
    pub(crate) fn facts_of(&self, key: &BlockKey) -> Option<BlockFacts> {
        let blocks = self.blocks.lock().unwrap();
        blocks.values().map(|kept| kept.facts).find(|facts| facts.key == *key)
    }

    /// Whether a stored block has this name.
    pub(crate) fn has(&self, key: &BlockKey) -> bool {
        self.blocks.lock().unwrap().values().any(|kept| kept.names.contains(key))
    }

    /// Begins a new run: all stored blocks are those of an earlier one.
    pub(crate) fn restart(&self) {
        let blocks = self.blocks.lock().unwrap();
        let names = blocks.iter().flat_map(|(address, kept)| {
            kept.names.iter().map(|name| (facts_of(name, kept.bytes.len()), Address(*address)))
        });
        *self.survivors.lock().unwrap() = names.collect();
    }

    /// Moves the bytes of every address to the previous one, without their names.
    pub(crate) fn swap_all(&self) {
        let mut blocks = self.blocks.lock().unwrap();
        let mut all: Vec<Vec<u8>> = blocks.values().map(|kept| kept.bytes.clone()).collect();
        all.rotate_left(1);
        for (kept, bytes) in blocks.values_mut().zip(all) {
            kept.bytes = bytes;
        }
    }

    pub(crate) fn lose_everything(&self) {
        self.blocks.lock().unwrap().clear();
    }

    /// Sleeps for the delay, or until the deadline, which is then a timeout.
    fn work(&self, deadline: Deadline) -> Result<(), TierError> {
        self.hung.wait();
        assert!(!self.panics.load(Ordering::Relaxed), "injected");
        let left = deadline.remaining(&cascade_runtime::SystemClock);
        let delay = Duration::from_millis(self.delay_ms.load(Ordering::Relaxed));
        cascade_runtime::sleep(delay.min(left));
        if delay > left { Err(TierError::Timeout) } else { Ok(()) }
    }

    fn broken(&self) -> bool {
        self.fails.load(Ordering::Relaxed)
    }
}

/// The facts of a block with a key and a length, and nothing else.
pub(crate) fn facts_of(key: &BlockKey, length: usize) -> BlockFacts {
    BlockFacts {
        key: *key,
        digest: None,
        parent: None,
        namespace: NamespaceId::default(),
        bytes: u32::try_from(length).unwrap(),
        is_prefix: false,
        written_unix_ms: 0,
        expires_unix_ms: None,
    }
}

fn eio() -> TierError {
    TierError::Failed(Arc::new(std::io::Error::other("injected")))
}

impl Tier for MapStage {
    fn name(&self) -> TierName {
        "map"
    }

    fn store(
        &self,
        batch: Vec<(BlockFacts, Slab)>,
        deadline: Deadline,
    ) -> Vec<Result<Address, TierError>> {
        self.stores_held.wait();
        let worked = self.work(deadline);
        let one_less = |left: u64| left.checked_sub(1);
        let (set, get) = (Ordering::Relaxed, Ordering::Relaxed);
        let fails = self.fails_stores.fetch_update(set, get, one_less).is_ok();
        let mut blocks = self.blocks.lock().unwrap();
        let mut keep = |(facts, slab): (BlockFacts, Slab)| {
            worked.clone()?;
            if fails || self.broken() || self.fails_writes.load(Ordering::Relaxed) {
                return Err(eio());
            }
            if facts.bytes as usize != slab.len() {
                self.wrong_lengths.fetch_add(1, Ordering::Relaxed);
                return Err(eio());
            }
            let capacity = self.capacity_bytes.load(Ordering::Relaxed);
            if Self::used(&blocks) + slab.len() as u64 > capacity {
                return Err(TierError::Full);
            }
            let address = self.next.fetch_add(1, Ordering::Relaxed);
            if self.has_one_block_a_key.load(Ordering::Relaxed) {
                blocks.retain(|_, kept| !kept.names.remove(&facts.key) || !kept.names.is_empty());
            }
            let names = BTreeSet::from([facts.key]);
            blocks.insert(
                address,
                StoredBlock { facts, names, bytes: slab.host().expect("host memory").to_vec() },
            );
            self.stored.fetch_add(1, Ordering::Relaxed);
            Ok(Address(address))
        };
        let mut results: Vec<_> = batch.into_iter().map(&mut keep).collect();
        if self.answers_short.load(Ordering::Relaxed) {
            results.pop();
        }
        results
    }

    fn load(&self, batch: Vec<Load>, deadline: Deadline) -> Vec<LoadOutcome> {
        self.loads.fetch_add(batch.len() as u64, Ordering::Relaxed);
        let worked = self.work(deadline);
        self.loads_held.wait();
        let blocks = self.blocks.lock().unwrap();
        let load_one = |mut load: Load| {
            if let Err(error) = &worked {
                return LoadOutcome::Failed(error.clone());
            }
            if self.broken() || self.fails_reads.load(Ordering::Relaxed) {
                return LoadOutcome::Failed(eio());
            }
            match blocks.get(&load.address.0) {
                Some(kept) if kept.names.contains(&load.key) => {
                    if self.damages.load(Ordering::Relaxed) {
                        return LoadOutcome::Damaged;
                    }
                    load.slab.fill_from(&kept.bytes).unwrap();
                    LoadOutcome::Hit(load.slab)
                }
                _ => LoadOutcome::Gone,
            }
        };
        let mut results: Vec<_> = batch.into_iter().map(load_one).collect();
        drop(blocks);
        self.loaded_held.wait();
        if self.answers_short.load(Ordering::Relaxed) {
            results.pop();
        }
        results
    }

    fn alias(&self, batch: Vec<(BlockFacts, Address)>, _: Deadline) -> Result<(), TierError> {
        self.hung.wait();
        self.names_held.wait();
        cascade_runtime::sleep(Duration::from_millis(self.name_delay_ms.load(Ordering::Relaxed)));
        let mut blocks = self.blocks.lock().unwrap();
        for (facts, address) in batch {
            if let Some(kept) = blocks.get_mut(&address.0) {
                kept.names.insert(facts.key);
            }
        }
        Ok(())
    }

    fn remove(&self, batch: &[(BlockKey, Address)], _: Deadline) -> Result<(), TierError> {
        self.hung.wait();
        self.removes.fetch_add(1, Ordering::Relaxed);
        if self.fails_removes.load(Ordering::Relaxed) {
            return Err(eio());
        }
        let mut blocks = self.blocks.lock().unwrap();
        for (key, address) in batch {
            let Some(kept) = blocks.get_mut(&address.0) else { continue };
            kept.names.remove(key);
            if kept.names.is_empty() {
                blocks.remove(&address.0);
            }
        }
        Ok(())
    }

    fn make_room(
        &self,
        keep: &mut dyn FnMut(&BlockKey, Address) -> bool,
        _deadline: Deadline,
    ) -> Result<MakeRoomOutcome, TierError> {
        self.rooms.fetch_add(1, Ordering::Relaxed);
        if self.gives_nothing_back.load(Ordering::Relaxed) {
            return Ok(MakeRoomOutcome::default());
        }
        let names: Vec<(u64, Vec<BlockKey>)> = {
            let blocks = self.blocks.lock().unwrap();
            let oldest = blocks.iter().take(8);
            oldest.map(|(at, kept)| (*at, kept.names.iter().copied().collect())).collect()
        };
        let asks = !self.drops_unasked.load(Ordering::Relaxed);
        let mut room = MakeRoomOutcome::default();
        for (at, names) in names {
            if asks && names.iter().any(|name| keep(name, Address(at))) {
                continue;
            }
            if let Some(kept) = self.blocks.lock().unwrap().remove(&at) {
                room.freed_bytes += kept.bytes.len() as u64;
                room.dropped.extend(names.into_iter().map(|name| (name, Address(at))));
            }
        }
        self.rooms_held.wait();
        Ok(room)
    }

    fn resize(&self, _capacity_bytes: u64, _deadline: Deadline) -> Result<(), TierError> {
        Ok(())
    }

    fn is_shrinking(&self) -> bool {
        self.gives_nothing_back.load(Ordering::Relaxed)
    }

    fn recover(&self) -> Vec<(BlockFacts, Address)> {
        std::mem::take(&mut self.survivors.lock().unwrap())
    }

    fn flush(&self, _deadline: Deadline) -> Result<(), TierError> {
        self.hung.wait();
        let delay = self.flush_delay_ms.load(Ordering::Relaxed);
        cascade_runtime::sleep(Duration::from_millis(delay));
        if self.fails_flush.swap(false, Ordering::Relaxed) { Err(eio()) } else { Ok(()) }
    }

    fn register(&self, _namespace: &Namespace, _deadline: Deadline) -> Result<(), TierError> {
        if self.fails_to_register.load(Ordering::Relaxed) { Err(eio()) } else { Ok(()) }
    }

    fn erase(&self, _deadline: Deadline) -> Result<EraseOutcome, TierError> {
        if !self.erases.load(Ordering::Relaxed) {
            return Err(TierError::CannotErase);
        }
        self.erase_hung.wait();
        self.blocks.lock().unwrap().clear();
        Ok(EraseOutcome::default())
    }

    fn close(&self) {
        self.hung.wait();
    }

    fn probe(&self, deadline: Deadline) -> Result<(), TierError> {
        self.work(deadline)?;
        let fails_writes = self.fails_writes.load(Ordering::Relaxed);
        if self.broken() || fails_writes || self.answers_short.load(Ordering::Relaxed) {
            Err(eio())
        } else {
            Ok(())
        }
    }

    fn probe_reads(&self, deadline: Deadline) -> Result<(), TierError> {
        self.work(deadline)?;
        let fails = self.broken() || self.fails_reads.load(Ordering::Relaxed);
        if fails { Err(eio()) } else { Ok(()) }
    }

    fn stats(&self) -> TierStats {
        self.hung.wait();
        let used_bytes = Self::used(&self.blocks.lock().unwrap());
        let capacity_bytes = self.capacity_bytes.load(Ordering::Relaxed);
        TierStats { used_bytes, capacity_bytes, ..TierStats::default() }
    }
}
