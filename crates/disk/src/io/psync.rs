//! The engine that works everywhere: `preadv` and `pwritev` on worker threads.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use cascade_block::{Clock, Deadline};
use rustix::io::{preadv, pwritev};

use super::{Engine, Finished, Traffic, Transfer, TransferKind, Workers};

/// Reads and writes with ordinary system calls, several at once on threads of its own.
#[derive(Debug)]
pub struct PsyncEngine {
    workers: Arc<Workers>,
    lanes: usize,
    clock: Arc<dyn Clock>,
}

/// Where a call's transfers come back to. What comes back too late is dropped with it.
#[derive(Debug, Default)]
struct Returned {
    finished: Mutex<Vec<(usize, Finished)>>,
    some: Condvar,
}

/// A transfer that waits for a worker. The caller takes it back if none has begun in time.
type Handed = Arc<Mutex<Option<Transfer>>>;

impl PsyncEngine {
    /// At most `queue_depth` transfers at once, as far as there are threads.
    pub fn new(workers: Arc<Workers>, queue_depth: u32, clock: Arc<dyn Clock>) -> Self {
        let lanes = workers.threads_max().min(queue_depth as usize);
        Self { workers, lanes, clock }
    }

    fn hand_over(
        &self,
        number: usize,
        handed: &Handed,
        returned: &Arc<Returned>,
    ) -> io::Result<()> {
        let (handed, returned) = (Arc::clone(handed), Arc::clone(returned));
        self.workers.submit(Box::new(move || {
            let taken = handed.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(mut transfer) = taken {
                let result = carry_out(&mut transfer);
                returned.put(number, Finished { transfer: Some(transfer), result });
            }
        }))
    }
}

impl Engine for PsyncEngine {
    fn name(&self) -> &'static str {
        "psync"
    }

    fn carry(&self, traffic: &mut dyn Traffic, deadline: Deadline) {
        let returned = Arc::new(Returned::default());
        let mut under_way: HashMap<usize, Handed> = HashMap::new();
        loop {
            while under_way.len() < self.lanes {
                let Some((number, transfer)) = traffic.next() else { break };
                let handed = Arc::new(Mutex::new(Some(transfer)));
                match self.hand_over(number, &handed, &returned) {
                    Ok(()) => drop(under_way.insert(number, handed)),
                    Err(error) => traffic.end(number, taken_back(&handed, error)),
                }
            }
            if under_way.is_empty() {
                return;
            }
            let Some(finished) = returned.wait(deadline, self.clock.as_ref()) else { break };
            for (number, finished) in finished {
                under_way.remove(&number);
                traffic.end(number, finished);
            }
        }
        for (number, handed) in under_way {
            traffic.end(number, taken_back(&handed, io::ErrorKind::TimedOut.into()));
        }
    }
}

fn taken_back(handed: &Handed, error: io::Error) -> Finished {
    let transfer = handed.lock().unwrap_or_else(PoisonError::into_inner).take();
    Finished { transfer, result: Err(error) }
}

impl Returned {
    fn put(&self, number: usize, finished: Finished) {
        self.finished.lock().unwrap_or_else(PoisonError::into_inner).push((number, finished));
        self.some.notify_one();
    }

    /// What has come back; nothing if that is nothing until the deadline.
    fn wait(&self, deadline: Deadline, clock: &dyn Clock) -> Option<Vec<(usize, Finished)>> {
        let mut finished = self.finished.lock().unwrap_or_else(PoisonError::into_inner);
        while finished.is_empty() {
            let left = deadline.remaining(clock);
            if left.is_zero() {
                return None;
            }
            finished =
                self.some.wait_timeout(finished, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Some(std::mem::take(&mut *finished))
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
