//! How many calls may wait at a time, and whose they are.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Mutex;

use cascade_store::StoreError;
use cascade_wire::SessionId;

use super::lock;

/// What a call without the right to wait would have had to do.
const LATE: &str = "wait for one of the node's threads, which all wait for a tier";

/// How many calls may wait for a tier or for room at a time. The threads beyond these serve those
/// that need not wait, so that a slow disk slows nobody who does not ask it.
#[derive(Debug)]
pub(super) struct Waiters {
    now: Mutex<Now>,
    most: usize,
}

/// Calls that wait.
#[derive(Debug, Default)]
struct Now {
    all: usize,
    of_session: HashMap<SessionId, usize>,
}

/// What a call waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Sealing blocks that are written: giving up would throw them away, so a few places are kept.
    Seal,
    Other,
}

/// The right to wait.
pub(super) struct Waiter<'a>(&'a Waiters, SessionId);

impl Waiters {
    pub(super) fn new(most: usize) -> Self {
        Self { now: Mutex::default(), most }
    }

    /// The most that one client has of them: half, so that the calls of a client that is stuck
    /// leave the others some.
    fn of_session_max(&self) -> usize {
        self.most.div_ceil(2)
    }

    pub(super) fn begin(
        &self,
        session: SessionId,
        purpose: Purpose,
    ) -> Result<Waiter<'_>, StoreError> {
        let mut now = lock(&self.now);
        // One in eight is for sealing alone.
        let most = if purpose == Purpose::Seal { self.most } else { self.most - self.most / 8 };
        let of_session = now.of_session.get(&session).map_or(0, |count| *count);
        let is_greedy = purpose == Purpose::Other && of_session >= self.of_session_max();
        if now.all >= most || is_greedy {
            return Err(StoreError::Timeout { operation: LATE, timeout_ms: 0 });
        }
        now.all += 1;
        *now.of_session.entry(session).or_default() += 1;
        Ok(Waiter(self, session))
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut now = lock(&self.0.now);
        now.all -= 1;
        if let Entry::Occupied(mut count) = now.of_session.entry(self.1) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: SessionId = [1; 16];

    #[test]
    fn a_client_has_half_of_the_waiting_calls_and_sealing_has_some_of_its_own() {
        let waiters = Waiters::new(16);
        let begin = |session, purpose| waiters.begin(session, purpose);
        let mut one: Vec<_> = (0..8).map(|_| begin(ONE, Purpose::Other).unwrap()).collect();
        assert!(begin(ONE, Purpose::Other).is_err(), "half are one client's at most");
        let others: Vec<_> = (2..8).map(|id| begin([id; 16], Purpose::Other).unwrap()).collect();
        assert!(begin([9; 16], Purpose::Other).is_err(), "the last are for sealing");
        let seals: Vec<_> = (0..2).map(|_| begin(ONE, Purpose::Seal).unwrap()).collect();
        assert!(begin(ONE, Purpose::Seal).is_err(), "none is left");
        drop((seals, one.pop()));
        assert!(begin(ONE, Purpose::Other).is_ok(), "one came back");
        drop((one, others));
        assert_eq!(lock(&waiters.now).all, 0);
        assert!(lock(&waiters.now).of_session.is_empty(), "nothing is kept of who is gone");
    }
}
