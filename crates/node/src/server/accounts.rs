//! Accounts: how much of a tenant's shared resources each client process uses, and its limits.
//!
//! A process has one account in a tenant, however many sessions it opens.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use cascade_store::StoreError;

use super::lock;
use super::peer::Peer;

/// Maximum number of holds (views and slabs) of one client: each takes memory of the node.
pub(super) const HOLDS_MAX: u64 = 256 << 10;
/// Maximum number of distinct blocks that one client may pin.
pub(super) const PINS_MAX: u64 = 64 << 10;
/// Maximum number of namespaces that one client may register.
pub(super) const NAMESPACES_MAX: u64 = 64;
/// Maximum bytes of their manifests. It bounds the answer that lists a tenant's manifests, which
/// is a single message.
pub(super) const MANIFEST_BYTES_MAX: u64 = 256 << 10;

const BYTES: &str = "bytes of its tenant's DRAM in views, slabs and pins (client_share)";
const HOLDS: &str = "views and slabs";
const NAMESPACES: &str = "namespaces";
const MANIFEST_BYTES: &str = "bytes of manifests";

/// The amount of one resource that a client uses.
#[derive(Debug, Default)]
pub(super) struct Usage(AtomicU64);

impl Usage {
    /// Adds to the amount, unless the sum exceeds the limit.
    fn try_add(&self, added: u64, limit: u64) -> bool {
        // Checked and added in one step: concurrent calls cannot exceed the limit together.
        let sum = |used: u64| used.checked_add(added).filter(|sum| *sum <= limit);
        // Relaxed: a sum that guards no other memory.
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum).is_ok()
    }

    fn subtract(&self, released: u64) {
        let before = self.0.fetch_sub(released, Ordering::Relaxed);
        debug_assert!(before >= released, "only what was added is subtracted");
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The resources that one client uses.
#[derive(Debug, Default)]
pub(super) struct Account {
    /// Bytes of the tenant's DRAM that it reads, writes and has pinned.
    bytes: Usage,
    /// Views and slabs.
    holds: Usage,
    /// Distinct blocks that it pinned.
    pins: Usage,
    namespaces: Usage,
    manifest_bytes: Usage,
}

impl Account {
    pub(super) fn try_reserve_bytes(&self, bytes: u64, limit: u64) -> bool {
        self.bytes.try_add(bytes, limit)
    }

    pub(super) fn release_bytes(&self, bytes: u64) {
        self.bytes.subtract(bytes);
    }

    /// The bytes that are left up to the limit.
    pub(super) fn available_bytes(&self, limit: u64) -> u64 {
        // A reload can lower the limit for new sessions below what the process already uses.
        limit.saturating_sub(self.bytes.get())
    }

    pub(super) fn reserve_holds(&self, count: u64) -> Result<(), StoreError> {
        let error = || StoreError::Limit { limit: HOLDS, most: HOLDS_MAX };
        self.holds.try_add(count, HOLDS_MAX).then_some(()).ok_or_else(error)
    }

    pub(super) fn release_holds(&self, count: u64) {
        self.holds.subtract(count);
    }

    /// Reserves one pin, without its bytes.
    pub(super) fn try_reserve_pin(&self) -> bool {
        self.pins.try_add(1, PINS_MAX)
    }

    /// Releases pins and their bytes.
    pub(super) fn release_pins(&self, count: u64, bytes: u64) {
        self.pins.subtract(count);
        self.bytes.subtract(bytes);
    }

    /// Reserves one namespace with a manifest of `bytes`. It is never released: manifests are kept
    /// as long as the tenant's blocks.
    pub(super) fn reserve_namespace(&self, bytes: u64) -> Result<(), StoreError> {
        if !self.namespaces.try_add(1, NAMESPACES_MAX) {
            return Err(StoreError::Limit { limit: NAMESPACES, most: NAMESPACES_MAX });
        }
        if !self.manifest_bytes.try_add(bytes, MANIFEST_BYTES_MAX) {
            // Until this line, a concurrent registration may find the limit of namespaces reached.
            // It succeeds when the client repeats it.
            self.namespaces.subtract(1);
            return Err(StoreError::Limit { limit: MANIFEST_BYTES, most: MANIFEST_BYTES_MAX });
        }
        Ok(())
    }
}

/// The error of a client that reached its limit of bytes.
pub(super) fn bytes_limit_error(limit: u64) -> StoreError {
    StoreError::Limit { limit: BYTES, most: limit }
}

/// The accounts of connected clients, by tenant and process. The sessions own them.
#[derive(Debug, Default)]
pub(super) struct Accounts(Mutex<HashMap<(String, i32), Weak<Account>>>);

impl Accounts {
    /// The account of a process in a tenant.
    ///
    /// The kernel reports process id 0 for every process of another process namespace. These cannot
    /// be distinguished, so each of their sessions has an account of its own.
    pub(super) fn of(&self, tenant: &str, peer: Peer) -> Arc<Account> {
        if peer.process == 0 {
            return Arc::default();
        }
        let mut all = lock(&self.0);
        // The lock is held until the new account is in the map: two sessions that open at once get
        // the same one.
        let key = (tenant.to_owned(), peer.process);
        if let Some(account) = all.get(&key).and_then(Weak::upgrade) {
            return account;
        }
        // Entries of clients that are gone are removed here, so the map is bounded by the number of
        // processes that have a session.
        all.retain(|_, account| account.strong_count() > 0);
        let account = Arc::default();
        all.insert(key, Arc::downgrade(&account));
        account
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_one_account_in_each_tenant() {
        let accounts = Accounts::default();
        let peer = |process| Peer { process, user: 0, group: 0 };
        let one = accounts.of("default", peer(7));
        assert!(Arc::ptr_eq(&one, &accounts.of("default", peer(7))));
        assert!(!Arc::ptr_eq(&one, &accounts.of("other", peer(7))));
        assert!(!Arc::ptr_eq(&one, &accounts.of("default", peer(8))));
        let (unknown, other) = (accounts.of("default", peer(0)), accounts.of("default", peer(0)));
        assert!(!Arc::ptr_eq(&unknown, &other), "their processes are unknown");
        drop(one);
        assert_eq!(accounts.of("default", peer(7)).bytes.get(), 0);
        assert_eq!(lock(&accounts.0).len(), 1, "unused accounts are removed");
    }

    #[test]
    fn reservations_beyond_the_limit_fail() {
        let account = Account::default();
        assert!(account.try_reserve_bytes(60, 100));
        assert!(!account.try_reserve_bytes(41, 100));
        assert_eq!(account.available_bytes(100), 40);
        assert!(!account.try_reserve_bytes(u64::MAX, 100));
        account.release_bytes(60);
        account.reserve_holds(HOLDS_MAX).expect("the limit is included");
        let error = account.reserve_holds(1).expect_err("one over the limit");
        assert!(matches!(error, StoreError::Limit { most: HOLDS_MAX, .. }), "{error}");
        assert!(account.reserve_namespace(MANIFEST_BYTES_MAX + 1).is_err());
        assert_eq!(account.namespaces.get(), 0);
    }
}
