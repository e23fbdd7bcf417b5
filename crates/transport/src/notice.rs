//! Notices: what a peer says after the bytes of a batch have arrived.

use std::collections::VecDeque;
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
}

/// A place for one notice.
#[derive(Debug)]
pub(crate) struct NoticePlace<'a>(&'a Notices);

impl Notices {
    pub(crate) fn new(most: usize) -> Self {
        Self { queue: Mutex::default(), arrived: Condvar::new(), most }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a notice, unless too many wait.
    pub(crate) fn reserve(&self) -> Option<NoticePlace<'_>> {
        let mut queue = self.lock();
        let has_room = queue.waiting.len() + queue.reserved < self.most;
        has_room.then(|| {
            queue.reserved += 1;
            NoticePlace(self)
        })
    }

    /// The oldest notice, unless none arrives by the deadline.
    pub(crate) fn next(&self, deadline: Deadline) -> Option<Notice> {
        let mut queue = self.lock();
        loop {
            if let Some(notice) = queue.waiting.pop_front() {
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
    pub(crate) fn fill(self, notice: Notice) {
        self.0.lock().waiting.push_back(notice);
        self.0.arrived.notify_one();
    }
}

impl Drop for NoticePlace<'_> {
    fn drop(&mut self) {
        self.0.lock().reserved -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notice() -> Notice {
        Notice { from: EndpointId([0; 16]), bytes: (*b"layer 0").into() }
    }

    #[test]
    fn a_reserved_place_counts_until_it_is_given_up() {
        let notices = Notices::new(2);
        notices.reserve().unwrap().fill(notice());
        let place = notices.reserve().unwrap();
        assert!(notices.reserve().is_none());
        drop(place);
        assert!(notices.reserve().is_some());
        let now = Deadline::at(cascade_runtime::now());
        assert_eq!(notices.next(now), Some(notice()));
        assert_eq!(notices.next(now), None);
    }
}
