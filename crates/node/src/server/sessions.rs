//! The sessions of a node: further connections join them, and they end with their clients.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use cascade_block::BlockKey;
use cascade_runtime::{Clock, SystemClock};
use cascade_wire::SessionId;

use super::lock;
use super::peer::Peer;
use super::session::ClientSession;
use crate::tenants::Tenant;

/// The sessions of a node.
#[derive(Debug, Default)]
pub(crate) struct ClientSessions {
    all: Mutex<HashMap<SessionId, Arc<ClientSession>>>,
    /// Number of sessions that were closed with holds.
    reaped: AtomicU64,
    /// Not zero if there may be sessions without a connection whose process can access its holds.
    unconnected: AtomicUsize,
    /// When these were last checked, in milliseconds of the monotonic clock.
    last_check_ms: AtomicU64,
}

impl ClientSessions {
    fn lock(&self) -> MutexGuard<'_, HashMap<SessionId, Arc<ClientSession>>> {
        lock(&self.all)
    }

    pub(super) fn add(&self, session: &Arc<ClientSession>) {
        self.lock().insert(session.id, Arc::clone(session));
    }

    /// Adds a further connection of the same process to a session.
    pub(super) fn join(&self, id: &SessionId, peer: Peer) -> Option<Arc<ClientSession>> {
        let all = self.lock();
        // The id alone is not enough: the credentials from the kernel have to be the same.
        let session = all.get(id).filter(|session| session.peer == peer)?;
        // Under the lock, like the decrement in `leave`: a session is not joined while it closes.
        session.connections.fetch_add(1, Ordering::AcqRel);
        session.joined.fetch_add(1, Ordering::AcqRel);
        Some(Arc::clone(session))
    }

    /// Removes a connection from a session. With its last connection the session is closed, unless
    /// its process can still access its holds. True if it was closed.
    pub(super) fn leave(&self, session: &ClientSession) -> bool {
        let all = self.lock();
        let is_last = session.connections.fetch_sub(1, Ordering::AcqRel) == 1;
        drop(all);
        is_last && self.close_unless_used(session)
    }

    /// Closes a session without a connection, unless its process can still access its holds. True
    /// if it was closed.
    fn close_unless_used(&self, session: &ClientSession) -> bool {
        let joined = session.joined.load(Ordering::Acquire);
        // Checked without the lock, which every client needs: the process chooses how long its list
        // of mappings is.
        let is_used = session.outlives_connections();
        let all = self.lock();
        // A connection that has joined meanwhile may have got holds. The session is checked again
        // when it leaves.
        let has_joined = session.joined.load(Ordering::Acquire) != joined;
        if has_joined || session.connections.load(Ordering::Acquire) > 0 {
            return false;
        }
        if is_used {
            // Relaxed: only a hint whether `close_unmapped` has anything to check.
            self.unconnected.store(1, Ordering::Relaxed);
            return false;
        }
        self.remove_from(all, session);
        true
    }

    /// Closes the sessions without a connection whose processes no longer map the pool. Checks at
    /// most ten times a second, because it reads `/proc/PID/maps` of each.
    pub(super) fn close_unmapped(&self) {
        if self.unconnected.load(Ordering::Relaxed) == 0 {
            return;
        }
        let now = u64::try_from(SystemClock.monotonic().as_millis()).unwrap_or(u64::MAX);
        let before = self.last_check_ms.load(Ordering::Relaxed);
        if now.saturating_sub(before) < 100 {
            return;
        }
        self.last_check_ms.store(now, Ordering::Relaxed);
        // Reset before the checks: a session that loses its last connection meanwhile sets it
        // again.
        self.unconnected.store(0, Ordering::Relaxed);
        for session in self.all() {
            if session.connections.load(Ordering::Acquire) == 0 {
                self.close_unless_used(&session);
            }
        }
    }

    pub(super) fn remove(&self, session: &ClientSession) {
        self.remove_from(self.lock(), session);
    }

    fn remove_from(
        &self,
        mut all: MutexGuard<'_, HashMap<SessionId, Arc<ClientSession>>>,
        session: &ClientSession,
    ) {
        // No connection can join any more, so the session is closed without the lock: that takes
        // the locks of the ledger and the pool.
        all.remove(&session.id);
        drop(all);
        if session.close() {
            self.reaped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Removes the clients' records of pins of these blocks, before the blocks are deleted.
    ///
    /// A block that expires is not covered: its record stays, and a later unpin or the end of the
    /// session removes a pin of whatever block has the key then.
    pub(crate) fn drop_pins(&self, tenant: &Tenant, keys: Option<&[BlockKey]>) {
        let mut all = self.all();
        all.retain(|session| session.tenant.name() == tenant.name() && session.has_pins());
        if all.is_empty() {
            return;
        }
        // A set, so that a session is not searched for every key: a client may have thousands of
        // sessions and send 65,536 keys.
        let keys = keys.map(|keys| keys.iter().copied().collect());
        for session in all {
            session.drop_pins(keys.as_ref());
        }
    }

    /// The number of sessions that were closed with holds.
    pub(crate) fn reaped(&self) -> u64 {
        self.reaped.load(Ordering::Relaxed)
    }

    /// All sessions that have a connection or holds.
    pub(crate) fn all(&self) -> Vec<Arc<ClientSession>> {
        self.lock().values().map(Arc::clone).collect()
    }
}
