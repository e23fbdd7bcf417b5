//! What happens to a process from outside while it lives: it is killed, the machine is suspended,
//! the wall clock is set.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use cascade_runtime::simulated::{Domain, Random, World};
use cascade_runtime::thread::JoinHandle;
use cascade_runtime::{Condvar, Mutex, now};

use crate::client::Shared;
use crate::profile::{Profile, Trouble};

/// Suspensions, and settings of the clock, of one process at most.
const EVENTS_MAX: u64 = 4;
/// Times are drawn below a power of two of microseconds: early ones are as likely as late ones.
const TIME_BITS: u64 = 24;
/// How far the clock is set, in milliseconds: less than any time to live, and more.
const CLOCK_STEPS_MS: [i64; 4] = [5, 500, 3_600_000, 90_000_000];

/// A thread of the harness that disturbs one process.
#[derive(Debug)]
pub(crate) struct Disturber {
    stop: Arc<Stop>,
    thread: JoinHandle<bool>,
}

#[derive(Debug, Default)]
struct Stop {
    is_over: Mutex<bool>,
    changed: Condvar,
}

#[derive(Debug, Clone, Copy)]
enum Event {
    Kill,
    Suspend(Duration),
    SetClock(i64),
}

impl Disturber {
    /// Draws what happens, and starts the thread if anything does.
    pub(crate) fn start(
        world: &'static World,
        process: Domain,
        shared: &Arc<Shared>,
        random: &mut Random,
    ) -> Option<Self> {
        let events = draw(&shared.profile, random);
        if events.is_empty() {
            return None;
        }
        let stop = Arc::new(Stop::default());
        let (stopped, shared) = (Arc::clone(&stop), Arc::clone(shared));
        let thread = world.spawn_in(Domain::HARNESS, "disturber", move || {
            let world = World::current().expect("a thread of a world");
            for (at, event) in events {
                if stopped.wait_until(at) {
                    return false;
                }
                match event {
                    Event::Kill => {
                        world.kill(process);
                        return true;
                    }
                    Event::Suspend(time) => {
                        if !shared.is_calm.load(Ordering::Relaxed) {
                            world.stall(time);
                            shared.add_suspension(time);
                        }
                    }
                    Event::SetClock(by_ms) => world.shift_wall_clock(by_ms),
                }
            }
            false
        });
        Some(Self { stop, thread })
    }

    /// The process is over. Returns whether it was killed.
    pub(crate) fn stop(self) -> bool {
        *self.stop.is_over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.stop.changed.notify_all();
        self.thread.join().is_ok_and(|has_killed| has_killed)
    }
}

impl Stop {
    /// Waits until a virtual time. Returns whether the process is over.
    fn wait_until(&self, at: Duration) -> bool {
        let mut is_over = self.is_over.lock().unwrap_or_else(PoisonError::into_inner);
        while !*is_over && now() < at {
            let waited = self.changed.wait_timeout(is_over, at.saturating_sub(now()));
            (is_over, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
        *is_over
    }
}

/// The events of one process, in their order.
fn draw(profile: &Profile, random: &mut Random) -> Vec<(Duration, Event)> {
    let mut events = Vec::new();
    let time = |random: &mut Random, bits: u64| {
        let below = 1 << random.below(bits);
        Duration::from_micros(1 + random.below(below))
    };
    if profile.trouble >= Trouble::Kills && random.one_in(4) {
        events.push((now() + time(random, TIME_BITS), Event::Kill));
    }
    if profile.trouble == Trouble::Faults {
        for _ in 0..random.below(EVENTS_MAX) {
            let at = now() + time(random, TIME_BITS);
            // Up to two seconds: longer than the time-out of a call.
            events.push((at, Event::Suspend(time(random, 22))));
        }
    }
    if profile.sets_clock {
        for _ in 0..random.below(EVENTS_MAX) {
            let step_ms = CLOCK_STEPS_MS[random.index_below(CLOCK_STEPS_MS.len())];
            let by_ms = if random.one_in(2) { step_ms } else { -step_ms };
            events.push((now() + time(random, TIME_BITS), Event::SetClock(by_ms)));
        }
    }
    events.sort_by_key(|(at, _)| *at);
    events
}
