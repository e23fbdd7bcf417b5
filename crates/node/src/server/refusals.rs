//! Connections that are refused: cheaply, without a line of log for each, and at a bounded rate.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use cascade_block::{Clock, SystemClock};

use super::lock;

/// Hellos of one user that may be refused in a window; then its connections are closed unread.
const REFUSED_MAX: u32 = 64;
/// How long a user's refusals are counted together.
const WINDOW: Duration = Duration::from_secs(1);
/// Users whose refusals are counted at a time.
const USERS_MAX: usize = 1024;

/// Connections that are accepted in a window before the rest waits for the next one. Accepting
/// faster would let a flood take a whole processor.
const ACCEPTED_MAX: u32 = 1024;
const ACCEPT_WINDOW: Duration = Duration::from_millis(100);

/// A count that begins anew with each window.
#[derive(Debug, Default, Clone, Copy)]
struct Count {
    since: Duration,
    count: u32,
}

impl Count {
    fn add(&mut self, now: Duration, window: Duration) -> u32 {
        if now.saturating_sub(self.since) >= window {
            *self = Self { since: now, count: 0 };
        }
        self.count = self.count.saturating_add(1);
        self.count
    }
}

/// What was refused of late.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    of_user: Mutex<HashMap<u32, Count>>,
    logged: Mutex<Count>,
    accepted: Mutex<Count>,
}

impl Refusals {
    /// A hello of this user was refused.
    pub(super) fn note(&self, user: u32) {
        let mut users = lock(&self.of_user);
        if users.len() >= USERS_MAX && !users.contains_key(&user) {
            users.clear();
        }
        users.entry(user).or_default().add(SystemClock.monotonic(), WINDOW);
    }

    /// Whether so many hellos of this user were just refused that another one is not read.
    pub(super) fn are_too_many_of(&self, user: u32) -> bool {
        let now = SystemClock.monotonic();
        let is_too_many =
            |count: &Count| count.count >= REFUSED_MAX && now.saturating_sub(count.since) < WINDOW;
        lock(&self.of_user).get(&user).is_some_and(is_too_many)
    }

    /// Says once a second at most that a connection was refused.
    pub(super) fn log(&self, (process, user): (i32, u32), reason: &str) {
        let mut logged = lock(&self.logged);
        let unsaid = logged.count.saturating_sub(1);
        let is_first = logged.add(SystemClock.monotonic(), WINDOW) == 1;
        drop(logged);
        if is_first {
            tracing::warn!(process, user, reason, unsaid, "a connection is refused");
        }
    }

    /// A connection was accepted. How long to wait before the next one, if too many were of late.
    pub(super) fn pause_after_accept(&self) -> Option<Duration> {
        let now = SystemClock.monotonic();
        let mut accepted = lock(&self.accepted);
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
    fn a_user_whose_hellos_are_refused_is_told_from_others() {
        let refusals = Refusals::default();
        for _ in 0..REFUSED_MAX {
            refusals.note(5);
        }
        assert!(refusals.are_too_many_of(5) && !refusals.are_too_many_of(6));
        for user in 0..2 * u32::try_from(USERS_MAX).expect("it is small") {
            refusals.note(10_000 + user);
        }
        assert!(lock(&refusals.of_user).len() <= USERS_MAX);
    }

    #[test]
    fn many_connections_at_once_are_slowed_down() {
        let refusals = Refusals::default();
        let pauses = (0..10 * ACCEPTED_MAX).filter_map(|_| refusals.pause_after_accept());
        assert!(pauses.count() > 0, "no pause however many come");
    }
}
