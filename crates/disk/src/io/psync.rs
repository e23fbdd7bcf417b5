//! The portable I/O engine: `preadv` and `pwritev` on worker threads.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use cascade_runtime::{Calls, Clock, Condvar, Deadline, Mutex};
use rustix::io::{preadv, pwritev};

use super::{FileHandle, Transfer, TransferEngine, TransferKind, TransferOutcome, TransferQueue};

/// Reads and writes with blocking system calls, several at once on worker threads.
#[derive(Debug)]
pub struct PsyncEngine {
    workers: Arc<Calls>,
    /// Separate threads for reads, so that hung writes do not block them.
    read_workers: Arc<Calls>,
    in_flight_max: usize,
    clock: Arc<dyn Clock>,
    /// Transfers that a thread still executes after the deadline of their call.
    stuck: Arc<AtomicU64>,
}

/// The completions of one call.
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

/// A transfer that was submitted.
struct InFlight {
    queued: QueuedTransfer,
    /// The file of a sync.
    syncs: Option<Arc<FileHandle>>,
}

impl PsyncEngine {
    /// An engine with at most `queue_depth` transfers in flight per call, and at most as many as
    /// there are threads.
    pub fn new(
        workers: Arc<Calls>,
        read_workers: Arc<Calls>,
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
        workers.submit(move || {
            // At the deadline the caller takes the transfer too. Only one of them gets it, so a
            // cancelled transfer is never executed.
            let taken = queued.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(mut transfer) = taken {
                let result = execute(&mut transfer);
                let outcome = TransferOutcome { transfer: Some(transfer), result };
                completions.add(number, outcome, &stuck);
            }
        })
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
        // Ordered, because the order of the transfers that time out is visible.
        let mut in_flight: BTreeMap<usize, InFlight> = BTreeMap::new();
        loop {
            while in_flight.len() < self.in_flight_max {
                let Some((number, transfer)) = queue.next_transfer() else { break };
                let kind = transfer.kind;
                let syncs = (kind == TransferKind::Sync).then(|| Arc::clone(&transfer.file));
                let queued = Arc::new(Mutex::new(Some(transfer)));
                match self.submit(number, kind, &queued, &completions) {
                    Ok(()) => drop(in_flight.insert(number, InFlight { queued, syncs })),
                    // No worker has it, so the transfer returns with its buffers.
                    Err(error) => queue.complete(number, cancel(&queued, error)),
                }
            }
            if in_flight.is_empty() {
                return;
            }
            let is_idle = !queue.idle();
            let completed = completions.wait(is_idle, deadline, self.clock.as_ref());
            let Some(completed) = completed else { break };
            for (number, outcome) in completed {
                in_flight.remove(&number);
                queue.complete(number, outcome);
            }
        }
        // Cancelled before the list is closed: no other transfer starts from here on, so the number
        // of started ones is final.
        let cancelled: Vec<_> = in_flight
            .into_iter()
            .map(|(number, InFlight { queued, syncs })| {
                (number, cancel(&queued, io::ErrorKind::TimedOut.into()), syncs)
            })
            .collect();
        let started = cancelled.iter().filter(|(_, outcome, _)| outcome.transfer.is_none());
        completions.close(started.map(|(_, _, syncs)| syncs.as_deref()), &self.stuck);
        for (number, outcome, _) in cancelled {
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
    /// Adds a completion. After `close` it subtracts one from `stuck` instead and drops the
    /// transfer with its buffers.
    fn add(&self, number: usize, outcome: TransferOutcome, stuck: &AtomicU64) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        if list.is_closed {
            stuck.fetch_sub(1, Ordering::Relaxed);
            outcome.end_late();
            return;
        }
        list.outcomes.push((number, outcome));
        self.is_added.notify_one();
    }

    /// Closes the list. Adds to `stuck` those of the `started` transfers that have not completed.
    /// Each comes with the file that it syncs.
    fn close<'a>(&self, started: impl Iterator<Item = Option<&'a FileHandle>>, stuck: &AtomicU64) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.is_closed = true;
        // Each outcome in the list belongs to a started transfer: the caller of `wait` has taken
        // all others out.
        // Under the lock: a later completion subtracts only what was added here.
        let started =
            started.inspect(|syncs| syncs.iter().for_each(|file| file.late_syncs().begin()));
        let started = started.count();
        let completed = std::mem::take(&mut list.outcomes);
        stuck.fetch_add((started - completed.len()) as u64, Ordering::Relaxed);
        for (_, outcome) in completed {
            outcome.end_late();
        }
    }

    /// Returns the completions, and waits for one if the caller is idle. Returns `None` if there is
    /// none before the deadline.
    fn wait(
        &self,
        is_idle: bool,
        deadline: Deadline,
        clock: &dyn Clock,
    ) -> Option<Vec<(usize, TransferOutcome)>> {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        while list.outcomes.is_empty() {
            if deadline.has_passed(clock) {
                return None;
            }
            if !is_idle {
                break;
            }
            let waited = self.is_added.wait_until(list, deadline, clock);
            list = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Some(std::mem::take(&mut list.outcomes))
    }
}

/// One attempt, on this thread.
fn execute(transfer: &mut Transfer) -> io::Result<usize> {
    let handle = Arc::clone(&transfer.file);
    let file = handle.system()?;
    let offset = transfer.next_offset();
    match transfer.kind {
        TransferKind::Read => Ok(preadv(file, &mut transfer.slices_mut(), offset)?),
        TransferKind::Write => Ok(pwritev(file, &transfer.slices(), offset)?),
        TransferKind::Sync => file.sync_data().map(|()| 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome() -> TransferOutcome {
        TransferOutcome { transfer: None, result: Ok(0) }
    }

    /// A late completion was subtracted before it was added, and the count wrapped to 2^64 - 1.
    #[test]
    fn a_transfer_is_stuck_from_the_end_of_its_call_to_its_completion() {
        let (completions, stuck) = (Completions::default(), AtomicU64::new(0));
        let stuck_count = || stuck.load(Ordering::Relaxed);
        completions.add(0, outcome(), &stuck);
        assert_eq!(stuck_count(), 0, "it completed in time");
        completions.close([None; 3].into_iter(), &stuck);
        assert_eq!(stuck_count(), 2, "one of three completed before the call ended");
        completions.add(1, outcome(), &stuck);
        assert_eq!(stuck_count(), 1);
        completions.add(2, outcome(), &stuck);
        assert_eq!(stuck_count(), 0);
        let list = completions.list.lock().unwrap();
        assert!(list.outcomes.is_empty(), "late completions release their buffers");
    }

    /// The kernel reports what it has lost to one sync: that of the caller who had gone took the
    /// error with it, and the next sync of the file succeeded.
    #[test]
    fn the_error_of_a_late_sync_is_reported_by_the_next_one() {
        let stuck = AtomicU64::new(0);
        let file = Arc::new(FileHandle::other(1));
        let sync = |result: io::Result<usize>| {
            let transfer = Some(Transfer::sync(Arc::clone(&file)));
            TransferOutcome { transfer, result }
        };
        for (is_before, has_failed) in [(true, true), (false, true), (true, false), (false, false)]
        {
            let completions = Completions::default();
            let result = || if has_failed { Err(io::ErrorKind::Other.into()) } else { Ok(0) };
            if is_before {
                // It ended before the call did, and the call had no time to see it.
                completions.add(0, sync(result()), &stuck);
            }
            completions.close([Some(&*file)].into_iter(), &stuck);
            if !is_before {
                let running = file.late_syncs().result().unwrap_err();
                assert_eq!(running.kind(), io::ErrorKind::TimedOut);
                completions.add(0, sync(result()), &stuck);
            }
            assert_eq!(file.late_syncs().result().is_err(), has_failed);
            file.late_syncs().result().unwrap();
        }
        assert_eq!(stuck.load(Ordering::Relaxed), 0);
    }
}
