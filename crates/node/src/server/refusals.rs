//! Rate limits of refused hellos, of log lines about refusals, and of accepted connections.

use std::collections::HashMap;
use std::io;
use std::sync::Mutex;
use std::time::Duration;

use cascade_runtime::{Clock, SystemClock};
use rustix::io::Errno;

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

/// Least time between two log lines about connections that cannot be accepted: each attempt fails
/// again after some milliseconds.
const FAILED_ACCEPT_WINDOW: Duration = Duration::from_secs(10);

/// What to do when all descriptors are in use.
pub(super) const NO_DESCRIPTORS: &str = "all file descriptors of the node are in use; raise its \
                                         limit of open files (ulimit -n, systemd: LimitNOFILE=)";

/// Whether an error means that all descriptors of the process or of the system are in use.
pub(super) fn is_exhausted(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::MFILE | Errno::NFILE))
}

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
    failed_accepts: Mutex<WindowCount>,
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

    /// Logs that no connection can be accepted, and why, at most once in a while.
    pub(super) fn log_failed_accept(&self, error: &io::Error) {
        if self.is_failed_accept_due(SystemClock.monotonic()) {
            let advice = if is_exhausted(error) { NO_DESCRIPTORS } else { "it is tried again" };
            tracing::warn!(%error, advice, "cannot accept connections");
        }
    }

    fn is_failed_accept_due(&self, now: Duration) -> bool {
        lock(&self.failed_accepts).add(now, FAILED_ACCEPT_WINDOW) == 1
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

    /// 100 lines a second said only "Too many open files".
    #[test]
    fn exhausted_descriptors_are_named_and_logged_once_in_a_while() {
        assert!(is_exhausted(&Errno::MFILE.into()) && is_exhausted(&Errno::NFILE.into()));
        assert!(!is_exhausted(&Errno::NOENT.into()));
        let refusals = Refusals::default();
        let start = Duration::from_secs(1000);
        let attempts = (0..1000).map(|at| start + Duration::from_millis(10 * at));
        assert_eq!(attempts.filter(|now| refusals.is_failed_accept_due(*now)).count(), 1);
        assert!(refusals.is_failed_accept_due(start + FAILED_ACCEPT_WINDOW));
    }

    #[test]
    fn a_flood_of_connections_is_accepted_with_pauses() {
        let refusals = Refusals::default();
        let pauses = (0..10 * ACCEPTED_MAX).filter_map(|_| refusals.pause_after_accept());
        assert!(pauses.count() > 0, "no pause after ten times the limit");
    }
}
