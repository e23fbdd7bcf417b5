//! One world: a real store with its callers on virtual time, and the checks at quiet moments.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cascade_block::with_causes;
use cascade_runtime::simulated::{Domain, Ending, Random, Report, Settings, World};
use cascade_runtime::thread::{JoinHandle, Killed};
use cascade_runtime::{Plant, SystemClock, sleep};
use cascade_store::{CallOptions, HealthState, Store, StoreError, StoreStats, ViewOutcome};

use crate::client::{Client, Shared};
use crate::content::IN_HOST_MEMORY;
use crate::disturber::Disturber;
use crate::finding::Findings;
use crate::model::Model;
use crate::profile::{Profile, Trouble};
use crate::tiers::Devices;

/// The process of the store and its callers.
const PROCESS: Domain = Domain(1);
/// Streams of a world's seed. Those of the clients follow.
const PROFILE_STREAM: u64 = 80;
const HARNESS_STREAM: u64 = 81;
const CLIENT_STREAMS: u64 = 100;
/// Decisions of the scheduler after which a world counts as a livelock.
pub(crate) const DECISIONS_MAX: u64 = 50_000_000;
/// Virtual time in which a store without callers has to come to rest.
const QUIET_TIME: Duration = Duration::from_secs(10);
/// Virtual time in which all threads of a closed store have to end.
const END_TIME: Duration = Duration::from_secs(2);
/// In worlds where threads cannot be started now and then: one in so many.
const SPAWN_FAILS_ONE_IN: u32 = 30;
/// Openings that a disk with faults, or a thread that cannot be started, may fail.
const OPENINGS_MAX: usize = 20;
/// Virtual time between two of them.
const OPENING_INTERVAL: Duration = Duration::from_millis(50);
/// Keys that are read at once at the end. Their views hold memory.
const READ_KEYS: usize = 4;

/// What to run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WorldPlan {
    pub(crate) seed: u64,
    pub(crate) operations: u64,
    pub(crate) plant: Option<Plant>,
}

/// What a world came to.
#[derive(Debug)]
pub(crate) struct WorldResult {
    pub(crate) report: Report,
    pub(crate) findings: Findings,
    pub(crate) operations: u64,
    pub(crate) reopenings: u64,
    pub(crate) crashes: u64,
    /// Blocks that processes found in the memory of those before them.
    pub(crate) recovered_blocks: u64,
    /// Uses of transfers that had not ended at the deadline of their call.
    pub(crate) late_transfers: u64,
    /// How often what came about, by name.
    pub(crate) counts: BTreeMap<String, u64>,
    /// What the world was like.
    pub(crate) profile: String,
}

/// How often the store was opened again, and after what, and how often it used late transfers.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    closed: u64,
    crashed: u64,
    late_transfers: u64,
}

/// Runs one world to its end.
pub(crate) fn run(plan: WorldPlan) -> WorldResult {
    let profile = Profile::draw(&mut Random::new(plan.seed, PROFILE_STREAM));
    let model = Model::new(&profile);
    let shared = Arc::new(Shared::new(profile, plan.seed, model));
    let settings = Settings {
        decisions_max: DECISIONS_MAX,
        plant: plan.plant,
        ..Settings::from_seed(plan.seed)
    };
    let counted = Arc::new(cascade_runtime::LeafMutex::new(Counts::default()));
    let (inside, counting) = (Arc::clone(&shared), Arc::clone(&counted));
    let report = World::run(settings, move || {
        let counts = live(&inside, plan);
        *counting.lock().expect("nothing panics with this lock") = counts;
    });
    let mut findings = std::mem::take(&mut shared.model().findings);
    findings.set_context(None);
    add_ending(&report, &mut findings);
    let counts = *counted.lock().expect("nothing panics with this lock");
    WorldResult {
        findings,
        operations: shared.operations(),
        reopenings: counts.closed + counts.crashed,
        crashes: counts.crashed,
        recovered_blocks: shared.recovered.load(Ordering::Relaxed),
        late_transfers: counts.late_transfers,
        counts: BTreeMap::new(),
        profile: shared.profile.to_string(),
        report,
    }
}

/// What the report of a world says of its end.
pub(crate) fn add_ending(report: &Report, findings: &mut Findings) {
    match &report.ending {
        Ending::Finished => {}
        Ending::Panicked(what) => findings.add(format_args!("the harness panicked: {what}")),
        Ending::Deadlock(what) => findings.add(format_args!("deadlock: {what}")),
        Ending::Livelock(what) => findings.add(format_args!("livelock: {what}")),
        Ending::WaitWhileUnwinding(what) => {
            findings.add(format_args!("a thread waited while it unwound: {what}"));
        }
    }
    for panic in &report.panics {
        findings.add(format_args!("panic: {panic}"));
    }
}

/// The harness of a world: starts processes with a store, and sees how they end.
struct Harness {
    world: &'static World,
    shared: Arc<Shared>,
    devices: Devices,
    random: Random,
    counts: Counts,
}

fn live(shared: &Arc<Shared>, plan: WorldPlan) -> Counts {
    let mut random = Random::new(plan.seed, HARNESS_STREAM);
    let mut harness = Harness {
        world: World::current().expect("the harness runs in the world"),
        shared: Arc::clone(shared),
        devices: Devices::new(&shared.profile, &mut random),
        random,
        counts: Counts::default(),
    };
    let mut session = 0;
    while harness.live_once(session, plan) {
        session += 1;
    }
    for what in harness.devices.violations() {
        shared.model().findings.add(format_args!("the store misused its disk: {what}"));
    }
    harness.counts.late_transfers = harness.devices.count_late_transfers();
    // Killed threads still own the devices: nothing drops them.
    harness.devices.remove_pool();
    harness.counts
}

impl Harness {
    /// Runs one process to its end. Returns whether another one follows.
    fn live_once(&mut self, session: u64, plan: WorldPlan) -> bool {
        let profile = &self.shared.profile;
        let length = match profile.reopens_after {
            Some(mean) => 1 + self.random.below(2 * mean),
            None => plan.operations,
        };
        let end = plan.operations.min(self.shared.operations().saturating_add(length));
        self.shared.operations_end.store(end, Ordering::Relaxed);
        self.devices.trouble(profile, &mut self.random);
        self.shared.is_calm.store(false, Ordering::Relaxed);
        self.world.fail_spawns(if profile.fails_threads { SPAWN_FAILS_ONE_IN } else { 0 });
        let (shared, devices) = (Arc::clone(&self.shared), self.devices.clone());
        let process = Process { shared, devices, session };
        let process = self.world.spawn_in(PROCESS, "process", move || process.live());
        let disturber = Disturber::start(self.world, PROCESS, &self.shared, &mut self.random);
        // The others are killed at a virtual time, or not at all.
        if profile.trouble >= Trouble::Kills && self.random.one_in(3) {
            // Early ones are as likely as late ones: an opening is short.
            let points_max = 1 << (4 + self.random.below(16));
            self.world.kill_after(1 + self.random.below(points_max), PROCESS);
        }
        let mut ended = process.join();
        self.world.cancel_kill();
        if disturber.is_some_and(Disturber::stop) {
            // Also if its first thread had ended: others of its threads had not.
            ended = ended.and(Err(Box::new(Killed)));
        }
        self.shared.model().findings.set_context(None);
        match ended {
            Ok(()) => self.check_threads(),
            Err(payload) if payload.is::<Killed>() => {
                let has_lost_power = profile.trouble >= Trouble::PowerLoss && self.random.one_in(2);
                self.devices.crashed(has_lost_power);
                self.shared.model().crashed(has_lost_power);
                self.counts.crashed += 1;
                // Else the last state would never be looked at.
                return true;
            }
            // The report has the panic.
            Err(_) => return false,
        }
        let is_over = self.shared.operations() >= plan.operations;
        let is_over = is_over || self.shared.model().findings.is_enough();
        self.counts.closed += u64::from(!is_over);
        !is_over
    }

    /// All threads of a store that was closed end.
    fn check_threads(&self) {
        sleep(END_TIME);
        let live = self.world.live_threads(PROCESS);
        if live > 0 {
            let threads = self.world.describe_threads();
            let what = format!(
                "{live} threads are left {END_TIME:?} after the store was closed:\n{threads}"
            );
            self.shared.model().findings.add(what);
            self.world.kill(PROCESS);
        }
    }
}

/// A process that opens the store, serves its clients, and closes it.
struct Process {
    shared: Arc<Shared>,
    devices: Devices,
    session: u64,
}

impl Process {
    fn live(self) {
        let shared = &self.shared;
        let store = match self.open() {
            Ok(store) => store,
            Err(error) => {
                let why = with_causes(&error);
                shared.model().findings.add(format_args!("opening failed: {why}"));
                // No other opening would succeed.
                return shared.operations_end.store(0, Ordering::Relaxed);
            }
        };
        if shared.profile.keeps_pool {
            self.check_recovery(&store);
        }
        let world = Self::world();
        let clients: Vec<JoinHandle<()>> = (0..shared.profile.clients)
            .map(|number| {
                let stream = CLIENT_STREAMS * (self.session + 1) + number as u64;
                let client = Client::new(shared, store.clone(), number, stream);
                world.spawn_in(PROCESS, &format!("client {number}"), move || client.run())
            })
            .collect();
        for client in clients {
            // The report has a panic.
            drop(client.join());
        }
        self.calm();
        shared.model().findings.set_context(None);
        self.rest(&store);
        let closed = store.close();
        if let Err(error) = &closed {
            shared.model().findings.add(format_args!("closing failed: {error}"));
        }
        shared.model().closed(closed.is_ok());
    }

    /// Counts the blocks that were found in memory. A kill tears no record, because threads run
    /// one at a time; but memory that a read may still change is no block's.
    fn check_recovery(&self, store: &Store) {
        let Some(warm) = store.stats().warm else { return };
        self.shared.recovered.fetch_add(warm.recovered_blocks, Ordering::Relaxed);
        if warm.rejected_records > 0 && warm.held_by_earlier == 0 {
            let what = format!("{} records of memory were rejected", warm.rejected_records);
            self.shared.model().findings.add(what);
        }
    }

    fn world() -> &'static World {
        World::current().expect("the process runs in the world")
    }

    /// Opens the store. It may fail while devices do.
    fn open(&self) -> Result<Store, StoreError> {
        let config = self.shared.profile.store_config(self.devices.pool_file());
        let registry = self.devices.registry();
        let open = || Store::open_with(config.clone(), &registry, Arc::new(SystemClock));
        let mut opened = open();
        let mut left = OPENINGS_MAX;
        while opened.is_err() && self.shared.profile.trouble == Trouble::Faults && left > 0 {
            left -= 1;
            if left == 0 {
                self.calm();
            }
            sleep(OPENING_INTERVAL);
            opened = open();
        }
        opened
    }

    /// Ends all that disturbs the process, but for a kill.
    fn calm(&self) {
        self.shared.is_calm.store(true, Ordering::Relaxed);
        Self::world().fail_spawns(0);
        self.devices.calm();
    }

    /// Without callers the store comes to rest. Then its figures have to add up, and it still has
    /// what it must have.
    fn rest(&self, store: &Store) {
        let shared = &self.shared;
        // Two flushes report the failures of before: one that a tier fails leaves the failed writes
        // of blocks to the next.
        if shared.profile.trouble == Trouble::Faults && store.flush(CallOptions::default()).is_err()
        {
            drop(store.flush(CallOptions::default()));
        }
        let begin = shared.model().begin();
        match store.flush(CallOptions::default()) {
            Ok(()) => shared.model().flushed(begin),
            Err(error) => {
                let why = with_causes(&error);
                shared.model().findings.add(format_args!("the last flush failed: {why}"));
            }
        }
        shared.model().end(begin);
        sleep(QUIET_TIME);
        for what in contradictions(&store.stats(), shared.profile.trouble) {
            shared.model().findings.add(format_args!("at rest: {what}"));
        }
        let keys: Vec<u32> = (0..shared.profile.key_count).collect();
        for keys in keys.chunks(READ_KEYS) {
            let begin = shared.model().begin();
            let views = store.view(&shared.block_keys(keys), CallOptions::default());
            let mut model = shared.model();
            for (key, view) in keys.iter().zip(views) {
                match view {
                    ViewOutcome::Hit { slab, .. } => {
                        model.hit(begin, *key, slab.host().expect(IN_HOST_MEMORY));
                    }
                    ViewOutcome::Miss => {
                        model.miss(begin, *key, "the last read");
                    }
                    ViewOutcome::Failed(error) => {
                        let what = format!("key {key}: the last read failed: {error}");
                        model.findings.add(what);
                    }
                }
            }
            model.end(begin);
        }
    }
}

/// What does not add up in the figures of a store that nobody uses.
fn contradictions(stats: &StoreStats, trouble: Trouble) -> Vec<String> {
    let mut found = Vec::new();
    let mut check = |is_right: bool, what: String| {
        if !is_right {
            found.push(what);
        }
    };
    let counters = &stats.counters;
    check(
        counters.gets == counters.hits + counters.misses + counters.get_failures,
        format!(
            "{} gets are not {} hits, {} misses and {} failures",
            counters.gets, counters.hits, counters.misses, counters.get_failures
        ),
    );
    let outcomes = counters.stored
        + counters.deduplicated
        + counters.present
        + counters.conflicts
        + counters.declined
        + counters.put_failures;
    check(counters.puts == outcomes, format!("{} puts, {outcomes} outcomes", counters.puts));
    let hits: u64 = stats.hits_by_tier.iter().map(|tier| tier.blocks).sum();
    check(counters.hits == hits, format!("{} hits, {hits} in the tiers", counters.hits));
    check(
        counters.damaged_blocks == 0 || trouble >= Trouble::Kills,
        format!("{} blocks were damaged", counters.damaged_blocks),
    );
    let pool = &stats.pool;
    check(
        pool.reserved_bytes + pool.magazine_bytes + pool.free_bytes == pool.capacity_bytes,
        format!(
            "{} reserved, {} cached and {} free bytes are not {}",
            pool.reserved_bytes, pool.magazine_bytes, pool.free_bytes, pool.capacity_bytes
        ),
    );
    // Memory into which the kernel may still read for an earlier process is no block's.
    let held = stats.warm.as_ref().map_or(0, |warm| warm.held_by_earlier);
    let slabs = pool.requested_bytes as u64;
    check(
        slabs == stats.dram_bytes || (held > 0 && slabs > stats.dram_bytes),
        format!("slabs have {slabs} bytes, resident blocks {}, {held} held", stats.dram_bytes),
    );
    check(stats.pending_bytes == 0, format!("{} bytes are pending", stats.pending_bytes));
    for (tier, health) in &stats.health {
        let state = health.state;
        check(
            state == HealthState::Healthy && health.stuck_calls == 0,
            format!("tier {tier} is {state:?} with {} stuck calls", health.stuck_calls),
        );
    }
    found
}
