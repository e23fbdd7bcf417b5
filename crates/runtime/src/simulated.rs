//! Simulated worlds: the threads of a program as coroutines, one at a time, chosen by a seed, on
//! virtual time.
//!
//! A world runs on one OS thread of its own, which runs nothing else. The same seed gives the same
//! run, and [`Report::event_hash`] shows it. Threads switch only at scheduling points: the calls of
//! this crate. Code that waits by other means (channels, atomics polled without
//! [`yield_now`](crate::yield_now), locks of `std`) hangs the world.

mod coroutine;
mod crash;
mod describe;
mod domain;
mod entropy;
mod locks;
mod panics;
mod schedule;
mod scheduler;
mod settings;
mod threads;
mod timers;
mod wait;
mod waiting;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::Plant;

use entropy::EventHash;
use schedule::Schedule;
use threads::Thread;
use timers::Timers;
use waiting::Waiting;

pub use domain::Domain;
pub use entropy::Random;
pub use settings::{Ending, Policy, Report, Settings, TraceEntry};

pub(crate) use locks::Attempt;
pub(crate) use wait::LockKind;

/// On a cache line that nothing else writes.
#[repr(align(128))]
struct Flag(AtomicBool);

/// Set by the first world of the process and never cleared.
static ANY_WORLD: Flag = Flag(AtomicBool::new(false));

thread_local! {
    static WORLD: Cell<Option<&'static World>> = const { Cell::new(None) };
}

/// The world of this OS thread.
#[inline]
pub(crate) fn current() -> Option<&'static World> {
    // Relaxed: a thread that is in a world has set the flag itself.
    if ANY_WORLD.0.load(Ordering::Relaxed) { current_of_thread() } else { None }
}

#[cold]
fn current_of_thread() -> Option<&'static World> {
    WORLD.get()
}

/// A simulated world, seen from one of its threads.
///
/// Worlds are leaked, because the stacks of killed threads refer to them for ever. What a world
/// owns is freed at its end; less than a KiB remains.
pub struct World {
    settings: Settings,
    now_ns: Cell<u64>,
    /// From this time on a scheduling point asks the scheduler: that of the next timer, or zero to
    /// force it.
    slow_from_ns: Cell<u64>,
    /// Points until the scheduler is asked, and how many there were when it was asked last.
    points_left: Cell<u64>,
    granted: Cell<u64>,
    /// Points before the last decision.
    points: Cell<u64>,
    decisions: Cell<u64>,
    switches: Cell<u64>,
    hash: Cell<EventHash>,
    wall_shift_ms: Cell<i64>,
    spawn_fails_one_in: Cell<u32>,
    current: Cell<u32>,
    chosen: Cell<Option<u32>>,
    armed_crash: Cell<Option<(u64, Domain)>>,
    ending: RefCell<Option<Ending>>,
    threads: RefCell<Vec<Thread>>,
    runnable: RefCell<Vec<u32>>,
    waiting: RefCell<Waiting>,
    timers: RefCell<Timers>,
    schedule: RefCell<Schedule>,
    /// What the code under test takes as randomness of the system.
    entropy: RefCell<Random>,
    /// Spurious wake-ups and failures to start a thread.
    faults: RefCell<Random>,
    panics: RefCell<Vec<String>>,
    waits_under_lock: RefCell<Vec<String>>,
    trace: RefCell<Vec<TraceEntry>>,
}

impl World {
    /// Runs `body` as the first thread of a new world, to its end or to a verdict.
    ///
    /// Threads that have not ended by then are forgotten, as after a crash: their destructors do
    /// not run.
    ///
    /// # Panics
    ///
    /// In a world, and when the system cannot start an OS thread.
    pub fn run(settings: Settings, body: impl FnOnce() + Send + 'static) -> Report {
        assert!(current().is_none(), "a world does not run in a world");
        panics::install_hook();
        ANY_WORLD.0.store(true, Ordering::Relaxed);
        // A thread of its own: a thread that is forgotten while it panics leaves `std`'s count of
        // panics of the OS thread wrong, and thread-locals must not come from an earlier world.
        let world_thread = std::thread::Builder::new()
            .name("cascade-world".to_owned())
            .spawn(move || {
                coroutine::ignore_leaks();
                let world: &'static Self = Box::leak(Box::new(Self::new(settings)));
                WORLD.set(Some(world));
                world.start_thread("main".to_owned(), Domain::HARNESS, Box::new(body));
                let ending = world.drive();
                WORLD.set(None);
                world.end(ending)
            })
            .expect("the system can start a thread for the world");
        world_thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// The world of the calling thread.
    pub fn current() -> Option<&'static Self> {
        current()
    }

    fn new(settings: Settings) -> Self {
        // One stream for each use, so that one more draw for one does not shift the others.
        let stream = |number| Random::new(settings.seed, number);
        Self {
            now_ns: Cell::new(0),
            slow_from_ns: Cell::new(0),
            points_left: Cell::new(1),
            granted: Cell::new(1),
            points: Cell::new(0),
            decisions: Cell::new(0),
            switches: Cell::new(0),
            hash: Cell::new(EventHash::new(settings.seed)),
            wall_shift_ms: Cell::new(0),
            spawn_fails_one_in: Cell::new(settings.spawn_fails_one_in),
            current: Cell::new(0),
            chosen: Cell::new(None),
            armed_crash: Cell::new(None),
            ending: RefCell::new(None),
            threads: RefCell::default(),
            runnable: RefCell::default(),
            waiting: RefCell::default(),
            timers: RefCell::default(),
            schedule: RefCell::new(Schedule::new(settings.policy, stream(1))),
            entropy: RefCell::new(stream(2)),
            faults: RefCell::new(stream(3)),
            panics: RefCell::default(),
            waits_under_lock: RefCell::default(),
            trace: RefCell::default(),
            settings,
        }
    }

    /// Frees what the world owns and reports.
    fn end(&self, ending: Ending) -> Report {
        self.threads.take();
        self.runnable.take();
        self.waiting.take();
        self.timers.take();
        self.note(self.points());
        self.note(self.now_ns.get());
        Report {
            ending,
            event_hash: self.hash.get().value(),
            points: self.points(),
            decisions: self.decisions.get(),
            switches: self.switches.get(),
            now: self.now(),
            panics: self.panics.take(),
            waits_under_lock: self.waits_under_lock.take(),
            trace: self.trace.take(),
        }
    }

    /// The settings of this world.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Virtual time since the start of the world.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.now_ns.get())
    }

    /// Scheduling points so far: the logical time of an event.
    pub fn points(&self) -> u64 {
        self.points.get() + self.granted.get() - self.points_left.get()
    }

    /// Makes an event of the code under test, or of a simulated device, part of the event hash.
    pub fn note(&self, event: u64) {
        self.hash.set(self.hash.get().with(event));
    }

    /// A fault of time: the machine is suspended, no thread runs meanwhile.
    pub fn stall(&self, time: Duration) {
        self.advance(time);
        self.slow_from_ns.set(0);
    }

    /// A fault of time: the wall clock is set forward, or back.
    pub fn shift_wall_clock(&self, by_ms: i64) {
        self.wall_shift_ms.set(self.wall_shift_ms.get().saturating_add(by_ms));
    }

    /// From now on one start of a thread in so many fails; 0 for none. At first as in the settings.
    pub fn fail_spawns(&self, one_in: u32) {
        self.spawn_fails_one_in.set(one_in);
    }

    pub(crate) fn unix_ms(&self) -> u64 {
        let passed = self.now_ns.get() / 1_000_000;
        let unshifted = self.settings.unix_start_ms.saturating_add(passed);
        unshifted.saturating_add_signed(self.wall_shift_ms.get())
    }

    pub(crate) fn fill_random(&self, bytes: &mut [u8]) {
        self.entropy.borrow_mut().fill(bytes);
    }

    #[cold]
    pub(crate) fn is_planted(&self, plant: Plant) -> bool {
        self.settings.plant == Some(plant)
    }

    /// Fails as often as the settings say: code has to handle that no thread could be started.
    pub(crate) fn may_start_thread(&self) -> io::Result<()> {
        let fails = self.faults.borrow_mut().one_in(self.spawn_fails_one_in.get());
        if fails { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
    }

    pub(crate) fn spawn(&self, name: String, body: Box<dyn FnOnce()>) -> u32 {
        let domain = self.with(self.current.get(), |thread| thread.domain);
        let thread = self.start_thread(name, domain, body);
        self.point();
        thread
    }

    fn advance(&self, time: Duration) {
        self.now_ns.set(self.now_ns.get().saturating_add(timers::nanoseconds(time)));
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").field("settings", &self.settings).finish_non_exhaustive()
    }
}
