//! One world of the transport: starts processes, disturbs them, and looks how they end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cascade_runtime::simulated::{Random, Settings, World};
use cascade_runtime::thread::JoinHandle;
use cascade_runtime::{now, sleep};
use cascade_transport::simulated::Network;

use crate::world::{self, WorldPlan, WorldResult};

use super::life::{self, domain};
use super::living::Living;
use super::process::Process;
use super::profile::{Profile, Trouble};
use super::shared::{Phase, Shared, host};

/// As in worlds of a store; some have small windows, in which each decision moves a byte.
const DECISIONS_MAX: u64 = 4 * world::DECISIONS_MAX;
/// Streams of a world's seed. Those of processes follow.
const PROFILE_STREAM: u64 = 90;
const HARNESS_STREAM: u64 = 91;
const NETWORK_STREAM: u64 = 92;
/// Virtual time in which all clients come to their end, once nothing disturbs them. A call has
/// a deadline of an hour.
const CALM_TIME: Duration = Duration::from_secs(4000);
/// Virtual time for the last checks: what is late on the network arrives before.
const CLOSING_TIME: Duration = Duration::from_secs(60);
/// Virtual time in which all threads of processes that have ended have to end.
const END_TIME: Duration = Duration::from_secs(2);
/// Events that disturb a world, at most: each can cost minutes of virtual time.
const EVENTS_MAX: u64 = 40;
/// How often the harness looks whether the clients are at their end.
const LOOK_WAIT: Duration = Duration::from_millis(20);
/// In worlds where threads cannot be started now and then: one in so many.
const SPAWN_FAILS_ONE_IN: u32 = 30;

/// Runs one world to its end.
pub(crate) fn run(plan: WorldPlan) -> WorldResult {
    let profile = Profile::draw(&mut Random::new(plan.seed, PROFILE_STREAM));
    let network = Network::new(Random::new(plan.seed, NETWORK_STREAM));
    network.set_conditions(profile.conditions);
    let shared = Arc::new(Shared::new(profile, network, plan.seed, plan.operations));
    let settings = Settings {
        decisions_max: DECISIONS_MAX,
        plant: plan.plant,
        ..Settings::from_seed(plan.seed)
    };
    let inside = Arc::clone(&shared);
    let report = World::run(settings, move || {
        let random = Random::new(inside.seed, HARNESS_STREAM);
        let world = World::current().expect("the harness runs in the world");
        let living = Living::new(&inside);
        Harness { world, shared: inside, living, random, processes: vec![], starts: 0, events: 0 }
            .live();
    });
    let mut state = shared.state();
    let mut findings = std::mem::take(&mut state.findings);
    world::add_ending(&report, &mut findings);
    let counts = std::mem::take(&mut state.counts);
    let crashes = counts.get("kills").copied().unwrap_or_default();
    WorldResult {
        findings,
        operations: shared.operations(),
        reopenings: 0,
        crashes,
        recovered_blocks: 0,
        late_transfers: 0,
        counts,
        profile: shared.profile.to_string(),
        report,
    }
}

struct Harness {
    world: &'static World,
    shared: Arc<Shared>,
    living: Arc<Living>,
    random: Random,
    processes: Vec<JoinHandle<()>>,
    /// Processes that were started so far.
    starts: u64,
    /// What disturbed the world so far.
    events: u64,
}

impl Harness {
    fn live(mut self) {
        if self.shared.profile.fails_threads {
            self.world.fail_spawns(SPAWN_FAILS_ONE_IN);
        }
        for number in 0..self.shared.profile.processes {
            let process = self.start(number);
            self.processes.push(process);
        }
        while !self.is_over() {
            self.disturb();
        }
        self.world.fail_spawns(0);
        self.shared.network.calm();
        self.enter(Phase::Calm, Process::is_done);
        self.shared.state().phase = Phase::Closing;
        // Each waits until its peers have gone, and looks at its memory.
        for process in std::mem::take(&mut self.processes) {
            self.shared.count("processes");
            drop(process);
        }
        sleep(CLOSING_TIME);
        self.shared.state().phase = Phase::Over;
        sleep(END_TIME);
        for number in 0..self.shared.profile.processes {
            let live = self.world.live_threads(domain(number));
            if live > 0 {
                let threads = self.world.describe_threads();
                self.shared
                    .add(format_args!("{live} threads of process {number} are left:\n{threads}"));
            }
        }
        self.check_notices();
    }

    fn start(&mut self, number: usize) -> JoinHandle<()> {
        self.starts += 1;
        life::start(&self.living, number, self.starts)
    }

    /// Whether all clients have made their operations.
    fn is_over(&self) -> bool {
        let living = self.living.all();
        living.len() == self.shared.profile.processes
            && living.iter().all(|process| process.busy.load(Ordering::Relaxed) == 0)
    }

    fn enter(&self, phase: Phase, is_so: impl Fn(&Process) -> bool) {
        self.shared.state().phase = phase;
        if !self.living.wait_for_all(CALM_TIME, is_so) {
            let threads = self.world.describe_threads();
            self.shared.add(format_args!("clients do not end after {phase:?}:\n{threads}"));
        }
    }

    /// Waits, and then does one thing to the network or to a process.
    fn disturb(&mut self) {
        let trouble = self.shared.profile.trouble;
        let until = now() + self.time(10, 22);
        while now() < until && !self.is_over() {
            sleep(LOOK_WAIT.min(until.saturating_sub(now())));
        }
        if trouble < Trouble::Breaks || self.events == EVENTS_MAX || self.is_over() {
            return;
        }
        self.events += 1;
        let number = self.random.index_below(self.shared.profile.processes);
        let other = self.random.index_below(self.shared.profile.processes);
        let (one, two) = (host(number), host(other));
        let network = self.shared.network.clone();
        match self.random.below(8) {
            0..2 => network.freeze(&one, self.time(4, 24)),
            2..4 if number != other => network.part([&one, &two], self.time(4, 24)),
            4 => network.reset(&one),
            5..7 if trouble >= Trouble::Kills => self.kill(number),
            _ => {}
        }
    }

    /// A time below some power of two of microseconds: short ones are as likely as long ones.
    fn time(&mut self, least: u64, most: u64) -> Duration {
        let below = 1 << (least + self.random.below(most - least + 1));
        Duration::from_micros(1 + self.random.below(below))
    }

    /// Kills a process, and starts another one in its place.
    fn kill(&mut self, number: usize) {
        if self.random.one_in(2) {
            let points = 1 << (2 + self.random.below(12));
            self.world.kill_after(1 + self.random.below(points), domain(number));
            self.world.wait_for_kill(Duration::from_secs(1));
            self.world.cancel_kill();
        }
        self.world.kill(domain(number));
        self.shared.network.kill(&host(number));
        self.shared.count("kills");
        let living = self.living.all();
        if let Some(killed) = living.iter().find(|process| process.number == number) {
            // The clients of the next one are not known yet.
            killed.busy.store(1, Ordering::Relaxed);
        }
        sleep(self.time(4, 20));
        let process = self.start(number);
        self.processes[number] = process;
    }

    /// Each notice of a batch that was confirmed has come, if its target has lived to the end.
    fn check_notices(&self) {
        let living: Vec<_> = self.living.all().iter().map(|it| it.endpoint.id()).collect();
        let mut state = self.shared.state();
        let missing = state.notices.iter().find(|(_, posted)| {
            posted.is_confirmed && !posted.is_seen && living.contains(&posted.to)
        });
        if let Some((batch, _)) = missing {
            let what = format!("batch {batch} was confirmed, and its notice never came");
            state.findings.add(what);
        }
    }
}
