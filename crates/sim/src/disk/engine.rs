//! The I/O engine of a simulated disk: several transfers in flight, each ends in its own time.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use cascade_disk::io::{Transfer, TransferEngine, TransferOutcome, TransferQueue};
use cascade_runtime::thread::Builder;
use cascade_runtime::{Clock, Deadline, LeafMutex, now, sleep};

use super::{SimDisk, wait_until};

/// Late calls at which further ones time out at once, as with `io_uring`.
const LATE_CALLS_MAX: u64 = 32;

/// Transfers between memory and a simulated disk.
#[derive(Debug)]
pub(super) struct SimEngine {
    disk: SimDisk,
    clock: Arc<dyn Clock>,
    queue_depth: usize,
    /// Calls with transfers that end after their deadline.
    late: Arc<AtomicU64>,
    /// Late calls for which no thread could be started.
    without_thread: LeafMutex<Vec<LateTransfers>>,
}

/// Transfers in flight, by the time at which they end and their number on the device.
type InOrder<T> = BTreeMap<(Duration, u64), T>;

/// Transfers whose caller has reported a time-out. The buffers belong to the device until they end.
type LateTransfers = InOrder<Transfer>;

impl SimEngine {
    pub(super) fn new(disk: SimDisk, clock: Arc<dyn Clock>, queue_depth: usize) -> Self {
        let queue_depth = queue_depth.max(1);
        Self {
            disk,
            clock,
            queue_depth,
            late: Arc::default(),
            without_thread: LeafMutex::default(),
        }
    }

    /// Ends late transfers in their time, on a thread of their own.
    fn finish_late(&self, transfers: LateTransfers) {
        let slot = Arc::new(LeafMutex::new(Some(transfers)));
        let (taken, disk, late) = (Arc::clone(&slot), self.disk.clone(), Arc::clone(&self.late));
        let finish = move || {
            let transfers = taken.lock().unwrap_or_else(PoisonError::into_inner).take();
            for ((due, number), mut transfer) in transfers.into_iter().flatten() {
                wait_until(due);
                // Nothing waits for the result any longer.
                drop(disk.device().end_transfer(number, &mut transfer, now()));
            }
            late.fetch_sub(1, Ordering::Relaxed);
        };
        if Builder::new().name("sim-late-io".to_owned()).spawn(finish).is_err() {
            // The next call tries again. Until then the device keeps the buffers.
            let transfers = slot.lock().unwrap_or_else(PoisonError::into_inner).take();
            let mut waiting = self.without_thread.lock().unwrap_or_else(PoisonError::into_inner);
            waiting.extend(transfers);
        }
    }

    fn retry_late(&self) {
        let mut waiting = self.without_thread.lock().unwrap_or_else(PoisonError::into_inner);
        let retried = std::mem::take(&mut *waiting);
        drop(waiting);
        for transfers in retried {
            self.finish_late(transfers);
        }
    }
}

impl TransferEngine for SimEngine {
    fn name(&self) -> &'static str {
        "simulated"
    }

    fn stuck_calls(&self) -> u64 {
        self.late.load(Ordering::Relaxed)
    }

    fn run(&self, queue: &mut dyn TransferQueue, deadline: Deadline) {
        self.retry_late();
        if self.stuck_calls() >= LATE_CALLS_MAX {
            return refuse_all(queue);
        }
        let mut in_flight: InOrder<(usize, Transfer)> = BTreeMap::new();
        loop {
            while in_flight.len() < self.queue_depth {
                let Some((number, mut transfer)) = queue.next_transfer() else { break };
                let (started, due) = self.disk.device().begin_transfer(&mut transfer, now());
                in_flight.insert((due, started), (number, transfer));
            }
            let Some((&(due, started), _)) = in_flight.first_key_value() else { return };
            let until_due = due.saturating_sub(now());
            if until_due.is_zero() {
                let (number, mut transfer) =
                    in_flight.remove(&(due, started)).expect("it is the first");
                let result = self.disk.device().end_transfer(started, &mut transfer, now());
                queue.complete(number, TransferOutcome { transfer: Some(transfer), result });
                continue;
            }
            let left = deadline.remaining(&*self.clock);
            if left.is_zero() {
                break;
            }
            if queue.idle() {
                continue;
            }
            sleep(until_due.min(self.clock.wait_at_most(left)));
        }
        let mut late = LateTransfers::new();
        let mut numbers = Vec::new();
        for (key, (number, transfer)) in in_flight {
            self.disk.device().mark_late(key.1);
            late.insert(key, transfer);
            numbers.push(number);
        }
        self.late.fetch_add(1, Ordering::Relaxed);
        self.finish_late(late);
        for number in numbers {
            let result = Err(io::ErrorKind::TimedOut.into());
            queue.complete(number, TransferOutcome { transfer: None, result });
        }
    }
}

/// Completes all transfers without starting them.
fn refuse_all(queue: &mut dyn TransferQueue) {
    while let Some((number, transfer)) = queue.next_transfer() {
        let result = Err(io::ErrorKind::TimedOut.into());
        queue.complete(number, TransferOutcome { transfer: Some(transfer), result });
    }
}
