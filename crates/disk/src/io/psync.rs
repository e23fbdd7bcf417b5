//! The portable I/O engine: `preadv` and `pwritev` on worker threads.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use cascade_block::{Clock, Deadline};
use rustix::io::{preadv, pwritev};

use super::{
    Transfer, TransferEngine, TransferKind, TransferOutcome, TransferQueue, WorkerThreads,
};

/// Reads and writes with blocking system calls, several at once on worker threads.
#[derive(Debug)]
pub struct PsyncEngine {
    workers: Arc<WorkerThreads>,
    /// Separate threads for reads, so that hung writes do not block them.
    read_workers: Arc<WorkerThreads>,
    in_flight_max: usize,
    clock: Arc<dyn Clock>,
    /// Transfers that a thread still executes after the deadline of their call.
    stuck: Arc<AtomicU64>,
}

/// The completions of one call. A late completion is dropped together with this value.
#[derive(Debug, Default)]
struct Completions {
    list: Mutex<CompletionList>,
    is_added: Condvar,
}

#[derive(Debug, Default)]
struct CompletionList {
    outcomes: Vec<(usize, TransferOutcome)>,
    /// The call has returned and reads the list no longer.
    is_closed: bool,
}

/// A transfer until a worker starts it. At the deadline the caller takes it back if it is still
/// here.
type QueuedTransfer = Arc<Mutex<Option<Transfer>>>;

impl PsyncEngine {
    /// An engine with at most `queue_depth` transfers in flight per call, and at most as many as
    /// there are threads.
    pub fn new(
        workers: Arc<WorkerThreads>,
        read_workers: Arc<WorkerThreads>,
        queue_depth: u32,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let in_flight_max = workers.threads_max().min(queue_depth as usize);
        Self { workers, read_workers, in_flight_max, clock, stuck: Arc::default() }
    }

    fn submit(
        &self,
        number: usize,
        kind: TransferKind,
        queued: &QueuedTransfer,
        completions: &Arc<Completions>,
    ) -> io::Result<()> {
        let workers = if kind == TransferKind::Read { &self.read_workers } else { &self.workers };
        let (queued, completions) = (Arc::clone(queued), Arc::clone(completions));
        let stuck = Arc::clone(&self.stuck);
        workers.submit(Box::new(move || {
            // At the deadline the caller takes the transfer too. Only one of them gets it, so a
            // cancelled transfer is never executed.
            let taken = queued.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(mut transfer) = taken {
                let result = execute(&mut transfer);
                if !completions.add(number, TransferOutcome { transfer: Some(transfer), result }) {
                    stuck.fetch_sub(1, Ordering::Relaxed);
                }
            }
        }))
    }
}

impl TransferEngine for PsyncEngine {
    fn name(&self) -> &'static str {
        "psync"
    }

    fn stuck_calls(&self) -> u64 {
        self.stuck.load(Ordering::Relaxed)
    }

    fn run(&self, queue: &mut dyn TransferQueue, deadline: Deadline) {
        let completions = Arc::new(Completions::default());
        let mut in_flight: HashMap<usize, QueuedTransfer> = HashMap::new();
        loop {
            while in_flight.len() < self.in_flight_max {
                let Some((number, transfer)) = queue.next_transfer() else { break };
                let kind = transfer.kind;
                let queued = Arc::new(Mutex::new(Some(transfer)));
                match self.submit(number, kind, &queued, &completions) {
                    Ok(()) => drop(in_flight.insert(number, queued)),
                    // No worker has it, so the transfer returns with its buffers.
                    Err(error) => queue.complete(number, cancel(&queued, error)),
                }
            }
            if in_flight.is_empty() {
                return;
            }
            let Some(completed) = completions.wait(deadline, self.clock.as_ref()) else { break };
            for (number, outcome) in completed {
                in_flight.remove(&number);
                queue.complete(number, outcome);
            }
        }
        // From here on each completion subtracts one from `stuck`. Below, one is added for each
        // transfer that had not completed by now.
        let completed = completions.close();
        for (number, queued) in in_flight {
            let outcome = cancel(&queued, io::ErrorKind::TimedOut.into());
            if outcome.transfer.is_none() && !completed.contains(&number) {
                self.stuck.fetch_add(1, Ordering::Relaxed);
            }
            queue.complete(number, outcome);
        }
    }
}

/// Takes a transfer back unless a worker has started it.
fn cancel(queued: &QueuedTransfer, error: io::Error) -> TransferOutcome {
    let transfer = queued.lock().unwrap_or_else(PoisonError::into_inner).take();
    TransferOutcome { transfer, result: Err(error) }
}

impl Completions {
    /// Adds a completion. Returns false if the call has already returned.
    fn add(&self, number: usize, outcome: TransferOutcome) -> bool {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.outcomes.push((number, outcome));
        self.is_added.notify_one();
        // Read under the lock that `close` takes, so each completion is counted exactly once.
        !list.is_closed
    }

    /// Closes the list. Returns the numbers of the transfers completed since the last `wait`.
    fn close(&self) -> Vec<usize> {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.is_closed = true;
        std::mem::take(&mut list.outcomes).into_iter().map(|(number, _)| number).collect()
    }

    /// Waits for completions. Returns `None` if there is none before the deadline.
    fn wait(&self, deadline: Deadline, clock: &dyn Clock) -> Option<Vec<(usize, TransferOutcome)>> {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        while list.outcomes.is_empty() {
            let left = deadline.remaining(clock);
            if left.is_zero() {
                return None;
            }
            list = self.is_added.wait_timeout(list, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Some(std::mem::take(&mut list.outcomes))
    }
}

/// One attempt, on this thread.
fn execute(transfer: &mut Transfer) -> io::Result<usize> {
    let file = Arc::clone(&transfer.file);
    let offset = transfer.next_offset();
    match transfer.kind {
        TransferKind::Read => Ok(preadv(&file, &mut transfer.slices_mut(), offset)?),
        TransferKind::Write => Ok(pwritev(&file, &transfer.slices(), offset)?),
        TransferKind::Sync => file.sync_data().map(|()| 0),
    }
}
