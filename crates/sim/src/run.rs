//! Many independent worlds on several OS threads. The result does not depend on how many.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use cascade_runtime::simulated::Random;
use cascade_runtime::{Clock, Plant};

use crate::report::{Seconds, SimResult, Violation};
use crate::world::{self, WorldPlan, WorldResult};

/// Operations of one world.
pub const WORLD_OPERATIONS: u64 = 20_000;
/// The first stream of a simulation's seed; each world has one.
const WORLD_STREAMS: u64 = 1 << 32;
/// Violations that a result lists.
const LISTED_MAX: usize = 20;

/// What to simulate.
#[derive(Debug, Clone, Copy)]
pub struct SimOptions {
    /// Decides everything.
    pub seed: u64,
    /// When to stop.
    pub length: Length,
    /// Run only this world of the simulation.
    pub world: Option<u64>,
    /// OS threads.
    pub jobs: usize,
    /// Run each world twice and compare.
    pub twice: bool,
    /// A bug to plant.
    pub plant: Option<Plant>,
}

/// When a simulation stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Length {
    /// After so many operations, exactly. The last world is shorter than the others.
    Operations(u64),
    /// When this real time has passed and all worlds that have begun are over.
    Time(Duration),
}

/// How far a simulation is. Another thread may read it, and stop it.
#[derive(Debug, Default)]
pub struct Progress {
    /// Operations of the worlds that are over.
    pub operations: AtomicU64,
    /// Violations in these worlds.
    pub violations: AtomicU64,
    /// Set to begin no more worlds.
    pub is_stopped: AtomicBool,
}

/// What a world contributes to the result.
struct Done {
    result: WorldResult,
    is_different: bool,
}

/// The worlds of one simulation.
struct Simulation<'a> {
    options: SimOptions,
    progress: &'a Progress,
    next: AtomicU64,
    done: Mutex<BTreeMap<u64, Done>>,
    clock: &'a dyn Clock,
    began: Duration,
}

/// Runs a simulation to its end.
///
/// # Panics
///
/// In a simulated world, and when the system cannot start a thread.
pub fn run(options: &SimOptions, progress: &Progress, clock: &dyn Clock) -> SimResult {
    let simulation = Simulation {
        options: *options,
        progress,
        next: AtomicU64::new(options.world.unwrap_or(0)),
        done: Mutex::new(BTreeMap::new()),
        clock,
        began: clock.monotonic(),
    };
    let jobs = if options.world.is_some() { 1 } else { options.jobs.max(1) };
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| simulation.work());
        }
    });
    let took = clock.monotonic().saturating_sub(simulation.began);
    let done = simulation.done.into_inner().unwrap_or_else(PoisonError::into_inner);
    fold(options, &done, took)
}

impl Simulation<'_> {
    /// Runs one world after another.
    fn work(&self) {
        while !self.progress.is_stopped.load(Ordering::Relaxed) && !self.is_late() {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(operations) = self.options.operations_of(number) else { return };
            let plan = WorldPlan {
                seed: world_seed(self.options.seed, number),
                operations,
                plant: self.options.plant,
            };
            let done = self.run_world(plan);
            self.progress.operations.fetch_add(done.result.operations, Ordering::Relaxed);
            self.progress.violations.fetch_add(done.result.findings.count, Ordering::Relaxed);
            self.done.lock().unwrap_or_else(PoisonError::into_inner).insert(number, done);
        }
    }

    fn is_late(&self) -> bool {
        let passed = self.clock.monotonic().saturating_sub(self.began);
        matches!(self.options.length, Length::Time(time) if passed >= time)
    }

    fn run_world(&self, plan: WorldPlan) -> Done {
        let result = world::run(plan);
        if !self.options.twice {
            return Done { result, is_different: false };
        }
        // Other addresses: nothing may depend on them.
        let shift = vec![0_u8; 1 << (plan.seed % 20)];
        let again = world::run(plan);
        drop(shift);
        let is_different =
            again.report != result.report || again.findings.listed != result.findings.listed;
        Done { result, is_different }
    }
}

impl SimOptions {
    /// The length of a world; `None` for a world that the simulation does not have.
    fn operations_of(&self, number: u64) -> Option<u64> {
        let left = match self.length {
            Length::Operations(all) => all.saturating_sub(number * WORLD_OPERATIONS),
            Length::Time(_) => WORLD_OPERATIONS,
        };
        let is_ours = self.world.is_none_or(|world| world == number);
        (left > 0 && is_ours).then_some(left.min(WORLD_OPERATIONS))
    }

    /// The command that runs one world again.
    fn repeat(&self, number: u64) -> String {
        let operations = match self.length {
            Length::Operations(operations) => format!(" --operations {operations}"),
            Length::Time(_) => String::new(),
        };
        let plant = self.plant.map_or_else(String::new, |plant| format!(" --plant {plant}"));
        let seed = self.seed;
        format!("cascade sim --nodes 1 --seed {seed} --world {number}{operations}{plant}")
    }
}

/// The seed of a world.
fn world_seed(seed: u64, number: u64) -> u64 {
    Random::new(seed, WORLD_STREAMS + number).next_u64()
}

/// Puts the results together, in the order of the worlds.
fn fold(options: &SimOptions, done: &BTreeMap<u64, Done>, took: Duration) -> SimResult {
    let mut hash = Random::new(options.seed, 0).next_u64();
    let mut result = SimResult {
        simulated: true,
        seed: options.seed,
        plant: options.plant.map(|plant| plant.name().to_owned()),
        worlds: done.len() as u64,
        operations: 0,
        seconds: seconds(took),
        simulated_seconds: Seconds::default(),
        event_hash: String::new(),
        wrong_bytes: 0,
        violations: 0,
        listed: Vec::new(),
        differences: 0,
        reopenings: 0,
        crashes: 0,
        points: 0,
        switches: 0,
    };
    for (number, Done { result: world, is_different }) in done {
        hash = Random::new(hash, world.report.event_hash).next_u64();
        result.operations += world.operations;
        result.simulated_seconds.0 += seconds(world.report.now).0;
        result.wrong_bytes += world.findings.wrong_bytes;
        result.violations += world.findings.count;
        result.differences += u64::from(*is_different);
        result.reopenings += world.reopenings;
        result.crashes += world.crashes;
        result.points += world.report.points;
        result.switches += world.report.switches;
        let left = LISTED_MAX - result.listed.len();
        result.listed.extend(world.findings.listed.iter().take(left).map(|finding| Violation {
            world: *number,
            time_us: u64::try_from(finding.now.as_micros()).unwrap_or(u64::MAX),
            points: finding.points,
            text: finding.text.clone(),
            profile: world.profile.to_string(),
            repeat: options.repeat(*number),
        }));
    }
    result.event_hash = format!("{hash:016x}");
    result
}

fn seconds(time: Duration) -> Seconds {
    Seconds(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}
