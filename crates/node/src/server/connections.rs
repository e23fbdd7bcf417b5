//! The open connections, and how many each process and user has of them.
//!
//! A connection that has not said hello costs a place of those kept for such connections. When none
//! is left, the oldest of whoever has most of them is closed: a newcomer gets in at once.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use super::connection::Connection;
use super::session::Peer;

/// Connections that may be open without having said hello.
pub(super) const UNAUTHENTICATED_MAX: usize = 256;

/// Whose an unauthenticated connection is: a process of a tenant's user, or another user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Origin {
    Process(i32),
    User(u32),
}

/// Why a connection is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Full {
    /// `connections_max` are open.
    All,
    /// The process has half of them.
    Process,
    /// The user, who is not the node's own, has half of them.
    User,
}

impl Full {
    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::All => "connections_max are all open",
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
    /// Those that have not said hello, oldest first: numbers count up.
    unauthenticated: BTreeMap<u64, Origin>,
    unauthenticated_of: HashMap<Origin, usize>,
}

impl Connections {
    /// Whether one more of this peer is too many. Processes of other process namespaces have no
    /// number here that could tell them apart.
    pub(super) fn is_full(&self, peer: Peer, own_user: u32, most: usize) -> Option<Full> {
        let half = most.div_ceil(2);
        let has = |count: Option<&usize>| count.is_some_and(|count| *count >= half);
        if self.all.len() >= most {
            Some(Full::All)
        } else if peer.process != 0 && has(self.of_process.get(&peer.process)) {
            Some(Full::Process)
        } else if peer.user != own_user && has(self.of_user.get(&peer.user)) {
            Some(Full::User)
        } else {
            None
        }
    }

    /// Adds a connection that has not said hello. Returns one that is to be closed for it.
    pub(super) fn add(
        &mut self,
        connection: &Arc<Connection>,
        is_tenants_user: bool,
    ) -> Option<Arc<Connection>> {
        let peer = connection.peer();
        let is_known = is_tenants_user && peer.process != 0;
        let origin = if is_known { Origin::Process(peer.process) } else { Origin::User(peer.user) };
        let evicted = self.one_to_evict().and_then(|id| self.remove(id));
        self.all.insert(connection.id, Arc::clone(connection));
        *self.of_process.entry(peer.process).or_default() += 1;
        *self.of_user.entry(peer.user).or_default() += 1;
        self.unauthenticated.insert(connection.id, origin);
        *self.unauthenticated_of.entry(origin).or_default() += 1;
        evicted
    }

    /// When there is no place for another unauthenticated connection: the oldest of the origin
    /// that has most.
    fn one_to_evict(&self) -> Option<u64> {
        if self.unauthenticated.len() < UNAUTHENTICATED_MAX {
            return None;
        }
        let (most, _) = self.unauthenticated_of.iter().max_by_key(|(_, count)| **count)?;
        self.unauthenticated.iter().find(|(_, origin)| *origin == most).map(|(id, _)| *id)
    }

    /// The connection said who it is. False if it was closed meanwhile.
    pub(super) fn note_authenticated(&mut self, id: u64) -> bool {
        if let Some(origin) = self.unauthenticated.remove(&id) {
            count_down(&mut self.unauthenticated_of, origin);
        }
        self.all.contains_key(&id)
    }

    pub(super) fn remove(&mut self, id: u64) -> Option<Arc<Connection>> {
        let connection = self.all.remove(&id)?;
        self.note_authenticated(id);
        let peer = connection.peer();
        count_down(&mut self.of_process, peer.process);
        count_down(&mut self.of_user, peer.user);
        Some(connection)
    }

    /// Those that have said nothing for so long.
    pub(super) fn silent_for(&self, longer_than: Duration) -> Vec<Arc<Connection>> {
        let oldest_first = self.unauthenticated.keys().filter_map(|id| self.all.get(id));
        oldest_first.take_while(|one| one.age() > longer_than).map(Arc::clone).collect()
    }

    pub(super) fn get(&self, id: u64) -> Option<Arc<Connection>> {
        self.all.get(&id).map(Arc::clone)
    }

    pub(super) fn all(&self) -> Vec<Arc<Connection>> {
        self.all.values().map(Arc::clone).collect()
    }
}

fn count_down<K: Eq + Hash>(counts: &mut HashMap<K, usize>, of: K) {
    if let Entry::Occupied(mut count) = counts.entry(of) {
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
        Arc::new(connection.expect("it can be made not to block"))
    }

    const OWN: u32 = 1000;

    #[test]
    fn a_newcomer_displaces_the_oldest_of_whoever_has_most() {
        let mut connections = Connections::default();
        let most = UNAUTHENTICATED_MAX as u64;
        assert!(connections.add(&connection(1, 5, OWN), true).is_none());
        for id in 2..=most {
            assert!(connections.add(&connection(id, 7, OWN), true).is_none());
        }
        let evicted = connections.add(&connection(most + 1, 9, OWN), true);
        assert_eq!(evicted.map(|one| one.id), Some(2), "not the oldest of all, which is alone");
        connections.note_authenticated(3);
        assert!(connections.add(&connection(most + 2, 9, OWN), true).is_none());
        assert!(connections.get(3).is_some());
        // Users who are no tenant count together, however many processes they start.
        for id in 1..=most {
            connections.add(&connection(1000 + id, 100 + i32::try_from(id).unwrap(), 5), false);
        }
        assert!(connections.get(1).is_some() && connections.get(most + 2).is_some());
        assert_eq!(connections.unauthenticated.len(), UNAUTHENTICATED_MAX);
    }

    #[test]
    fn one_process_and_one_foreign_user_have_half_at_most() {
        let mut connections = Connections::default();
        let of = |process, user| Peer { process, user, group: 0 };
        for id in 0..4 {
            connections.add(&connection(id, 7, OWN), true);
        }
        assert_eq!(connections.is_full(of(7, OWN), OWN, 8), Some(Full::Process));
        assert_eq!(connections.is_full(of(8, OWN), OWN, 8), None);
        connections.add(&connection(4, 8, OWN), true);
        assert_eq!(connections.is_full(of(9, OWN), OWN, 8), None, "the node's own user has all");
        for id in 0..4 {
            connections.remove(id);
        }
        for id in 10..14 {
            connections.add(&connection(id, 20 + i32::try_from(id).unwrap(), 5), false);
        }
        assert_eq!(connections.is_full(of(99, 5), OWN, 8), Some(Full::User));
        assert_eq!(connections.is_full(of(99, 6), OWN, 5), Some(Full::All));
        for id in 0..20 {
            connections.remove(id);
        }
        assert!(connections.of_process.is_empty() && connections.of_user.is_empty());
        assert!(connections.unauthenticated_of.is_empty());
    }
}
