//! Records of how long calls hold the lock of a store.

use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use cascade_runtime::{LeafMutex, now, thread_cpu_time};
use cascade_tier::HoldTimes;

/// Most holds that are kept until the next [`HoldRecorder::take`]; later ones are dropped.
const HOLDS_MAX: usize = 1 << 21;

/// One hold of the store's lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hold {
    /// CPU time of the thread while it held the lock.
    pub cpu: Duration,
    /// Time on the clock. Where it is much more than `cpu`, the thread was preempted.
    pub time: Duration,
    /// Keys that were looked up, changed, evicted or removed in it.
    pub keys: u64,
    /// The line of the store that took the lock.
    pub at: &'static Location<'static>,
}

/// A hold that has not ended.
#[derive(Debug)]
pub(crate) struct BegunHold {
    at: &'static Location<'static>,
    /// On the clock.
    time: Duration,
    /// CPU time of the thread.
    cpu: Duration,
}

/// Records every hold of a store's lock, for measurements and tests. Clones share the records.
///
/// It reads the thread's CPU time twice for each hold, which costs more than a short call.
#[derive(Debug, Clone, Default)]
pub struct HoldRecorder(Arc<Records>);

#[derive(Debug, Default)]
struct Records {
    /// Keys of the current hold. Only the thread that holds the lock changes it.
    keys: AtomicU64,
    holds: LeafMutex<Vec<Hold>>,
}

impl HoldRecorder {
    /// A recorder without records.
    pub fn new() -> Self {
        Self::default()
    }

    /// The holds that have ended since the last call.
    pub fn take(&self) -> Vec<Hold> {
        let mut holds = self.0.holds.lock().unwrap_or_else(PoisonError::into_inner);
        // With room for as many again, so that recording rarely allocates during a measurement.
        let room = holds.capacity().min(HOLDS_MAX);
        std::mem::replace(&mut *holds, Vec::with_capacity(room))
    }

    /// Begins a hold.
    pub(crate) fn begin(&self, at: &'static Location<'static>) -> BegunHold {
        self.0.keys.store(0, Ordering::Relaxed);
        BegunHold { at, time: now(), cpu: thread_cpu_time() }
    }

    /// Counts keys of the current hold.
    pub(crate) fn count(&self, keys: u32) {
        self.0.keys.fetch_add(u64::from(keys), Ordering::Relaxed);
    }

    /// Ends a hold.
    pub(crate) fn end(&self, began: &BegunHold) {
        let cpu = thread_cpu_time().saturating_sub(began.cpu);
        let time = now().saturating_sub(began.time);
        let keys = self.0.keys.load(Ordering::Relaxed);
        let mut holds = self.0.holds.lock().unwrap_or_else(PoisonError::into_inner);
        if holds.len() < HOLDS_MAX {
            holds.push(Hold { cpu, time, keys, at: began.at });
        }
    }
}

impl PartialEq for HoldRecorder {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for HoldRecorder {}

/// Counts the times of holds without a lock of its own.
#[derive(Debug, Default)]
pub(crate) struct HoldCounters {
    counts: [AtomicU64; HoldTimes::BOUNDS_US.len() + 1],
    sum_ns: AtomicU64,
}

impl HoldCounters {
    pub(crate) fn count(&self, time: Duration) {
        let class =
            HoldTimes::BOUNDS_US.partition_point(|bound| Duration::from_micros(*bound) < time);
        self.counts[class].fetch_add(1, Ordering::Relaxed);
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.sum_ns.fetch_add(nanos, Ordering::Relaxed);
    }

    pub(crate) fn times(&self) -> HoldTimes {
        HoldTimes {
            counts: self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect(),
            sum_ns: self.sum_ns.load(Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_time_counts_in_the_first_class_that_includes_it() {
        let counters = HoldCounters::default();
        for us in [1, 50, 51, 200, 2_000_000] {
            counters.count(Duration::from_micros(us));
        }
        let times = counters.times();
        assert_eq!(times.counts, [2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(times.sum_ns, 2_000_302_000);
    }

    #[test]
    fn holds_are_returned_once() {
        let recorder = HoldRecorder::new();
        let at = Location::caller();
        let began = recorder.begin(at);
        recorder.count(3);
        recorder.count(4);
        recorder.end(&began);
        let holds = recorder.take();
        assert_eq!(holds.iter().map(|hold| (hold.keys, hold.at)).collect::<Vec<_>>(), [(7, at)]);
        assert_eq!(recorder.take(), []);
    }
}
