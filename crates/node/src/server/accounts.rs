//! What each client process has of what all clients of a tenant share, in all of its sessions.
//!
//! A client is a process: one that connects twice has its share once.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use cascade_store::StoreError;

use super::lock;
use super::session::Peer;

/// Most pieces that one client may hold at a time: each costs the node some memory of its own.
pub(super) const PIECES_MAX: u64 = 256 << 10;
/// Most distinct blocks that one client may have pinned at a time.
pub(super) const PINS_MAX: u64 = 64 << 10;
/// Most namespaces that one client may register.
pub(super) const NAMESPACES_MAX: u64 = 64;
/// Most bytes of their manifests: every answer that lists a tenant's manifests is one message.
pub(super) const MANIFEST_BYTES_MAX: u64 = 256 << 10;

const BYTES: &str = "bytes of its tenant's DRAM in views, slabs and pins (client_share)";
const PIECES: &str = "pieces of its tenant's DRAM, one for each view and slab";
const NAMESPACES: &str = "namespaces";
const MANIFEST_BYTES: &str = "bytes of manifests";

/// A quantity of which a client has some.
#[derive(Debug, Default)]
pub(super) struct Amount(AtomicU64);

impl Amount {
    /// Takes some more, unless that is beyond the most.
    fn take(&self, more: u64, most: u64) -> bool {
        let sum = |has: u64| has.checked_add(more).filter(|sum| *sum <= most);
        // Relaxed: a sum that guards no other memory.
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum).is_ok()
    }

    fn give_back(&self, less: u64) {
        let before = self.0.fetch_sub(less, Ordering::Relaxed);
        debug_assert!(before >= less, "only what was taken is given back");
    }

    fn now(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What one client has.
#[derive(Debug, Default)]
pub(super) struct Account {
    /// Of the tenant's DRAM: what it reads, writes and has pinned.
    bytes: Amount,
    /// Views and slabs.
    pieces: Amount,
    /// Distinct blocks that it pinned.
    pins: Amount,
    namespaces: Amount,
    manifest_bytes: Amount,
}

impl Account {
    pub(super) fn take_bytes(&self, bytes: u64, most: u64) -> bool {
        self.bytes.take(bytes, most)
    }

    pub(super) fn give_bytes_back(&self, bytes: u64) {
        self.bytes.give_back(bytes);
    }

    /// Bytes that it may still take.
    pub(super) fn bytes_left(&self, most: u64) -> u64 {
        most.saturating_sub(self.bytes.now())
    }

    pub(super) fn take_pieces(&self, count: u64) -> Result<(), StoreError> {
        let limit = || StoreError::Limit { limit: PIECES, most: PIECES_MAX };
        self.pieces.take(count, PIECES_MAX).then_some(()).ok_or_else(limit)
    }

    pub(super) fn give_pieces_back(&self, count: u64) {
        self.pieces.give_back(count);
    }

    /// The right to pin one more block.
    pub(super) fn take_pin(&self) -> bool {
        self.pins.take(1, PINS_MAX)
    }

    /// Blocks are no longer pinned, of so many bytes in all.
    pub(super) fn give_pins_back(&self, count: u64, bytes: u64) {
        self.pins.give_back(count);
        self.bytes.give_back(bytes);
    }

    /// The right to register one more namespace, whose manifest is so long. It is never given back:
    /// manifests stay as long as the tenant's blocks.
    pub(super) fn take_namespace(&self, bytes: u64) -> Result<(), StoreError> {
        if !self.namespaces.take(1, NAMESPACES_MAX) {
            return Err(StoreError::Limit { limit: NAMESPACES, most: NAMESPACES_MAX });
        }
        if !self.manifest_bytes.take(bytes, MANIFEST_BYTES_MAX) {
            self.namespaces.give_back(1);
            return Err(StoreError::Limit { limit: MANIFEST_BYTES, most: MANIFEST_BYTES_MAX });
        }
        Ok(())
    }
}

/// What a client is told that has all the bytes it may have.
pub(super) fn bytes_limit(most: u64) -> StoreError {
    StoreError::Limit { limit: BYTES, most }
}

/// The accounts of clients that are here, by tenant and process.
#[derive(Debug, Default)]
pub(super) struct Accounts(Mutex<HashMap<(String, i32), Weak<Account>>>);

impl Accounts {
    /// The account of a process in a tenant. Processes of other process namespaces have no number
    /// here that could tell them apart: each session of theirs has an account.
    pub(super) fn of(&self, tenant: &str, peer: Peer) -> Arc<Account> {
        if peer.process == 0 {
            return Arc::default();
        }
        let mut all = lock(&self.0);
        let key = (tenant.to_owned(), peer.process);
        if let Some(known) = all.get(&key).and_then(Weak::upgrade) {
            return known;
        }
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
        assert!(!Arc::ptr_eq(&unknown, &other), "whose they are is not known");
        drop(one);
        assert_eq!(accounts.of("default", peer(7)).bytes.now(), 0);
        assert_eq!(lock(&accounts.0).len(), 1, "nothing is kept of those who are gone");
    }

    #[test]
    fn nothing_is_taken_beyond_the_most() {
        let account = Account::default();
        assert!(account.take_bytes(60, 100));
        assert!(!account.take_bytes(41, 100));
        assert_eq!(account.bytes_left(100), 40);
        assert!(!account.take_bytes(u64::MAX, 100));
        account.give_bytes_back(60);
        account.take_pieces(PIECES_MAX).expect("exactly as many as it may");
        let error = account.take_pieces(1).expect_err("one more");
        assert!(matches!(error, StoreError::Limit { most: PIECES_MAX, .. }), "{error}");
        assert!(account.take_namespace(MANIFEST_BYTES_MAX + 1).is_err());
        assert_eq!(account.namespaces.now(), 0);
    }
}
