//! How many calls may wait at a time, and whose they are.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex};

use cascade_store::StoreError;

use super::accounts::Account;
use super::lock;

/// What a call without the right to wait would have had to do.
const LATE: &str = "wait for one of the node's threads, which all wait for a tier";

/// What a client is told that has too many calls waiting.
const CALLS: &str = "calls that wait for a tier or for room at a time";

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
    /// Of each client, by the address of its account.
    of_client: HashMap<usize, usize>,
}

/// What a call waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Sealing blocks that are written: giving up would throw them away, so a few places are kept.
    Seal,
    Other,
}

/// The right to wait.
pub(super) struct Waiter<'a> {
    waiters: &'a Waiters,
    /// Lives as long, so that its address is nobody else's.
    client: Arc<Account>,
}

fn number(client: &Arc<Account>) -> usize {
    Arc::as_ptr(client).addr()
}

impl Waiters {
    pub(super) fn new(most: usize) -> Self {
        Self { now: Mutex::default(), most }
    }

    /// The most that one client has of them: half, so that the calls of a client that is stuck
    /// leave the others some.
    fn of_client_max(&self) -> usize {
        self.most.div_ceil(2)
    }

    pub(super) fn begin(
        &self,
        client: &Arc<Account>,
        purpose: Purpose,
    ) -> Result<Waiter<'_>, StoreError> {
        let mut now = lock(&self.now);
        // One in eight is for sealing alone.
        let most = if purpose == Purpose::Seal { self.most } else { self.most - self.most / 8 };
        let of_client = now.of_client.get(&number(client)).map_or(0, |count| *count);
        if purpose == Purpose::Other && of_client >= self.of_client_max() {
            return Err(StoreError::Limit { limit: CALLS, most: self.of_client_max() as u64 });
        }
        if now.all >= most {
            return Err(StoreError::Timeout { operation: LATE, timeout_ms: 0 });
        }
        now.all += 1;
        *now.of_client.entry(number(client)).or_default() += 1;
        Ok(Waiter { waiters: self, client: Arc::clone(client) })
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut now = lock(&self.waiters.now);
        now.all -= 1;
        if let Entry::Occupied(mut count) = now.of_client.entry(number(&self.client)) {
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

    #[test]
    fn a_client_has_half_of_the_waiting_calls_and_sealing_has_some_of_its_own() {
        let waiters = Waiters::new(16);
        let clients: [Arc<Account>; 10] = Default::default();
        let begin = |at: usize, purpose| waiters.begin(&clients[at], purpose);
        let mut one: Vec<_> = (0..8).map(|_| begin(1, Purpose::Other).unwrap()).collect();
        let error = begin(1, Purpose::Other).err().expect("half are one client's at most");
        assert!(matches!(error, StoreError::Limit { most: 8, .. }), "{error}");
        let others: Vec<_> = (2..8).map(|at| begin(at, Purpose::Other).unwrap()).collect();
        let error = begin(9, Purpose::Other).err().expect("the last are for sealing");
        assert!(matches!(error, StoreError::Timeout { .. }), "{error}");
        let seals: Vec<_> = (0..2).map(|_| begin(1, Purpose::Seal).unwrap()).collect();
        assert!(begin(1, Purpose::Seal).is_err(), "none is left");
        drop((seals, one.pop()));
        assert!(begin(1, Purpose::Other).is_ok(), "one came back");
        drop((one, others));
        assert_eq!(lock(&waiters.now).all, 0);
        assert!(lock(&waiters.now).of_client.is_empty(), "nothing is kept of who is gone");
    }
}
