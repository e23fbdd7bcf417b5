//! Permits to wait: the limit of calls that block on a tier or for room, in all and by client.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex};

use cascade_store::StoreError;

use super::accounts::Account;
use super::lock;

/// The operation that timed out when no permit is free.
const NO_PERMIT: &str = "waiting for a free thread of the node (all wait for tiers)";

/// The limit that a client with too many waiting calls exceeds.
const CALLS: &str = "concurrent calls that wait for a tier or for room";

/// Permits for calls that block on a tier or for room. The server has more threads than permits;
/// the others serve calls that need not wait, so that a slow disk does not delay them.
#[derive(Debug)]
pub(super) struct WaitPermits {
    used: Mutex<UsedPermits>,
    limit: usize,
}

/// The permits in use.
#[derive(Debug, Default)]
struct UsedPermits {
    total: usize,
    /// By client: the address of its account.
    of_client: HashMap<usize, usize>,
}

/// Why a call waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitPurpose {
    /// Sealing blocks. Some permits are reserved for it: to give up would discard written blocks.
    Seal,
    Other,
}

/// The permission for one call to wait; returned on drop.
pub(super) struct WaitPermit<'a> {
    permits: &'a WaitPermits,
    /// Keeps the account alive, so that its address identifies one client as long as it counts.
    client: Arc<Account>,
}

fn client_id(client: &Arc<Account>) -> usize {
    Arc::as_ptr(client).addr()
}

impl WaitPermits {
    pub(super) fn new(limit: usize) -> Self {
        Self { used: Mutex::default(), limit }
    }

    /// The limit for one client: half, so that one client with calls that hang leaves permits to
    /// the others.
    fn of_client_max(&self) -> usize {
        // Rounded up, so that a limit of one leaves one permit.
        self.limit.div_ceil(2)
    }

    pub(super) fn try_acquire(
        &self,
        client: &Arc<Account>,
        purpose: WaitPurpose,
    ) -> Result<WaitPermit<'_>, StoreError> {
        let mut used = lock(&self.used);
        // One permit in eight is reserved for sealing, which has no limit by client either.
        let reserved = if purpose == WaitPurpose::Seal { 0 } else { self.limit / 8 };
        // A process has one account in a tenant, so further sessions do not raise its limit.
        let of_client = used.of_client.get(&client_id(client)).map_or(0, |count| *count);
        if purpose == WaitPurpose::Other && of_client >= self.of_client_max() {
            return Err(StoreError::Limit { limit: CALLS, most: self.of_client_max() as u64 });
        }
        // Fails at once: a thread that waits for a permit would be missing for calls that need
        // none.
        if used.total >= self.limit - reserved {
            return Err(StoreError::Timeout { operation: NO_PERMIT, timeout_ms: 0 });
        }
        used.total += 1;
        *used.of_client.entry(client_id(client)).or_default() += 1;
        Ok(WaitPermit { permits: self, client: Arc::clone(client) })
    }
}

impl Drop for WaitPermit<'_> {
    fn drop(&mut self) {
        let mut used = lock(&self.permits.used);
        used.total -= 1;
        if let Entry::Occupied(mut count) = used.of_client.entry(client_id(&self.client)) {
            *count.get_mut() -= 1;
            // Clients without a waiting call have no entry, so the map is no longer than the
            // permits.
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
    fn a_client_gets_half_of_the_permits_and_sealing_has_reserved_ones() {
        let permits = WaitPermits::new(16);
        let clients: [Arc<Account>; 10] = Default::default();
        let acquire = |at: usize, purpose| permits.try_acquire(&clients[at], purpose);
        let mut one: Vec<_> = (0..8).map(|_| acquire(1, WaitPurpose::Other).unwrap()).collect();
        let error = acquire(1, WaitPurpose::Other).err().expect("a client gets at most half");
        assert!(matches!(error, StoreError::Limit { most: 8, .. }), "{error}");
        let others: Vec<_> = (2..8).map(|at| acquire(at, WaitPurpose::Other).unwrap()).collect();
        let error = acquire(9, WaitPurpose::Other).err().expect("the last are for sealing");
        assert!(matches!(error, StoreError::Timeout { .. }), "{error}");
        let seals: Vec<_> = (0..2).map(|_| acquire(1, WaitPurpose::Seal).unwrap()).collect();
        assert!(acquire(1, WaitPurpose::Seal).is_err(), "none is left");
        drop((seals, one.pop()));
        assert!(acquire(1, WaitPurpose::Other).is_ok(), "a permit was returned");
        drop((one, others));
        assert_eq!(lock(&permits.used).total, 0);
        assert!(lock(&permits.used).of_client.is_empty(), "clients without permits are removed");
    }
}
