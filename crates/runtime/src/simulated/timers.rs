//! Virtual timers, in the order in which they are due.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// Timers of waits. One whose wait has ended otherwise stays until it is due or removed with other
/// stale ones.
#[derive(Default)]
pub(super) struct Timers {
    heap: BinaryHeap<Reverse<Timer>>,
    set: u64,
}

/// Ordered by time, then by the order in which they were set.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Timer {
    pub(super) due_ns: u64,
    number: u64,
    pub(super) thread: u32,
    pub(super) generation: u32,
}

impl Timers {
    pub(super) fn set(&mut self, due_ns: u64, thread: u32, generation: u32) {
        self.set += 1;
        self.heap.push(Reverse(Timer { due_ns, number: self.set, thread, generation }));
    }

    /// How many there are, stale ones included.
    pub(super) fn count(&self) -> usize {
        self.heap.len()
    }

    pub(super) fn retain(&mut self, mut is_kept: impl FnMut(Timer) -> bool) {
        self.heap.retain(|Reverse(timer)| is_kept(*timer));
    }

    pub(super) fn first(&self) -> Option<Timer> {
        self.heap.peek().map(|Reverse(timer)| *timer)
    }

    pub(super) fn remove_first(&mut self) {
        self.heap.pop();
    }
}

/// Beyond 584 years, a time is the end of time.
pub(super) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_come_in_the_order_of_their_times_and_then_of_their_setting() {
        let mut timers = Timers::default();
        for (due_ns, thread) in [(5, 1), (3, 2), (5, 0), (3, 4)] {
            timers.set(due_ns, thread, 0);
        }
        timers.retain(|timer| timer.thread != 4);
        let mut order = Vec::new();
        while let Some(timer) = timers.first() {
            order.push((timer.due_ns, timer.thread));
            timers.remove_first();
        }
        assert_eq!(order, [(3, 2), (5, 1), (5, 0)]);
    }
}
