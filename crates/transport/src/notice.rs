//! Notices: what a peer says after the bytes of a batch have arrived.

use std::collections::{BTreeMap, VecDeque};
use std::sync::PoisonError;

use cascade_runtime::{Condvar, Deadline, Mutex, MutexGuard, SystemClock};

use crate::peer::EndpointId;

/// A peer's message that came with a batch. The batch's bytes have arrived before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// Who sent it.
    pub from: EndpointId,
    /// What the peer posted with the batch.
    pub bytes: Box<[u8]>,
}

/// The notices that wait to be read.
#[derive(Debug)]
pub(crate) struct Notices {
    queue: Mutex<Queue>,
    arrived: Condvar,
    most: usize,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Notice>,
    /// Places of notices whose bytes are still moving.
    reserved: usize,
    /// Notices and places of each peer that has any.
    of_peer: BTreeMap<EndpointId, usize>,
}

impl Queue {
    fn len(&self) -> usize {
        self.waiting.len() + self.reserved
    }

    fn remove_one_of(&mut self, peer: EndpointId) {
        if let Some(count) = self.of_peer.get_mut(&peer) {
            *count -= 1;
            if *count == 0 {
                self.of_peer.remove(&peer);
            }
        }
    }
}

/// A place for one notice. Filled with it, or given up when it is dropped.
#[derive(Debug)]
pub(crate) struct NoticePlace<'a> {
    all: &'a Notices,
    peer: EndpointId,
    is_filled: bool,
}

impl Notices {
    pub(crate) fn new(most: usize) -> Self {
        Self { queue: Mutex::default(), arrived: Condvar::new(), most }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a notice of a peer, unless too many wait. A peer gets one while it has fewer
    /// than are free: so one peer has at most half of all places, and others get theirs.
    pub(crate) fn reserve(&self, peer: EndpointId) -> Option<NoticePlace<'_>> {
        let mut queue = self.lock();
        let free = self.most.saturating_sub(queue.len());
        let taken = queue.of_peer.get(&peer).copied().unwrap_or_default();
        (taken < free).then(|| {
            queue.reserved += 1;
            *queue.of_peer.entry(peer).or_default() += 1;
            NoticePlace { all: self, peer, is_filled: false }
        })
    }

    /// The oldest notice, unless none arrives by the deadline.
    pub(crate) fn next(&self, deadline: Deadline) -> Option<Notice> {
        let mut queue = self.lock();
        loop {
            if let Some(notice) = queue.waiting.pop_front() {
                queue.remove_one_of(notice.from);
                return Some(notice);
            }
            let left = deadline.remaining(&SystemClock);
            if left.is_zero() {
                return None;
            }
            let waited = self.arrived.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl NoticePlace<'_> {
    /// Hands over the notice. Its bytes have arrived.
    pub(crate) fn fill(mut self, bytes: Box<[u8]>) {
        self.is_filled = true;
        {
            let mut queue = self.all.lock();
            queue.reserved -= 1;
            queue.waiting.push_back(Notice { from: self.peer, bytes });
        }
        self.all.arrived.notify_one();
    }
}

impl Drop for NoticePlace<'_> {
    fn drop(&mut self) {
        if !self.is_filled {
            let mut queue = self.all.lock();
            queue.reserved -= 1;
            queue.remove_one_of(self.peer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: EndpointId = EndpointId([1; 16]);
    const SECOND: EndpointId = EndpointId([2; 16]);

    fn next(notices: &Notices) -> Option<EndpointId> {
        notices.next(Deadline::at(cascade_runtime::now())).map(|notice| notice.from)
    }

    #[test]
    fn a_reserved_place_counts_until_it_is_given_up() {
        let notices = Notices::new(4);
        notices.reserve(FIRST).unwrap().fill((*b"layer 0").into());
        let place = notices.reserve(FIRST).unwrap();
        assert!(notices.reserve(FIRST).is_none());
        drop(place);
        drop(notices.reserve(FIRST).unwrap());
        let bytes = (*b"layer 0").into();
        let now = Deadline::at(cascade_runtime::now());
        assert_eq!(notices.next(now), Some(Notice { from: FIRST, bytes }));
        assert_eq!(notices.next(now), None);
        assert!(notices.lock().of_peer.is_empty());
    }

    #[test]
    fn a_peer_that_sends_much_leaves_places_for_others() {
        let notices = Notices::new(9);
        let fill = |peer| {
            let places = std::iter::from_fn(|| notices.reserve(peer));
            places.map(|place| place.fill(Box::default())).count()
        };
        assert_eq!(fill(FIRST), 5);
        assert_eq!(fill(SECOND), 2);
        assert_eq!(next(&notices), Some(FIRST));
        assert_eq!(fill(FIRST), 0);
        assert_eq!(fill(SECOND), 1);
        assert_eq!(std::iter::from_fn(|| next(&notices)).count(), 7);
        assert_eq!(fill(SECOND), 5);
    }

    #[test]
    fn one_place_is_for_anyone() {
        let notices = Notices::new(1);
        notices.reserve(FIRST).unwrap().fill(Box::default());
        assert!(notices.reserve(SECOND).is_none());
        assert_eq!(next(&notices), Some(FIRST));
        assert!(notices.reserve(SECOND).is_some());
    }
}
