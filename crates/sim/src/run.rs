//! Many independent worlds, several at a time. The result depends neither on how many run at a time
//! nor on the processes that run them.

use std::collections::BTreeMap;
use std::io;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use cascade_runtime::simulated::Random;
use cascade_runtime::{Clock, LeafMutex};

use crate::options::{Length, SimOptions};
use crate::report::{Seconds, SimResult, Violation, WorldReport};
use crate::workers::{Processes, Worker};

/// Violations that a result lists.
const LISTED_MAX: usize = 20;

/// Where worlds run.
#[derive(Debug, Clone, Copy)]
pub enum Workers<'a> {
    /// In threads of this process. What killed threads leave behind stays: for some dozen worlds.
    Threads,
    /// In processes that are replaced now and then.
    Processes(&'a Processes),
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

/// The worlds of one simulation.
struct Simulation<'a> {
    options: SimOptions,
    workers: Workers<'a>,
    progress: &'a Progress,
    next: AtomicU64,
    done: LeafMutex<BTreeMap<u64, WorldReport>>,
    clock: &'a dyn Clock,
    began: Duration,
}

/// Runs a simulation to its end.
///
/// # Errors
///
/// If a process cannot be started.
///
/// # Panics
///
/// In a simulated world, and when the system cannot start a thread.
pub fn run(
    options: &SimOptions,
    workers: Workers<'_>,
    progress: &Progress,
    clock: &dyn Clock,
) -> io::Result<SimResult> {
    let simulation = Simulation {
        options: *options,
        workers,
        progress,
        next: AtomicU64::new(options.world.unwrap_or(0)),
        done: LeafMutex::new(BTreeMap::new()),
        clock,
        began: clock.monotonic(),
    };
    let jobs = if options.world.is_some() { 1 } else { options.jobs.max(1) };
    std::thread::scope(|scope| {
        let jobs: Vec<_> = (0..jobs).map(|_| scope.spawn(|| simulation.work())).collect();
        jobs.into_iter()
            .try_for_each(|job| job.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    let took = clock.monotonic().saturating_sub(simulation.began);
    let done = simulation.done.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok(fold(options, &done, took))
}

impl Simulation<'_> {
    /// Runs one world after another.
    fn work(&self) -> io::Result<()> {
        let mut worker = None;
        while !self.progress.is_stopped.load(Ordering::Relaxed) && !self.is_late() {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let report = match self.workers {
                _ if self.options.plan(number).is_none() => break,
                Workers::Threads => self.options.run_world(number),
                Workers::Processes(processes) => {
                    Some(self.run_in_process(processes, &mut worker, number)?)
                }
            };
            let report = report.expect("the simulation has this world");
            self.progress.operations.fetch_add(report.operations, Ordering::Relaxed);
            self.progress.violations.fetch_add(report.violations, Ordering::Relaxed);
            self.done.lock().unwrap_or_else(PoisonError::into_inner).insert(number, report);
        }
        Ok(())
    }

    fn run_in_process(
        &self,
        processes: &Processes,
        worker: &mut Option<Worker>,
        number: u64,
    ) -> io::Result<WorldReport> {
        let report = processes.run_world(worker, number, self.clock);
        if report.is_err() {
            self.progress.is_stopped.store(true, Ordering::Relaxed);
        }
        report
    }

    /// Whether the time is over. One world runs in any time.
    fn is_late(&self) -> bool {
        if self.next.load(Ordering::Relaxed) == self.options.world.unwrap_or(0) {
            return false;
        }
        let passed = self.clock.monotonic().saturating_sub(self.began);
        matches!(self.options.length, Length::Time(time) if passed >= time)
    }
}

/// Puts the results together, in the order of the worlds.
fn fold(options: &SimOptions, done: &BTreeMap<u64, WorldReport>, took: Duration) -> SimResult {
    let mut hash = Random::new(options.seed, 0).next_u64();
    let mut result = SimResult::new(options.seed, options.plant, took);
    for (number, world) in done {
        hash = Random::new(hash, world.event_hash).next_u64();
        result.worlds += 1;
        result.operations += world.operations;
        result.simulated_seconds.0 += Seconds::of(Duration::from_micros(world.time_us)).0;
        result.wrong_bytes += world.wrong_bytes;
        result.violations += world.violations;
        result.late_transfers += world.late_transfers;
        result.differences += u64::from(world.is_different);
        result.reopenings += world.reopenings;
        result.crashes += world.crashes;
        result.recovered_blocks += world.recovered_blocks;
        result.points += world.points;
        result.switches += world.switches;
        for (what, count) in &world.counts {
            *result.counts.entry(what.clone()).or_default() += count;
        }
        let repeat = options.repeat(*number, world.is_different);
        if world.is_different {
            result.repeat_differences.push(repeat.clone());
        }
        let left = LISTED_MAX - result.listed.len();
        result.listed.extend(world.listed.iter().take(left).map(|finding| Violation {
            world: *number,
            time_us: finding.time_us,
            points: finding.points,
            text: finding.text.clone(),
            profile: world.profile.clone(),
            repeat: repeat.clone(),
        }));
    }
    result.event_hash = format!("{hash:016x}");
    result
}
