//! The engine that works everywhere: `preadv` and `pwritev` on worker threads.

use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use cascade_block::{Clock, Deadline};
use rustix::io::{preadv, pwritev};

use super::{Engine, Finished, Transfer, TransferKind, Workers};

/// Reads and writes with ordinary system calls, several at once on threads of its own.
#[derive(Debug)]
pub struct PsyncEngine {
    workers: Arc<Workers>,
    lanes: usize,
    clock: Arc<dyn Clock>,
}

/// The transfers of one call. Lanes take waiting ones; the caller takes back what is left.
#[derive(Debug)]
struct Batch {
    state: Mutex<BatchState>,
    done: Condvar,
}

#[derive(Debug)]
struct BatchState {
    next: usize,
    unfinished: usize,
    waiting: Vec<Option<Transfer>>,
    finished: Vec<Option<Finished>>,
}

impl PsyncEngine {
    /// At most `queue_depth` transfers at once, as far as there are threads.
    pub fn new(workers: Arc<Workers>, queue_depth: u32, clock: Arc<dyn Clock>) -> Self {
        let lanes = workers.threads_max().min(queue_depth as usize);
        Self { workers, lanes, clock }
    }
}

impl Engine for PsyncEngine {
    fn name(&self) -> &'static str {
        "psync"
    }

    fn transfer(&self, transfers: Vec<Transfer>, deadline: Deadline) -> Vec<Finished> {
        let count = transfers.len();
        let batch = Arc::new(Batch::new(transfers));
        let lanes = self.lanes.min(count);
        let started = (0..lanes)
            .filter(|_| {
                let batch = Arc::clone(&batch);
                self.workers.submit(Box::new(move || batch.run())).is_ok()
            })
            .count();
        if started > 0 {
            batch.wait(deadline, self.clock.as_ref());
        }
        batch.collect()
    }
}

impl Batch {
    fn new(transfers: Vec<Transfer>) -> Self {
        let count = transfers.len();
        let state = BatchState {
            next: 0,
            unfinished: count,
            waiting: transfers.into_iter().map(Some).collect(),
            finished: (0..count).map(|_| None).collect(),
        };
        Self { state: Mutex::new(state), done: Condvar::new() }
    }

    /// One lane: carries out waiting transfers until there are none.
    fn run(&self) {
        while let Some((index, mut transfer)) = self.take() {
            let result = carry_out(&mut transfer);
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.finished[index] = Some(Finished { transfer: Some(transfer), result });
            state.unfinished -= 1;
            if state.unfinished == 0 {
                self.done.notify_all();
            }
        }
    }

    fn take(&self) -> Option<(usize, Transfer)> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let index = state.next;
        let transfer = state.waiting.get_mut(index)?.take()?;
        state.next += 1;
        Some((index, transfer))
    }

    fn wait(&self, deadline: Deadline, clock: &dyn Clock) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while state.unfinished > 0 {
            let left = deadline.remaining(clock);
            if left.is_zero() {
                return;
            }
            state = self.done.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// What is finished, and back what nobody began; the rest stays with its lane.
    fn collect(&self) -> Vec<Finished> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let count = state.finished.len();
        state.next = count;
        (0..count)
            .map(|index| {
                state.finished[index].take().unwrap_or_else(|| Finished {
                    transfer: state.waiting[index].take(),
                    result: Err(io::ErrorKind::TimedOut.into()),
                })
            })
            .collect()
    }
}

/// One attempt, in this thread.
pub(super) fn carry_out(transfer: &mut Transfer) -> io::Result<usize> {
    let file = Arc::clone(&transfer.file);
    let offset = transfer.next_offset();
    match transfer.kind {
        TransferKind::Read => Ok(preadv(&file, &mut transfer.slices_mut(), offset)?),
        TransferKind::Write => Ok(pwritev(&file, &transfer.slices(), offset)?),
        TransferKind::Sync => file.sync_data().map(|()| 0),
    }
}
