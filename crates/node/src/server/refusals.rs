//! Rate limits of refused hellos, of log lines about refusals, and of accepted connections.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use cascade_runtime::{Clock, SystemClock};

use super::lock;

/// Refused hellos of one user in a window; beyond that its connections are closed unread.
const REFUSED_MAX: u32 = 64;
/// Window of refusals, and of the log lines about them.
const WINDOW: Duration = Duration::from_secs(1);
/// Maximum number of users with counted refusals.
const USERS_MAX: usize = 1024;

/// Connections accepted in a window; further ones wait for the next window. Without a limit a flood
/// of connections would use a whole CPU core.
const ACCEPTED_MAX: u32 = 1024;
const ACCEPT_WINDOW: Duration = Duration::from_millis(100);

/// A count in a fixed window, which starts with the first event after the previous window.
#[derive(Debug, Default, Clone, Copy)]
struct WindowCount {
    since: Duration,
    count: u32,
}

impl WindowCount {
    fn add(&mut self, now: Duration, window: Duration) -> u32 {
        if now.saturating_sub(self.since) >= window {
            *self = Self { since: now, count: 0 };
        }
        self.count = self.count.saturating_add(1);
        self.count
    }
}

/// The counts of recent refusals and accepted connections.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    of_user: Mutex<HashMap<u32, WindowCount>>,
    logged: Mutex<WindowCount>,
    accepted: Mutex<WindowCount>,
}

impl Refusals {
    /// Counts a refused hello of a user.
    pub(super) fn record(&self, user: u32) {
        let mut users = lock(&self.of_user);
        // Clearing bounds the memory; it forgets at most one window of counts.
        if users.len() >= USERS_MAX && !users.contains_key(&user) {
            users.clear();
        }
        users.entry(user).or_default().add(SystemClock.monotonic(), WINDOW);
    }

    /// Whether a user reached the limit of refused hellos in the current window.
    pub(super) fn limit_reached(&self, user: u32) -> bool {
        let now = SystemClock.monotonic();
        // A count of an earlier window does not matter. The next refusal resets it, in `record`.
        let is_over = |count: &WindowCount| {
            count.count >= REFUSED_MAX && now.saturating_sub(count.since) < WINDOW
        };
        lock(&self.of_user).get(&user).is_some_and(is_over)
    }

    /// Logs a refused connection, at most once a second.
    pub(super) fn log(&self, (process, user): (i32, u32), reason: &str) {
        let mut logged = lock(&self.logged);
        // Read before `add`, which resets the count when a new window starts. The first line of the
        // window was written, so it does not count as suppressed.
        let suppressed = logged.count.saturating_sub(1);
        let is_first = logged.add(SystemClock.monotonic(), WINDOW) == 1;
        drop(logged);
        if is_first {
            tracing::warn!(process, user, reason, suppressed, "refused a connection");
        }
    }

    /// Counts an accepted connection. Returns how long to wait before the next one, if the limit of
    /// the window is exceeded.
    pub(super) fn pause_after_accept(&self) -> Option<Duration> {
        let now = SystemClock.monotonic();
        let mut accepted = lock(&self.accepted);
        // The pause ends with the window, so it is at most `ACCEPT_WINDOW`.
        let count = accepted.add(now, ACCEPT_WINDOW);
        (count > ACCEPTED_MAX)
            .then(|| (accepted.since + ACCEPT_WINDOW).saturating_sub(now))
            .filter(|pause| !pause.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_hellos_are_limited_for_each_user() {
        let refusals = Refusals::default();
        for _ in 0..REFUSED_MAX {
            refusals.record(5);
        }
        assert!(refusals.limit_reached(5) && !refusals.limit_reached(6));
        for user in 0..2 * u32::try_from(USERS_MAX).expect("it is small") {
            refusals.record(10_000 + user);
        }
        assert!(lock(&refusals.of_user).len() <= USERS_MAX);
    }

    #[test]
    fn a_flood_of_connections_is_accepted_with_pauses() {
        let refusals = Refusals::default();
        let pauses = (0..10 * ACCEPTED_MAX).filter_map(|_| refusals.pause_after_accept());
        assert!(pauses.count() > 0, "no pause after ten times the limit");
    }
}
