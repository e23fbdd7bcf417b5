//! The engine that works everywhere: `preadv` and `pwritev` on worker threads.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use cascade_block::{Clock, Deadline};
use rustix::io::{preadv, pwritev};

use super::{Engine, Transfer, TransferKind, TransferOutcome, TransferQueue, WorkerThreads};

/// Reads and writes with ordinary system calls, several at once on threads of its own.
#[derive(Debug)]
pub struct PsyncEngine {
    workers: Arc<WorkerThreads>,
    /// Reads have threads of their own: writes that hang take none from them.
    readers: Arc<WorkerThreads>,
    lanes: usize,
    clock: Arc<dyn Clock>,
    /// Transfers that a thread carries out although nobody waits for them.
    stuck: Arc<AtomicU64>,
}

/// Where a call's transfers come back to. What comes back too late is dropped with it.
#[derive(Debug, Default)]
struct Returned {
    finished: Mutex<Arrivals>,
    some: Condvar,
}

#[derive(Debug, Default)]
struct Arrivals {
    list: Vec<(usize, TransferOutcome)>,
    /// The call's deadline has passed: nobody looks here any more.
    is_over: bool,
}

/// A transfer that waits for a worker. The caller takes it back if none has begun in time.
type Handed = Arc<Mutex<Option<Transfer>>>;

impl PsyncEngine {
    /// At most `queue_depth` transfers at once, as far as there are threads.
    pub fn new(
        workers: Arc<WorkerThreads>,
        readers: Arc<WorkerThreads>,
        queue_depth: u32,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let lanes = workers.threads_max().min(queue_depth as usize);
        Self { workers, readers, lanes, clock, stuck: Arc::default() }
    }

    fn hand_over(
        &self,
        number: usize,
        kind: TransferKind,
        handed: &Handed,
        returned: &Arc<Returned>,
    ) -> io::Result<()> {
        let workers = if kind == TransferKind::Read { &self.readers } else { &self.workers };
        let (handed, returned) = (Arc::clone(handed), Arc::clone(returned));
        let stuck = Arc::clone(&self.stuck);
        workers.submit(Box::new(move || {
            let taken = handed.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(mut transfer) = taken {
                let result = carry_out(&mut transfer);
                if !returned.put(number, TransferOutcome { transfer: Some(transfer), result }) {
                    stuck.fetch_sub(1, Ordering::Relaxed);
                }
            }
        }))
    }
}

impl Engine for PsyncEngine {
    fn name(&self) -> &'static str {
        "psync"
    }

    fn stuck_calls(&self) -> u64 {
        self.stuck.load(Ordering::Relaxed)
    }

    fn run(&self, queue: &mut dyn TransferQueue, deadline: Deadline) {
        let returned = Arc::new(Returned::default());
        let mut under_way: HashMap<usize, Handed> = HashMap::new();
        loop {
            while under_way.len() < self.lanes {
                let Some((number, transfer)) = queue.next_transfer() else { break };
                let kind = transfer.kind;
                let handed = Arc::new(Mutex::new(Some(transfer)));
                match self.hand_over(number, kind, &handed, &returned) {
                    Ok(()) => drop(under_way.insert(number, handed)),
                    Err(error) => queue.complete(number, taken_back(&handed, error)),
                }
            }
            if under_way.is_empty() {
                return;
            }
            let Some(finished) = returned.wait(deadline, self.clock.as_ref()) else { break };
            for (number, finished) in finished {
                under_way.remove(&number);
                queue.complete(number, finished);
            }
        }
        let arrived = returned.end();
        for (number, handed) in under_way {
            let finished = taken_back(&handed, io::ErrorKind::TimedOut.into());
            if finished.transfer.is_none() && !arrived.contains(&number) {
                self.stuck.fetch_add(1, Ordering::Relaxed);
            }
            queue.complete(number, finished);
        }
    }
}

fn taken_back(handed: &Handed, error: io::Error) -> TransferOutcome {
    let transfer = handed.lock().unwrap_or_else(PoisonError::into_inner).take();
    TransferOutcome { transfer, result: Err(error) }
}

impl Returned {
    /// False when it comes too late.
    fn put(&self, number: usize, finished: TransferOutcome) -> bool {
        let mut arrivals = self.finished.lock().unwrap_or_else(PoisonError::into_inner);
        arrivals.list.push((number, finished));
        self.some.notify_one();
        !arrivals.is_over
    }

    /// Nobody looks any more. The numbers of what has come since somebody looked last.
    fn end(&self) -> Vec<usize> {
        let mut arrivals = self.finished.lock().unwrap_or_else(PoisonError::into_inner);
        arrivals.is_over = true;
        std::mem::take(&mut arrivals.list).into_iter().map(|(number, _)| number).collect()
    }

    /// What has come back; nothing if that is nothing until the deadline.
    fn wait(&self, deadline: Deadline, clock: &dyn Clock) -> Option<Vec<(usize, TransferOutcome)>> {
        let mut finished = self.finished.lock().unwrap_or_else(PoisonError::into_inner);
        while finished.list.is_empty() {
            let left = deadline.remaining(clock);
            if left.is_zero() {
                return None;
            }
            finished =
                self.some.wait_timeout(finished, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Some(std::mem::take(&mut finished.list))
    }
}

/// One attempt, in this thread.
fn carry_out(transfer: &mut Transfer) -> io::Result<usize> {
    let file = Arc::clone(&transfer.file);
    let offset = transfer.next_offset();
    match transfer.kind {
        TransferKind::Read => Ok(preadv(&file, &mut transfer.slices_mut(), offset)?),
        TransferKind::Write => Ok(pwritev(&file, &transfer.slices(), offset)?),
        TransferKind::Sync => file.sync_data().map(|()| 0),
    }
}
