//! A manual clock that can pass a deadline between two readings, and keep the lock of a store.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{JoinHandle, ThreadId};
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_runtime::{Clock, Deadline, LeafMutex, ManualClock, SystemClock};
use cascade_store::Store;

/// Real time that a thread may take to get where the other one waits for it.
const LIMIT: Duration = Duration::from_secs(60);
const UNPOISONED: &str = "no test panics with this lock";

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct LateClock {
    manual: ManualClock,
    /// The thread after whose next reading the time passes, and how much of it.
    passes_after: LeafMutex<Option<(ThreadId, Duration)>>,
    /// The thread that stops when it asks for the time of day, and who waits for that.
    stops: LeafMutex<Option<(ThreadId, mpsc::Sender<()>)>>,
    is_released: AtomicBool,
}

impl LateClock {
    pub(crate) fn advance(&self, by: Duration) {
        self.manual.advance(by);
    }

    /// Advances the clock right after the next reading of the calling thread.
    pub(crate) fn advance_after_reading(&self, by: Duration) {
        *self.passes_after.lock().expect(UNPOISONED) = Some((std::thread::current().id(), by));
    }

    /// Returns once another thread has the lock of a store that has this clock: a deletion asks for
    /// the time of day under the lock.
    pub(crate) fn hold_lock(self: &Arc<Self>, store: &Arc<Store>) -> JoinHandle<()> {
        let (stopped, is_stopped) = mpsc::channel();
        let (clock, store) = (Arc::clone(self), Arc::clone(store));
        let holder = std::thread::spawn(move || {
            let stops = Some((std::thread::current().id(), stopped));
            *clock.stops.lock().expect(UNPOISONED) = stops;
            // No store has this key.
            store.delete(&[BlockKey::from_bytes([0xfd; 32])]);
        });
        is_stopped.recv_timeout(LIMIT).expect("a deletion asks for the time of day");
        holder
    }

    pub(crate) fn release_lock(&self) {
        self.is_released.store(true, Ordering::SeqCst);
    }
}

impl Clock for LateClock {
    fn monotonic(&self) -> Duration {
        let now = self.manual.monotonic();
        let me = std::thread::current().id();
        let passes = self.passes_after.lock().expect(UNPOISONED).take_if(|it| it.0 == me);
        if let Some((_, by)) = passes {
            self.manual.advance(by);
        }
        now
    }

    fn unix_ms(&self) -> u64 {
        let me = std::thread::current().id();
        let stops = self.stops.lock().expect(UNPOISONED).take_if(|it| it.0 == me);
        if let Some((_, stopped)) = stops {
            stopped.send(()).expect("a thread waits for the lock to be held");
            let limit = Deadline::after(&SystemClock, LIMIT);
            while !self.is_released.load(Ordering::SeqCst) {
                assert!(!limit.has_passed(&SystemClock), "waited in vain for `release_lock`");
                std::thread::yield_now();
            }
        }
        self.manual.unix_ms()
    }
}
