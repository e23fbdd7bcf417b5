//! Time: the machine's, or the world's.

use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::simulated;

/// Time since the first call in this process, or since the start of the world; never goes back.
#[expect(clippy::disallowed_methods, reason = "this is the clock that all other code takes")]
pub fn now() -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    if let Some(world) = simulated::current() {
        return world.now();
    }
    START.get_or_init(Instant::now).elapsed()
}

/// Milliseconds since 1970 UTC, for timestamps that outlive the process. It can jump.
#[expect(clippy::disallowed_methods, reason = "this is the clock that all other code takes")]
pub fn unix_ms() -> u64 {
    if let Some(world) = simulated::current() {
        return world.unix_ms();
    }
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// CPU time of the calling thread; in a world, the time of the world.
pub fn thread_cpu_time() -> Duration {
    if let Some(world) = simulated::current() {
        return world.now();
    }
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    // Never negative.
    Duration::try_from(time).unwrap_or_default()
}

/// Waits for `time`.
#[track_caller]
#[expect(clippy::disallowed_methods, reason = "this is the sleep that all other code takes")]
pub fn sleep(time: Duration) {
    match simulated::current() {
        Some(world) => world.sleep(time),
        None => std::thread::sleep(time),
    }
}
