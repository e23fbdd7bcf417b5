//! What a world is run with, and what it reports.

use std::time::Duration;

use crate::Plant;

use super::entropy::Random;

/// How a world is run.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Decides every choice in the world.
    pub seed: u64,
    /// How the next thread is chosen.
    pub policy: Policy,
    /// Virtual time that a scheduling point takes.
    pub point_time: Duration,
    /// Decisions of the scheduler after which the world is stopped: a livelock.
    pub decisions_max: u64,
    /// A thread that waits for a notification wakes without one at one decision in so many; 0 for
    /// never.
    pub spurious_one_in: u32,
    /// One start of a thread in so many fails; 0 for none.
    pub spawn_fails_one_in: u32,
    /// A bug to plant in the code under test.
    pub plant: Option<Plant>,
    /// Record every so many decisions in [`Report::trace`]; 0 for none. It changes nothing in the
    /// world.
    pub trace_every: u64,
    /// The wall clock at the start.
    pub unix_start_ms: u64,
}

/// How the next thread is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Any runnable thread, each with the same probability.
    Uniform {
        /// Scheduling points between two decisions, in the mean. With 1, every point is one.
        gap_mean: u32,
    },
    /// The runnable thread of the highest priority. Now and then the running thread's priority
    /// drops below all others (PCT; Burckhardt et al., ASPLOS 2010).
    Priorities {
        /// Scheduling points between two drops, in the mean.
        change_gap_mean: u32,
    },
}

/// Why a world ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// The first thread has returned.
    Finished,
    /// The first thread panicked.
    Panicked(String),
    /// No thread can ever run again: who waits for what.
    Deadlock(String),
    /// The limit of decisions was reached: who waits for what and who ran most.
    Livelock(String),
    /// A thread had to wait while it unwound. `std` counts panics per OS thread, so no other
    /// coroutine can run meanwhile.
    WaitWhileUnwinding(String),
}

/// What a world reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Why it ended.
    pub ending: Ending,
    /// A hash of all switches with their times, and of all noted events. Two runs of one seed have
    /// the same.
    pub event_hash: u64,
    /// Scheduling points.
    pub points: u64,
    /// Decisions of the scheduler.
    pub decisions: u64,
    /// Decisions that made another thread run.
    pub switches: u64,
    /// Virtual time at the end.
    pub now: Duration,
    /// Panics of all threads, also of caught ones.
    pub panics: Vec<String>,
    /// Waits without a time limit for a notification or for the end of a thread, by a thread that
    /// held another lock meanwhile.
    pub waits_under_lock: Vec<String>,
    /// Some of the decisions. Where two runs of one seed differ, the first entry that differs shows
    /// when.
    pub trace: Vec<TraceEntry>,
}

/// A decision of the scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceEntry {
    /// Its number.
    pub decision: u64,
    /// Virtual time.
    pub now: Duration,
    /// The number of the thread that runs next.
    pub thread: u32,
    /// The event hash so far.
    pub hash: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            seed: 0,
            policy: Policy::Uniform { gap_mean: 4 },
            point_time: Duration::from_nanos(50),
            decisions_max: 100_000_000,
            spurious_one_in: 0,
            spawn_fails_one_in: 0,
            plant: None,
            trace_every: 0,
            unix_start_ms: 1_800_000_000_000,
        }
    }
}

impl Settings {
    /// Settings with a policy drawn from the seed.
    pub fn from_seed(seed: u64) -> Self {
        let mut random = Random::new(seed, 0);
        let policy = if random.one_in(2) {
            Policy::Uniform { gap_mean: [1, 2, 4, 8][random.index_below(4)] }
        } else {
            Policy::Priorities { change_gap_mean: [20, 200, 2000][random.index_below(3)] }
        };
        Self { seed, policy, ..Self::default() }
    }
}

impl Ending {
    /// Whether the first thread has returned.
    pub fn is_finished(&self) -> bool {
        *self == Self::Finished
    }
}
