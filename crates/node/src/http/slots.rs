//! Connection slots: a limit on connections, and which idle one is closed for a new one.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

/// One user, except root and the node's own, may take one in so many slots of a Unix socket.
const USER_SHARE: usize = 4;

/// A bounded set of connections.
#[derive(Debug)]
pub(super) struct ConnectionSlots {
    limit: usize,
    /// How long a connection must be idle before a new one may take its slot.
    idle_min: Duration,
    connections: Mutex<HashMap<u64, SlotState>>,
}

#[derive(Debug)]
struct SlotState {
    user: Option<u32>,
    /// When the last request ended, or the connection was accepted. `None` during a request.
    idle_since: Option<Instant>,
    /// Dropping it ends the connection.
    _close: oneshot::Sender<()>,
}

/// The slot of one connection. Dropping it frees the slot.
#[derive(Debug)]
pub(super) struct ConnectionSlot {
    slots: Arc<ConnectionSlots>,
    id: u64,
}

/// Resolves when a new connection has taken the slot.
pub(super) type SlotTaken = oneshot::Receiver<()>;

impl ConnectionSlots {
    /// `idle_min` protects connections in a burst of new ones: without it, each new connection
    /// would close another before that one has sent its first request, and none would be served.
    pub(super) fn new(limit: usize, idle_min: Duration) -> Arc<Self> {
        Arc::new(Self { limit, idle_min, connections: Mutex::default() })
    }

    /// Takes a slot for a new connection, and closes the connection that has been idle longest if
    /// all slots are taken. A connection of a `user` at its share can only replace one of the same
    /// user. `None` if no connection has been idle for `idle_min`.
    pub(super) fn take(
        self: &Arc<Self>,
        id: u64,
        user: Option<u32>,
    ) -> Option<(ConnectionSlot, SlotTaken)> {
        let mut connections = self.lock();
        let is_same_user = |one: &SlotState| user.is_some() && one.user == user;
        // A user at its share replaces one of its own connections even while slots are free:
        // otherwise it could take all of them.
        let is_at_share = user.is_some()
            && connections.values().filter(|one| is_same_user(one)).count()
                >= self.limit.div_ceil(USER_SHARE);
        if is_at_share || connections.len() >= self.limit {
            let candidates =
                connections.iter().filter(|(_, one)| !is_at_share || is_same_user(one));
            // Connections with a request in progress have no idle time, so they are never replaced.
            let idle = candidates.filter_map(|(id, one)| Some((one.idle_since?, *id)));
            let (since, idle_longest) = idle.min()?;
            if since.elapsed() < self.idle_min {
                return None;
            }
            // This drops the sender in the state, which ends that connection. Its task drops its
            // slot later, when the entry is gone already.
            connections.remove(&idle_longest);
        }
        let (close, taken) = oneshot::channel();
        let state = SlotState { user, idle_since: Some(Instant::now()), _close: close };
        connections.insert(id, state);
        Some((ConnectionSlot { slots: Arc::clone(self), id }, taken))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, SlotState>> {
        // Each update is a single step, so a panic cannot leave the map half changed.
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConnectionSlot {
    /// Marks the start of a request: the slot cannot be taken.
    pub(super) fn set_busy(&self) {
        self.set_idle_since(None);
    }

    /// Marks the end of a request.
    pub(super) fn set_idle(&self) {
        self.set_idle_since(Some(Instant::now()));
    }

    fn set_idle_since(&self, idle_since: Option<Instant>) {
        if let Some(state) = self.slots.lock().get_mut(&self.id) {
            state.idle_since = idle_since;
        }
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        // If the slot was taken, its new connection has another ID and stays.
        self.slots.lock().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_connection_takes_the_slot_that_has_been_idle_longest() {
        let slots = ConnectionSlots::new(3, Duration::ZERO);
        let (first, mut first_taken) = slots.take(1, None).unwrap();
        let (second, mut second_taken) = slots.take(2, None).unwrap();
        let (_third, mut third_taken) = slots.take(3, None).unwrap();
        first.set_busy();
        let (_fourth, _fourth_taken) = slots.take(4, None).unwrap();
        assert!(first_taken.try_recv() == Err(oneshot::error::TryRecvError::Empty), "busy");
        assert!(second_taken.try_recv() == Err(oneshot::error::TryRecvError::Closed));
        assert!(third_taken.try_recv() == Err(oneshot::error::TryRecvError::Empty), "idle later");
        drop(second);
        assert_eq!(slots.lock().len(), 3, "dropping a taken slot does not free it again");
        first.set_idle();
    }

    #[test]
    fn no_slot_is_free_while_all_connections_are_busy() {
        let slots = ConnectionSlots::new(2, Duration::ZERO);
        let held: Vec<_> = (0..2).map(|id| slots.take(id, None).unwrap()).collect();
        for (slot, _) in &held {
            slot.set_busy();
        }
        assert!(slots.take(2, None).is_none());
        drop(held);
        assert!(slots.take(3, None).is_some());
    }

    #[test]
    fn a_connection_that_was_busy_recently_keeps_its_slot() {
        let slots = ConnectionSlots::new(1, Duration::MAX);
        let _held = slots.take(0, None).unwrap();
        assert!(slots.take(1, None).is_none());
    }

    #[test]
    fn a_user_at_its_share_replaces_only_its_own_connections() {
        let slots = ConnectionSlots::new(8, Duration::ZERO);
        let (_other, mut other_taken) = slots.take(1, Some(7)).unwrap();
        let mut own: Vec<_> = (2..6).filter_map(|id| slots.take(id, Some(8))).collect();
        assert_eq!(slots.lock().len(), 3, "two of eight are a quarter");
        assert_eq!(other_taken.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        let last = own.pop().unwrap();
        for (slot, _) in &own {
            slot.set_busy();
        }
        last.0.set_busy();
        let (third, _) = own.pop().unwrap();
        third.set_busy();
        assert!(slots.take(9, Some(8)).is_none(), "both are busy");
        assert!(slots.take(10, None).is_some(), "other users have free slots");
    }
}
