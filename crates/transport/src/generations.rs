//! Numbers of connections, so that a lost connection writes nothing after its successor was made.
//!
//! What a client sent before it gave a connection up may still wait at the server, in a buffer or a
//! thread. So each hello names the earlier connections that the client still uses, and the server
//! ends all others of that client, and waits for their threads, before it welcomes the new one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};

use cascade_runtime::{Condvar, Deadline, LeafMutex, Mutex, MutexGuard, SystemClock};

use crate::TransportError;
use crate::limits::CONNECTIONS_MAX;
use crate::peer::EndpointId;
use crate::stream::Socket;

/// The connections that an endpoint has made.
#[derive(Debug, Default)]
pub(crate) struct Made(Arc<LeafMutex<Numbers>>);

#[derive(Debug, Default)]
struct Numbers {
    last: u64,
    live: BTreeSet<u64>,
}

/// The number of one connection. It counts as used until it is dropped or given up.
#[derive(Debug)]
pub(crate) struct Number {
    number: u64,
    numbers: Arc<LeafMutex<Numbers>>,
}

impl Made {
    /// A number for a new connection, and the earlier ones that are still used.
    pub(crate) fn next(&self) -> Result<(Number, Vec<u64>), TransportError> {
        let mut numbers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let live: Vec<u64> = numbers.live.iter().copied().collect();
        if live.len() >= CONNECTIONS_MAX {
            let (what, value) = ("the number of connections", live.len() + 1);
            return Err(TransportError::TooLarge { what, value, limit: CONNECTIONS_MAX });
        }
        numbers.last += 1;
        let number = numbers.last;
        numbers.live.insert(number);
        Ok((Number { number, numbers: Arc::clone(&self.0) }, live))
    }
}

impl Number {
    pub(crate) fn get(&self) -> u64 {
        self.number
    }

    /// The connection is not used any more: the next one ends it at the server, too.
    pub(crate) fn give_up(&self) {
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner).live.remove(&self.number);
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        self.give_up();
    }
}

/// The connections of peers that this endpoint serves.
#[derive(Debug, Default)]
pub(crate) struct ServedConnections {
    served: Mutex<BTreeMap<(EndpointId, u64), Arc<Socket>>>,
    /// One has ended.
    ended: Condvar,
}

/// A connection of a peer, while its thread may access regions.
#[derive(Debug)]
pub(crate) struct ServedConnection<'a> {
    all: &'a ServedConnections,
    key: (EndpointId, u64),
}

impl ServedConnections {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<(EndpointId, u64), Arc<Socket>>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a connection after those before it that its client does not use any more have ended.
    /// `None` if one of them has not by the deadline, or if the number is taken.
    pub(crate) fn add(
        &self,
        client: EndpointId,
        (number, live): (u64, &[u64]),
        socket: &Arc<Socket>,
        deadline: Deadline,
    ) -> Option<ServedConnection<'_>> {
        let live: BTreeSet<u64> = live.iter().copied().collect();
        let mut served = self.lock();
        loop {
            let earlier = served.range((client, 0)..(client, number));
            let given_up = earlier.filter(|((_, earlier), _)| !live.contains(earlier));
            let sockets: Vec<_> = given_up.map(|(_, socket)| Arc::clone(socket)).collect();
            if sockets.is_empty() {
                break;
            }
            for socket in &sockets {
                socket.shutdown();
            }
            let left = deadline.remaining(&SystemClock);
            if left.is_zero() {
                return None;
            }
            served =
                self.ended.wait_timeout(served, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let key = (client, number);
        if served.contains_key(&key) {
            return None;
        }
        served.insert(key, Arc::clone(socket));
        Some(ServedConnection { all: self, key })
    }
}

impl Drop for ServedConnection<'_> {
    fn drop(&mut self) {
        self.all.lock().remove(&self.key);
        self.all.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_live_until_it_is_given_up() {
        let made = Made::default();
        let (first, live) = made.next().unwrap();
        assert_eq!((first.get(), &*live), (1, &[][..]));
        let (second, live) = made.next().unwrap();
        assert_eq!(live, [1]);
        first.give_up();
        let (third, live) = made.next().unwrap();
        assert_eq!((third.get(), &*live), (3, &[2][..]));
        drop((first, second));
        assert_eq!(made.next().unwrap().1, [3]);
    }

    #[test]
    fn the_number_of_live_connections_is_limited() {
        let made = Made::default();
        let mut all: Vec<_> = (0..CONNECTIONS_MAX).map(|_| made.next().unwrap()).collect();
        assert!(matches!(made.next(), Err(TransportError::TooLarge { .. })));
        all.pop();
        made.next().unwrap();
    }
}
