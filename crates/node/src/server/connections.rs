//! The open connections, counted by process and user, and their limits.
//!
//! A connection is unauthenticated until its hello is accepted. The number of unauthenticated
//! connections is limited. At the limit a new connection replaces the oldest one of the origin with
//! the most, so that one origin cannot keep others from connecting.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use super::connection::Connection;
use super::peer::Peer;

/// Maximum number of unauthenticated connections.
pub(super) const UNAUTHENTICATED_MAX: usize = 256;

/// The origin of an unauthenticated connection: a process of a tenant's user, or any other user.
/// Other users count as a whole, because they can start any number of processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Origin {
    Process(i32),
    User(u32),
}

/// A reached connection limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConnectionLimit {
    /// `connections_max` connections are open.
    Total,
    /// The process has half of `connections_max`.
    Process,
    /// The user has half of `connections_max`. The node's own user is exempt.
    User,
}

impl ConnectionLimit {
    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::Total => "the connection limit connections_max is reached",
            Self::Process => "its process has half of connections_max open",
            Self::User => "its user has half of connections_max open",
        }
    }
}

/// The connections of a node.
#[derive(Debug, Default)]
pub(super) struct Connections {
    all: HashMap<u64, Arc<Connection>>,
    of_process: HashMap<i32, usize>,
    of_user: HashMap<u32, usize>,
    /// By connection number, so oldest first: numbers count up.
    unauthenticated: BTreeMap<u64, Origin>,
    unauthenticated_of: HashMap<Origin, usize>,
}

impl Connections {
    /// The limit that one more connection of this peer would exceed.
    ///
    /// Process id 0 stands for all processes of other process namespaces; only the user limit
    /// applies to them.
    pub(super) fn reached_limit(
        &self,
        peer: Peer,
        own_user: u32,
        connections_max: usize,
    ) -> Option<ConnectionLimit> {
        // Rounded up, so that a limit of one admits one connection.
        let half = connections_max.div_ceil(2);
        let has_half = |count: Option<&usize>| count.is_some_and(|count| *count >= half);
        // A reload may have lowered the limit below the number of open connections, hence `>=`.
        // Those stay open.
        if self.all.len() >= connections_max {
            Some(ConnectionLimit::Total)
        } else if peer.process != 0 && has_half(self.of_process.get(&peer.process)) {
            Some(ConnectionLimit::Process)
        } else if peer.user != own_user && has_half(self.of_user.get(&peer.user)) {
            Some(ConnectionLimit::User)
        } else {
            None
        }
    }

    /// Adds an unauthenticated connection. Returns the one that it replaces at the limit; the
    /// caller closes it.
    pub(super) fn add(
        &mut self,
        connection: &Arc<Connection>,
        is_tenants_user: bool,
    ) -> Option<Arc<Connection>> {
        let peer = connection.peer();
        // All processes of other namespaces have id 0, so they count by their user.
        let is_process_known = is_tenants_user && peer.process != 0;
        let origin =
            if is_process_known { Origin::Process(peer.process) } else { Origin::User(peer.user) };
        // Chosen before the new connection is added, which is therefore never the candidate itself.
        let evicted = self.eviction_candidate().and_then(|id| self.remove(id));
        self.all.insert(connection.id, Arc::clone(connection));
        *self.of_process.entry(peer.process).or_default() += 1;
        *self.of_user.entry(peer.user).or_default() += 1;
        self.unauthenticated.insert(connection.id, origin);
        *self.unauthenticated_of.entry(origin).or_default() += 1;
        evicted
    }

    /// At the limit of unauthenticated connections: the oldest of the origin with the most.
    fn eviction_candidate(&self) -> Option<u64> {
        if self.unauthenticated.len() < UNAUTHENTICATED_MAX {
            return None;
        }
        // At most `UNAUTHENTICATED_MAX` entries, so a scan for each new connection is short.
        let (most, _) = self.unauthenticated_of.iter().max_by_key(|(_, count)| **count)?;
        self.unauthenticated.iter().find(|(_, origin)| *origin == most).map(|(id, _)| *id)
    }

    /// Marks a connection as authenticated. False if it was closed meanwhile.
    pub(super) fn set_authenticated(&mut self, id: u64) -> bool {
        if let Some(origin) = self.unauthenticated.remove(&id) {
            decrement(&mut self.unauthenticated_of, origin);
        }
        self.all.contains_key(&id)
    }

    pub(super) fn remove(&mut self, id: u64) -> Option<Arc<Connection>> {
        let connection = self.all.remove(&id)?;
        // An unauthenticated connection also leaves the counts by origin.
        self.set_authenticated(id);
        let peer = connection.peer();
        decrement(&mut self.of_process, peer.process);
        decrement(&mut self.of_user, peer.user);
        Some(connection)
    }

    /// Connections that have been unauthenticated for longer than the time-out.
    pub(super) fn unauthenticated_for(&self, timeout: Duration) -> Vec<Arc<Connection>> {
        let oldest_first = self.unauthenticated.keys().filter_map(|id| self.all.get(id));
        // Ids count up with time, so the first young connection ends the search.
        oldest_first.take_while(|one| one.age() > timeout).map(Arc::clone).collect()
    }

    pub(super) fn get(&self, id: u64) -> Option<Arc<Connection>> {
        self.all.get(&id).map(Arc::clone)
    }

    pub(super) fn all(&self) -> Vec<Arc<Connection>> {
        self.all.values().map(Arc::clone).collect()
    }
}

/// Decrements a count and removes it at zero.
fn decrement<K: Eq + Hash>(counts: &mut HashMap<K, usize>, key: K) {
    if let Entry::Occupied(mut count) = counts.entry(key) {
        *count.get_mut() -= 1;
        if *count.get() == 0 {
            count.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn connection(id: u64, process: i32, user: u32) -> Arc<Connection> {
        let (stream, _) = UnixStream::pair().expect("descriptors are left");
        let connection =
            Connection::new(id, stream, Peer { process, user, group: 0 }, &Arc::default());
        Arc::new(connection.expect("a socket can be made non-blocking"))
    }

    const OWN: u32 = 1000;

    #[test]
    fn a_connection_beyond_the_limit_replaces_the_oldest_of_the_origin_with_most() {
        let mut connections = Connections::default();
        let limit = UNAUTHENTICATED_MAX as u64;
        assert!(connections.add(&connection(1, 5, OWN), true).is_none());
        for id in 2..=limit {
            assert!(connections.add(&connection(id, 7, OWN), true).is_none());
        }
        let evicted = connections.add(&connection(limit + 1, 9, OWN), true);
        assert_eq!(evicted.map(|one| one.id), Some(2), "the oldest of process 7");
        connections.set_authenticated(3);
        assert!(connections.add(&connection(limit + 2, 9, OWN), true).is_none());
        assert!(connections.get(3).is_some());
        // A user that belongs to no tenant counts once, however many processes it starts.
        for id in 1..=limit {
            connections.add(&connection(1000 + id, 100 + i32::try_from(id).unwrap(), 5), false);
        }
        assert!(connections.get(1).is_some() && connections.get(limit + 2).is_some());
        assert_eq!(connections.unauthenticated.len(), UNAUTHENTICATED_MAX);
    }

    #[test]
    fn a_process_or_a_foreign_user_has_at_most_half_of_the_connections() {
        let mut connections = Connections::default();
        let of = |process, user| Peer { process, user, group: 0 };
        for id in 0..4 {
            connections.add(&connection(id, 7, OWN), true);
        }
        assert_eq!(connections.reached_limit(of(7, OWN), OWN, 8), Some(ConnectionLimit::Process));
        assert_eq!(connections.reached_limit(of(8, OWN), OWN, 8), None);
        connections.add(&connection(4, 8, OWN), true);
        let reached = connections.reached_limit(of(9, OWN), OWN, 8);
        assert_eq!(reached, None, "the node's own user is exempt");
        for id in 0..4 {
            connections.remove(id);
        }
        for id in 10..14 {
            connections.add(&connection(id, 20 + i32::try_from(id).unwrap(), 5), false);
        }
        assert_eq!(connections.reached_limit(of(99, 5), OWN, 8), Some(ConnectionLimit::User));
        assert_eq!(connections.reached_limit(of(99, 6), OWN, 5), Some(ConnectionLimit::Total));
        for id in 0..20 {
            connections.remove(id);
        }
        assert!(connections.of_process.is_empty() && connections.of_user.is_empty());
        assert!(connections.unauthenticated_of.is_empty());
    }
}
