//! Places for connections of peers: no peer and no host takes all of an endpoint's.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::{MutexGuard, PoisonError};

use cascade_runtime::LeafMutex;

use crate::peer::EndpointId;

/// The host of a connection: the first half of an IPv6 address, whose other half its host chooses,
/// or all of an IPv4 address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct HostAddress([u8; 8]);

impl From<IpAddr> for HostAddress {
    fn from(address: IpAddr) -> Self {
        let mut bytes = [0; 8];
        match address {
            IpAddr::V4(address) => bytes[..4].copy_from_slice(&address.octets()),
            IpAddr::V6(address) => bytes.copy_from_slice(&address.octets()[..8]),
        }
        Self(bytes)
    }
}

/// Who has places. A peer can invent endpoints, but not addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Holder {
    Endpoint(EndpointId),
    Host(HostAddress),
}

/// The places for connections of one endpoint.
#[derive(Debug)]
pub(crate) struct Places {
    most: usize,
    taken: LeafMutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    of_holder: BTreeMap<Holder, usize>,
}

/// A place for one connection, until it is dropped.
#[derive(Debug)]
pub(crate) struct ConnectionPlace<'a> {
    places: &'a Places,
    holders: [Option<Holder>; 2],
}

/// Why there is no place.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NoPlace {
    /// All are taken.
    AllTaken { most: usize },
    /// The endpoint or its host has as many as are free.
    Share { whose: &'static str, taken: usize, free: usize },
}

impl fmt::Display for NoPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllTaken { most } => {
                write!(f, "it serves {most} connections, which is its limit; close some of them")
            }
            Self::Share { whose, taken, free } => write!(
                f,
                "{whose} has {taken} connections to it, and {free} places are free there: one peer \
                 may have as many as are free; close some, or use fewer streams"
            ),
        }
    }
}

impl Places {
    pub(crate) fn new(most: usize) -> Self {
        Self { most, taken: LeafMutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a connection of a peer. It gets one while it has fewer than are free, and its
    /// host has: so one peer has at most half of all places, and others get theirs.
    pub(crate) fn reserve(
        &self,
        peer: EndpointId,
        host: Option<HostAddress>,
    ) -> Result<ConnectionPlace<'_>, NoPlace> {
        let mut taken = self.lock();
        let free = self.most.saturating_sub(taken.all);
        if free == 0 {
            return Err(NoPlace::AllTaken { most: self.most });
        }
        let endpoint = (Holder::Endpoint(peer), "this endpoint");
        let host = host.map(|host| (Holder::Host(host), "this host"));
        for (holder, whose) in [Some(endpoint), host].into_iter().flatten() {
            let taken = taken.of_holder.get(&holder).copied().unwrap_or_default();
            if taken >= free {
                return Err(NoPlace::Share { whose, taken, free });
            }
        }
        let holders = [Some(endpoint.0), host.map(|(holder, _)| holder)];
        taken.all += 1;
        for holder in holders.into_iter().flatten() {
            *taken.of_holder.entry(holder).or_default() += 1;
        }
        Ok(ConnectionPlace { places: self, holders })
    }
}

impl Drop for ConnectionPlace<'_> {
    fn drop(&mut self) {
        let mut taken = self.places.lock();
        taken.all -= 1;
        for holder in self.holders.into_iter().flatten() {
            if let Some(count) = taken.of_holder.get_mut(&holder) {
                *count -= 1;
                if *count == 0 {
                    taken.of_holder.remove(&holder);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: EndpointId = EndpointId([1; 16]);
    const SECOND: EndpointId = EndpointId([2; 16]);

    fn host(last: u8) -> HostAddress {
        IpAddr::from([192, 0, 2, last]).into()
    }

    #[test]
    fn a_peer_leaves_places_for_others() {
        let places = Places::new(9);
        let take = |peer, host| -> Vec<_> {
            std::iter::from_fn(|| places.reserve(peer, host).ok()).collect()
        };
        let first = take(FIRST, None);
        assert_eq!(first.len(), 5);
        let share = NoPlace::Share { whose: "this endpoint", taken: 5, free: 4 };
        assert_eq!(places.reserve(FIRST, None).unwrap_err(), share);
        let second = take(SECOND, None);
        assert_eq!(second.len(), 2);
        drop((first, second));
        assert!(places.lock().of_holder.is_empty());
        assert_eq!(take(SECOND, None).len(), 5);
    }

    #[test]
    fn a_host_with_many_endpoints_leaves_places_for_others() {
        let places = Places::new(8);
        let invented = (10..).map(|id| places.reserve(EndpointId([id; 16]), Some(host(1))));
        let taken: Vec<_> = invented.map_while(Result::ok).collect();
        assert_eq!(taken.len(), 4);
        let share = NoPlace::Share { whose: "this host", taken: 4, free: 4 };
        assert_eq!(places.reserve(FIRST, Some(host(1))).unwrap_err(), share);
        assert!(share.to_string().contains("this host has 4 connections to it"), "{share}");
        let _other = places.reserve(FIRST, Some(host(2))).unwrap();
    }

    #[test]
    fn the_last_place_is_for_anyone() {
        let places = Places::new(1);
        let place = places.reserve(FIRST, Some(host(1))).unwrap();
        let full = NoPlace::AllTaken { most: 1 };
        assert_eq!(places.reserve(SECOND, Some(host(2))).unwrap_err(), full);
        drop(place);
        places.reserve(SECOND, Some(host(2))).unwrap();
    }
}
