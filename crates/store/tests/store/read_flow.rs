//! Reads of a stage that takes blocks from a queue: it completes them in any order, reports some
//! twice or never, fails, panics, and stops at its deadline.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_memory::Slab;
use cascade_runtime::{Clock, Deadline, SystemClock};
use cascade_store::stages::StageRegistry;
use cascade_store::{
    CallOptions, GetOutcome, HealthConfig, Store, StoreConfig, StoreError, TierName, ViewOutcome,
};
use cascade_tier::tier::{
    Address, BlockFacts, Load, LoadOutcome, LoadQueue, MakeRoomOutcome, Tier, TierError, TierStats,
};

use crate::blocks::{self, bytes_of, check, dram, keys, put};
use crate::late_clock::LateClock;
use crate::third_party::{MapStage, flush};

const BLOCK: usize = 64 << 10;
const TIMEOUT: Duration = Duration::from_secs(30);

/// What a stage does with a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    Gone,
    Damaged,
    Fails,
    Twice,
    Never,
}

/// How the stage loads.
#[derive(Debug, Default)]
struct Behaviour {
    /// State of the generator that chooses the order of completions, and the faults.
    seed: u64,
    has_faults: bool,
    /// Panics after this many completions.
    panics_after: Option<u64>,
    /// Advances the clock by the timeout of the calls after this many completions, and stops.
    stops_after: Option<u64>,
    in_flight_max: usize,
    /// Keys whose blocks it delivered since the last look.
    delivered: BTreeSet<BlockKey>,
    /// Most bytes in flight at once.
    most_bytes: usize,
    /// Calls that took at least one block.
    calls: u64,
    /// Pieces of other work that the store did while blocks were in flight.
    idle_work: u64,
    /// When another call takes the lock of this store, until the deadline of the call has passed.
    loses_lock: Option<(Arc<Store>, LosesLock)>,
}

/// What the stage is about to do when the call loses the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LosesLock {
    /// It takes a block, after this many.
    AtTake(usize),
    /// It lets the store do other work, after this many pieces.
    AtIdle(u64),
}

impl Behaviour {
    fn random(&mut self, below: u64) -> u64 {
        // The generator SplitMix64.
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.seed;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % below
    }

    fn fault(&mut self) -> Fault {
        if !self.has_faults {
            return Fault::None;
        }
        match self.random(20) {
            0 => Fault::Gone,
            1 => Fault::Damaged,
            2 => Fault::Fails,
            3 => Fault::Twice,
            4 => Fault::Never,
            _ => Fault::None,
        }
    }
}

/// A map stage that loads from a queue, in the thread of the caller.
#[derive(Debug)]
struct QueueStage {
    map: Arc<MapStage>,
    clock: Arc<LateClock>,
    behaviour: Mutex<Behaviour>,
}

impl QueueStage {
    fn set(&self, change: impl FnOnce(&mut Behaviour)) {
        change(&mut self.behaviour.lock().expect("no test panics with this lock"));
    }

    fn get<T>(&self, read: impl FnOnce(&Behaviour) -> T) -> T {
        read(&self.behaviour.lock().expect("no test panics with this lock"))
    }

    /// Does one call of the queue, without the lock of the store if the test wants that.
    fn without_lock<T>(&self, now: LosesLock, call: impl FnOnce() -> T) -> T {
        let mut lost = None;
        self.set(|behaviour| lost = behaviour.loses_lock.take_if(|(_, when)| *when == now));
        let Some((store, _)) = lost else { return call() };
        let holder = self.clock.hold_lock(&store);
        match now {
            // The call looks at the clock before it waits for the lock.
            LosesLock::AtTake(_) => self.clock.advance_after_reading(TIMEOUT),
            LosesLock::AtIdle(_) => self.clock.advance(TIMEOUT),
        }
        let result = call();
        self.clock.release_lock();
        holder.join().expect("the other call ends");
        result
    }

    /// Loads one block, without holding the lock: the queue calls the store.
    fn finish(&self, queue: &mut dyn LoadQueue, number: usize, load: Load) {
        let (key, mut fault) = (load.key, Fault::None);
        self.set(|behaviour| fault = behaviour.fault());
        let outcome = match fault {
            Fault::None | Fault::Twice => {
                let deadline = Deadline::after(&SystemClock, TIMEOUT);
                self.map.load(vec![load], deadline).pop().expect("one outcome for one block")
            }
            Fault::Gone => LoadOutcome::Gone,
            Fault::Damaged => LoadOutcome::Damaged,
            Fault::Fails => {
                LoadOutcome::Failed(TierError::Failed(Arc::new(std::io::Error::other("injected"))))
            }
            Fault::Never => return,
        };
        if matches!(outcome, LoadOutcome::Hit(_)) {
            self.set(|behaviour| {
                behaviour.delivered.insert(key);
            });
        }
        queue.ended(number, outcome);
        if fault == Fault::Twice {
            queue.ended(number, LoadOutcome::Gone);
            queue.ended(usize::MAX, LoadOutcome::Gone);
        }
    }
}

impl Tier for QueueStage {
    fn name(&self) -> TierName {
        "queue"
    }

    fn keeps_deadlines(&self) -> bool {
        true
    }

    fn store(
        &self,
        batch: Vec<(BlockFacts, Slab)>,
        deadline: Deadline,
    ) -> Vec<Result<Address, TierError>> {
        self.map.store(batch, deadline)
    }

    fn load(&self, batch: Vec<Load>, deadline: Deadline) -> Vec<LoadOutcome> {
        self.map.load(batch, deadline)
    }

    fn load_each(&self, queue: &mut dyn LoadQueue, deadline: Deadline) {
        let mut in_flight: Vec<(usize, Load)> = Vec::new();
        let in_flight_max = self.get(|behaviour| behaviour.in_flight_max);
        let (mut ended, mut is_new_call) = (0, true);
        loop {
            while in_flight.len() < in_flight_max
                && !deadline.has_passed(&*self.clock)
                && let Some((number, load)) =
                    self.without_lock(LosesLock::AtTake(in_flight.len()), || queue.next_load())
            {
                assert!(in_flight.iter().all(|(other, _)| *other != number), "{number} twice");
                in_flight.push((number, load));
            }
            if in_flight.is_empty() {
                return;
            }
            let idle_work = || LosesLock::AtIdle(self.get(|behaviour| behaviour.idle_work));
            while self.without_lock(idle_work(), || queue.idle()) {
                self.set(|behaviour| behaviour.idle_work += 1);
            }
            let bytes = in_flight.iter().map(|(_, load)| load.slab.len()).sum();
            let (mut at, mut panics, mut stops) = (0, false, false);
            self.set(|behaviour| {
                behaviour.calls += u64::from(std::mem::take(&mut is_new_call));
                behaviour.most_bytes = behaviour.most_bytes.max(bytes);
                at = usize::try_from(behaviour.random(in_flight.len() as u64)).expect("small");
                panics = behaviour.panics_after == Some(ended);
                stops = behaviour.stops_after == Some(ended);
            });
            assert!(!panics, "injected");
            if stops {
                self.clock.advance(TIMEOUT);
                for (number, _) in in_flight {
                    queue.ended(number, LoadOutcome::Failed(TierError::Timeout));
                }
                return;
            }
            let (number, load) = in_flight.swap_remove(at);
            self.finish(queue, number, load);
            ended += 1;
        }
    }

    fn alias(&self, batch: Vec<(BlockFacts, Address)>, at: Deadline) -> Result<(), TierError> {
        self.map.alias(batch, at)
    }

    fn remove(&self, batch: &[(BlockKey, Address)], at: Deadline) -> Result<(), TierError> {
        self.map.remove(batch, at)
    }

    fn make_room(
        &self,
        keep: &mut dyn FnMut(&BlockKey, Address) -> bool,
        deadline: Deadline,
    ) -> Result<MakeRoomOutcome, TierError> {
        self.map.make_room(keep, deadline)
    }

    fn recover(&self) -> Vec<(BlockFacts, Address)> {
        self.map.recover()
    }

    fn flush(&self, deadline: Deadline) -> Result<(), TierError> {
        self.map.flush(deadline)
    }

    fn stats(&self) -> TierStats {
        self.map.stats()
    }
}

/// A store over 4 MiB of DRAM and a stage with all of these blocks.
fn open(keys: &[BlockKey], in_flight_max: usize) -> (Store, Arc<QueueStage>) {
    let clock = Arc::new(LateClock::default());
    let behaviour = Mutex::new(Behaviour { in_flight_max, ..Behaviour::default() });
    let stage = QueueStage { map: MapStage::new(), clock: Arc::clone(&clock), behaviour };
    let stage = Arc::new(stage);
    let mut registry = StageRegistry::default();
    let registered = Arc::clone(&stage);
    registry.register("Queue", Arc::new(move |_| Ok(registered.clone())));
    // No circuit opens in these tests: each failure belongs to its block.
    let health = HealthConfig { window: 64, threshold: 64, ..HealthConfig::default() };
    let config =
        StoreConfig { pipeline: "Dram|Queue".to_owned(), timeout: TIMEOUT, health, ..dram(4) };
    let store = Store::open_with(config, &registry, clock).expect("the configuration is valid");
    for some in keys.chunks(16) {
        put(&store, some, BLOCK);
        flush(&store);
    }
    (store, stage)
}

/// Gets blocks into buffers that are longer than they are. Checks that a buffer has the block after
/// a hit, and is unchanged otherwise.
fn get(store: &Store, keys: &[BlockKey]) -> Vec<GetOutcome> {
    const REST: usize = 16;
    let mut buffers = vec![vec![0xee; BLOCK + REST]; keys.len()];
    let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
    let outcomes = store.get(keys, &mut slices, CallOptions::default());
    for ((key, outcome), buffer) in keys.iter().zip(&outcomes).zip(&buffers) {
        let bytes = if let GetOutcome::Hit { bytes, .. } = outcome { *bytes } else { 0 };
        assert!(bytes == 0 || buffer[..bytes] == *bytes_of(key, BLOCK), "wrong bytes of {key}");
        assert!(buffer[bytes..].iter().all(|byte| *byte == 0xee), "{key}: {outcome:?}");
    }
    outcomes
}

#[test]
fn each_block_has_the_outcome_that_the_stage_gave_whatever_the_order_and_the_faults() {
    let keys = keys(0..192);
    let mut outcomes_seen: HashMap<&str, u64> = HashMap::new();
    for seed in 0..24 {
        let (store, stage) = open(&keys, 1 + usize::try_from(seed % 9).expect("small"));
        stage.set(|behaviour| (behaviour.seed, behaviour.has_faults) = (seed, true));
        for part in [&keys[..], &keys[64..], &keys[185..]] {
            stage.set(|behaviour| behaviour.delivered.clear());
            let outcomes = get(&store, part);
            let delivered = stage.get(|behaviour| behaviour.delivered.clone());
            for (key, outcome) in part.iter().zip(outcomes) {
                let kind = match outcome {
                    GetOutcome::Hit { tier, .. } => {
                        assert_eq!(tier == "queue", delivered.contains(key), "{key} from {tier}");
                        tier
                    }
                    GetOutcome::Miss => "miss",
                    GetOutcome::Failed(_) => "failed",
                    GetOutcome::TooShort { .. } => panic!("the buffers are long enough"),
                };
                assert!(["queue", "dram"].contains(&kind) || !delivered.contains(key), "{key}");
                *outcomes_seen.entry(kind).or_default() += 1;
            }
        }
        stage.set(|behaviour| behaviour.has_faults = false);
        // No block is marked as loading for ever, and all memory is free again.
        check(&store, &keys);
        let most_bytes = stage.get(|behaviour| behaviour.most_bytes);
        assert!(most_bytes <= (4 << 20) / 8, "{most_bytes} bytes in flight");
    }
    for kind in ["queue", "dram", "miss", "failed"] {
        assert!(outcomes_seen.contains_key(kind), "no block was {kind}: {outcomes_seen:?}");
    }
}

#[test]
fn one_call_of_the_stage_reads_more_than_the_call_may_hold_at_once() {
    let keys = keys(0..192);
    let (store, stage) = open(&keys, 4);
    let outcomes = get(&store, &keys);
    assert!(outcomes.iter().all(|outcome| matches!(outcome, GetOutcome::Hit { .. })));
    // 12 MiB through 512 KiB of slabs, without a pause between two calls.
    assert_eq!(stage.get(|behaviour| behaviour.calls), 1);
}

/// They were copied first if they came first in the batch, and the stage had nothing to do.
#[test]
fn blocks_in_dram_are_copied_while_the_stage_loads_others_of_the_batch() {
    let keys = keys(0..192);
    let (store, stage) = open(&keys, 4);
    // DRAM has these 1.5 MiB now. A call may hold 512 KiB of them at once.
    get(&store, &keys[..24]);
    stage.set(|behaviour| (behaviour.calls, behaviour.idle_work) = (0, 0));
    let outcomes = get(&store, &keys[..96]);
    let tiers: Vec<&str> = outcomes
        .iter()
        .map(|outcome| match outcome {
            GetOutcome::Hit { tier, .. } => *tier,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(tiers[..24], ["dram"; 24]);
    assert!(tiers.contains(&"queue"));
    // Three rounds of at most 512 KiB, and two lookups between them.
    assert!(stage.get(|behaviour| behaviour.idle_work) >= 5);
    assert_eq!(stage.get(|behaviour| behaviour.calls), 1);
}

#[test]
fn a_deadline_at_any_completion_fails_exactly_the_blocks_that_have_not_ended() {
    let keys = keys(0..96);
    let (store, stage) = open(&keys, 4);
    let filler = blocks::keys(1000..1064);
    for stops_after in 0..40 {
        // Blocks that nothing else reads replace all others in DRAM.
        put(&store, &filler, BLOCK);
        flush(&store);
        stage.set(|behaviour| {
            behaviour.stops_after = Some(stops_after);
            behaviour.delivered.clear();
        });
        let before = stage.clock.monotonic();
        let outcomes = get(&store, &keys);
        let passed = stage.clock.monotonic().saturating_sub(before);
        assert_eq!(passed, TIMEOUT, "the stage stopped once");
        let delivered = stage.get(|behaviour| behaviour.delivered.clone());
        assert_eq!(delivered.len() as u64, stops_after);
        for (key, outcome) in keys.iter().zip(outcomes) {
            let is_right = match outcome {
                GetOutcome::Hit { tier: "queue", .. } => delivered.contains(key),
                GetOutcome::Hit { .. } => true,
                GetOutcome::Failed(StoreError::Timeout { .. }) => !delivered.contains(key),
                _ => false,
            };
            assert!(is_right, "{key} after {stops_after}: {outcome:?}");
        }
        stage.set(|behaviour| behaviour.stops_after = None);
        let found = check(&store, &keys);
        assert!(found.iter().all(Option::is_some), "a block is lost after {stops_after}");
    }
}

/// Makes a call that loses the lock. Fails if it does not end.
fn call_without_lock<T: Send + 'static>(
    store: Store,
    stage: &QueueStage,
    when: LosesLock,
    call: impl FnOnce(&Store) -> T + Send + 'static,
) -> (Store, T) {
    let store = Arc::new(store);
    stage.set(|behaviour| {
        behaviour.idle_work = 0;
        behaviour.delivered.clear();
        behaviour.loses_lock = Some((Arc::clone(&store), when));
    });
    let (ended, is_ended) = mpsc::channel();
    let caller = std::thread::spawn(move || {
        let result = call(&store);
        ended.send(()).expect("the test waits");
        (store, result)
    });
    let was_in_time = is_ended.recv_timeout(Duration::from_secs(60)).is_ok();
    // Without this, a call without a deadline would keep this test for ever.
    stage.clock.release_lock();
    let (store, result) = caller.join().expect("the call does not panic");
    assert!(was_in_time, "the call waited for the lock beyond its deadline");
    assert!(stage.get(|behaviour| behaviour.loses_lock.is_none()), "the call had the lock");
    (Arc::into_inner(store).expect("no other thread has it"), result)
}

/// A batch of two pieces. The first has two blocks to load, both blocks end; the lock for the
/// second one does not come in time.
fn two_pieces(stored: &[BlockKey]) -> Vec<BlockKey> {
    stored[..2].iter().copied().chain(keys(5000..5126)).chain(stored[2..46].to_vec()).collect()
}

fn is_late(error: &StoreError) -> bool {
    let operation = "read all blocks of a batch";
    matches!(error, StoreError::Timeout { operation: of, timeout_ms: 30_000 } if *of == operation)
}

#[test]
fn a_get_that_does_not_get_the_lock_in_time_fails_the_blocks_not_looked_up() {
    let stored = keys(0..192);
    let (store, stage) = open(&stored, 4);
    let batch = two_pieces(&stored);
    let call = move |store: &Store| get(store, &batch);
    let (store, outcomes) = call_without_lock(store, &stage, LosesLock::AtTake(2), call);
    let is_hit = |one: &GetOutcome| matches!(one, GetOutcome::Hit { tier: "queue", .. });
    assert!(outcomes[..2].iter().all(is_hit), "{outcomes:?}");
    assert!(outcomes[2..128].iter().all(|one| matches!(one, GetOutcome::Miss)));
    let is_late = |one: &GetOutcome| matches!(one, GetOutcome::Failed(error) if is_late(error));
    assert_eq!(outcomes.len(), 172);
    assert!(outcomes[128..].iter().all(is_late), "{:?}", &outcomes[128..]);
    assert!(check(&store, &stored).iter().all(Option::is_some), "a block is lost");
}

#[test]
fn a_view_that_does_not_get_the_lock_in_time_fails_the_blocks_not_looked_up() {
    let stored = keys(0..192);
    let (store, stage) = open(&stored, 4);
    let (first, batch) = (stored[..2].to_vec(), two_pieces(&stored));
    let call = move |store: &Store| store.view(&batch, CallOptions::default());
    let (store, views) = call_without_lock(store, &stage, LosesLock::AtTake(2), call);
    for (view, key) in views.iter().zip(&first) {
        let is_right = |slab: &Slab| slab.host() == Some(&bytes_of(key, BLOCK)[..]);
        assert!(matches!(view, ViewOutcome::Hit { slab, tier: "queue" } if is_right(slab)));
    }
    assert!(views[2..128].iter().all(|one| matches!(one, ViewOutcome::Miss)));
    let is_late = |one: &ViewOutcome| matches!(one, ViewOutcome::Failed(error) if is_late(error));
    assert_eq!(views.len(), 172);
    assert!(views[128..].iter().all(is_late), "{:?}", &views[128..]);
    drop(views);
    assert!(check(&store, &stored).iter().all(Option::is_some), "a block is lost");
}

#[test]
fn a_get_that_does_not_get_the_lock_in_time_copies_no_more_blocks_from_dram() {
    let stored = keys(0..192);
    let (store, stage) = open(&stored, 4);
    // DRAM has these 1.5 MiB now. A call may hold 512 KiB of them at once.
    get(&store, &stored[..24]);
    let batch = stored[..40].to_vec();
    let call = move |store: &Store| get(store, &batch);
    // The first piece of work is the copy of 512 KiB, the second one looks up more.
    let (store, outcomes) = call_without_lock(store, &stage, LosesLock::AtIdle(1), call);
    let is_dram = |one: &GetOutcome| matches!(one, GetOutcome::Hit { tier: "dram", .. });
    assert!(outcomes[..8].iter().all(is_dram), "{outcomes:?}");
    let is_late = |one: &GetOutcome| matches!(one, GetOutcome::Failed(error) if is_late(error));
    assert!(outcomes[8..24].iter().all(is_late), "{outcomes:?}");
    let delivered = stage.get(|behaviour| behaviour.delivered.clone());
    assert_eq!(delivered.len(), 4, "those in flight");
    for (key, outcome) in stored[24..40].iter().zip(&outcomes[24..]) {
        match outcome {
            GetOutcome::Hit { tier: "queue", .. } => assert!(delivered.contains(key)),
            GetOutcome::Failed(StoreError::Timeout { .. }) => assert!(!delivered.contains(key)),
            other => panic!("{key}: {other:?}"),
        }
    }
    assert!(check(&store, &stored).iter().all(Option::is_some), "a block is lost");
}

#[test]
fn a_panic_of_the_stage_at_any_completion_fails_only_the_blocks_that_it_had() {
    let keys = keys(0..192);
    for panics_after in [0, 1, 7, 30, 60] {
        let (store, stage) = open(&keys, 4);
        stage.set(|behaviour| behaviour.panics_after = Some(panics_after));
        let outcomes = get(&store, &keys);
        let is_hit = |outcome: &&GetOutcome| matches!(outcome, GetOutcome::Hit { .. });
        let hits = outcomes.iter().filter(is_hit).count() as u64;
        assert!(hits >= panics_after, "{hits} after {panics_after}");
        assert!(outcomes.iter().any(|outcome| matches!(outcome, GetOutcome::Failed(_))));
        stage.set(|behaviour| behaviour.panics_after = None);
        assert!(check(&store, &keys).iter().all(Option::is_some));
    }
}

#[test]
fn two_callers_of_the_same_blocks_both_get_all_of_them() {
    let keys = keys(0..96);
    let (store, stage) = open(&keys, 3);
    let reversed: Vec<BlockKey> = keys.iter().rev().copied().collect();
    std::thread::scope(|scope| {
        for order in [&keys, &reversed, &keys, &reversed] {
            let store = &store;
            scope.spawn(move || {
                for _ in 0..8 {
                    let outcomes = get(store, order);
                    assert!(outcomes.iter().all(|one| matches!(one, GetOutcome::Hit { .. })));
                }
            });
        }
    });
    assert!(stage.map.loads.load(Relaxed) > 0);
}

#[test]
fn a_batch_may_name_a_block_twice() {
    let keys = keys(0..96);
    let (store, _stage) = open(&keys, 3);
    let twice: Vec<BlockKey> = keys.iter().chain(&keys).copied().collect();
    let outcomes = get(&store, &twice);
    assert!(outcomes.iter().all(|outcome| matches!(outcome, GetOutcome::Hit { .. })));
}

#[test]
fn a_short_buffer_is_left_alone_and_its_block_is_kept() {
    let keys = keys(0..96);
    let (store, _stage) = open(&keys, 3);
    let mut short = vec![0xee; BLOCK - 1];
    let outcomes = store.get(&keys[..1], &mut [&mut short], CallOptions::default());
    assert!(matches!(outcomes[..], [GetOutcome::TooShort { needed_bytes: BLOCK }]));
    assert!(short.iter().all(|byte| *byte == 0xee));
    assert_eq!(check(&store, &keys[..1]), [Some("dram")]);
}

#[test]
fn views_of_a_batch_larger_than_dram_fail_only_for_lack_of_room() {
    let keys = keys(0..192);
    let (store, _stage) = open(&keys, 5);
    let views = store.view(&keys, CallOptions::default());
    let hits = views.iter().filter(|view| matches!(view, ViewOutcome::Hit { .. })).count();
    assert!(hits >= 32, "{hits} of the 64 that fit");
    for (key, view) in keys.iter().zip(&views) {
        match view {
            ViewOutcome::Hit { slab, .. } => {
                assert!(slab.host() == Some(&bytes_of(key, BLOCK)[..]));
            }
            ViewOutcome::Failed(StoreError::NoRoom { .. }) => {}
            other => panic!("{key}: {other:?}"),
        }
    }
    drop(views);
    assert!(check(&store, &keys).iter().all(Option::is_some));
}
