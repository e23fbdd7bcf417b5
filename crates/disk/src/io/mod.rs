//! The seam between decisions about files and the kernel: transfers, file operations, deadlines.

pub mod fault;
mod files;
mod fixed;
mod psync;
mod transfer;
mod uring;
mod workers;

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use cascade_block::{Clock, Deadline};
use cascade_memory::Pool;

use crate::{DiskError, EngineKind};

pub(crate) use files::make_tier_directory;
pub use files::{FileOperations, OpenMode, SystemFiles};
pub use psync::PsyncEngine;
pub use transfer::{Buffer, PageBuffer, Transfer, TransferKind};
pub use uring::UringEngine;
pub use workers::WorkerThreads;

/// What became of a transfer.
#[derive(Debug)]
pub struct TransferOutcome {
    /// The transfer with its buffers; absent while the kernel still has them.
    pub transfer: Option<Transfer>,
    /// Bytes moved by it, or why not. `TimedOut` when the deadline passed first.
    pub result: io::Result<usize>,
}

/// Transfers on their way, as the one who wants them sees it.
///
/// The engine asks for the next one when it has room, and tells of each as it ends, while others
/// are under way: checksums are computed then, and cost no time of the disk.
pub trait TransferQueue {
    /// The next transfer and the number that it is told of under; nothing when there is none
    /// now. There may be more after something has ended.
    fn next_transfer(&mut self) -> Option<(usize, Transfer)>;

    /// A transfer ended.
    fn complete(&mut self, number: usize, finished: TransferOutcome);
}

/// Reads and writes files. Buffers go in owned and come back owned.
pub trait Engine: Send + Sync + fmt::Debug {
    /// What the engine is called in statistics.
    fn name(&self) -> &'static str;

    /// Whether the pool's memory is registered with the kernel.
    fn is_registered(&self) -> bool {
        false
    }

    /// Calls whose deadline passed and that the kernel has not given up.
    fn stuck_calls(&self) -> u64 {
        0
    }

    /// Carries out transfers, in any order, until there are none, or until the deadline.
    ///
    /// Each that was taken is told of once. Buffers of a transfer that the kernel has not
    /// finished at the deadline stay with the engine until it has, and then go back where they
    /// belong. A result may be short, as `preadv`'s may.
    fn run(&self, queue: &mut dyn TransferQueue, deadline: Deadline);
}

/// A plain list of transfers, and what became of them.
#[derive(Debug)]
pub(crate) struct TransferBatch {
    waiting: std::vec::IntoIter<Transfer>,
    taken: usize,
    pub(crate) finished: Vec<Option<TransferOutcome>>,
}

impl TransferBatch {
    pub(crate) fn new(transfers: Vec<Transfer>) -> Self {
        let finished = transfers.iter().map(|_| None).collect();
        Self { waiting: transfers.into_iter(), taken: 0, finished }
    }
}

impl TransferQueue for TransferBatch {
    fn next_transfer(&mut self) -> Option<(usize, Transfer)> {
        let transfer = self.waiting.next()?;
        self.taken += 1;
        Some((self.taken - 1, transfer))
    }

    fn complete(&mut self, number: usize, finished: TransferOutcome) {
        self.finished[number] = Some(finished);
    }
}

/// Carries each transfer to its end: short ones are continued, interrupted ones repeated.
struct ResumingQueue<'a> {
    inner: &'a mut dyn TransferQueue,
    resumed: Vec<(usize, Transfer)>,
    deadline: Deadline,
    clock: &'a dyn Clock,
}

impl TransferQueue for ResumingQueue<'_> {
    fn next_transfer(&mut self) -> Option<(usize, Transfer)> {
        if self.deadline.has_passed(self.clock) {
            return None;
        }
        self.resumed.pop().or_else(|| self.inner.next_transfer())
    }

    fn complete(&mut self, number: usize, TransferOutcome { transfer, result }: TransferOutcome) {
        let Some(mut transfer) = transfer else {
            return self.inner.complete(number, TransferOutcome { transfer: None, result });
        };
        match transfer.advance(result) {
            Ok(false) => self.resumed.push((number, transfer)),
            Ok(true) => {
                let result = Ok(transfer.total_bytes());
                self.inner.complete(number, TransferOutcome { transfer: Some(transfer), result });
            }
            Err(error) => {
                let result = Err(error);
                self.inner.complete(number, TransferOutcome { transfer: Some(transfer), result });
            }
        }
    }
}

/// Everything that the file tier does with the machine.
#[derive(Debug, Clone)]
pub struct FileIo {
    /// Moves payloads.
    pub engine: Arc<dyn Engine>,
    /// Everything else about files.
    pub files: Arc<dyn FileOperations>,
    /// Threads for calls that could hang.
    pub workers: Arc<WorkerThreads>,
    /// Threads for calls that only read: a file system that takes no writes may give what it has.
    pub readers: Arc<WorkerThreads>,
    /// Time.
    pub clock: Arc<dyn Clock>,
}

impl FileIo {
    /// The machine's own files, read and written by the engine that was asked for.
    ///
    /// `pool` is the memory that the engine may register with the kernel.
    pub fn system(
        kind: EngineKind,
        direct: bool,
        queue_depth: u32,
        pool: Option<&Pool>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, DiskError> {
        let threads_max = queue_depth.clamp(2, 16) as usize;
        let workers = Arc::new(WorkerThreads::new(threads_max));
        let readers = Arc::new(WorkerThreads::new(threads_max));
        let psync = || {
            let (workers, readers) = (Arc::clone(&workers), Arc::clone(&readers));
            PsyncEngine::new(workers, readers, queue_depth, Arc::clone(&clock))
        };
        let uring = || UringEngine::new(queue_depth, pool, Arc::clone(&clock));
        let engine: Arc<dyn Engine> = match kind {
            EngineKind::Psync => Arc::new(psync()),
            EngineKind::Auto if !direct => Arc::new(psync()),
            EngineKind::Auto => match uring() {
                Ok(engine) => Arc::new(engine),
                Err(_refused) => Arc::new(psync()),
            },
            EngineKind::Uring => Arc::new(uring().map_err(|source| DiskError::Config {
                setting: "engine",
                reason: format!("this kernel refuses io_uring ({source}); use auto or psync"),
            })?),
        };
        Ok(Self { engine, files: Arc::new(SystemFiles), workers, readers, clock })
    }

    /// Calls whose deadline passed and that go on in the kernel.
    pub(crate) fn stuck_calls(&self) -> u64 {
        self.workers.stuck_jobs() + self.readers.stuck_jobs() + self.engine.stuck_calls()
    }

    /// Runs a file operation on a worker, so that a hung file system costs only the deadline.
    pub(crate) fn call<T, F>(
        &self,
        operation: &'static str,
        path: &Path,
        deadline: Deadline,
        work: F,
    ) -> Result<T, DiskError>
    where
        T: Send + 'static,
        F: FnOnce(&dyn FileOperations) -> io::Result<T> + Send + 'static,
    {
        self.call_on(&self.workers, operation, path, deadline, work)
    }

    /// As `call`, for what only reads.
    pub(crate) fn call_reading<T, F>(
        &self,
        operation: &'static str,
        path: &Path,
        deadline: Deadline,
        work: F,
    ) -> Result<T, DiskError>
    where
        T: Send + 'static,
        F: FnOnce(&dyn FileOperations) -> io::Result<T> + Send + 'static,
    {
        self.call_on(&self.readers, operation, path, deadline, work)
    }

    fn call_on<T, F>(
        &self,
        workers: &WorkerThreads,
        operation: &'static str,
        path: &Path,
        deadline: Deadline,
        work: F,
    ) -> Result<T, DiskError>
    where
        T: Send + 'static,
        F: FnOnce(&dyn FileOperations) -> io::Result<T> + Send + 'static,
    {
        let files = Arc::clone(&self.files);
        workers
            .call(move || work(files.as_ref()), deadline, self.clock.as_ref())
            .and_then(|result| result)
            .map_err(|source| DiskError::from_io(operation, path, source))
    }

    /// Carries every transfer to its end or to the deadline.
    ///
    /// What the queue still holds when this returns was not begun.
    pub(crate) fn run(&self, queue: &mut dyn TransferQueue, deadline: Deadline) {
        let clock = self.clock.as_ref();
        let mut resuming = ResumingQueue { inner: queue, resumed: Vec::new(), deadline, clock };
        self.engine.run(&mut resuming, deadline);
        for (number, transfer) in std::mem::take(&mut resuming.resumed) {
            let result = Err(io::ErrorKind::TimedOut.into());
            resuming.inner.complete(number, TransferOutcome { transfer: Some(transfer), result });
        }
    }

    /// Carries out a list of transfers; one answer each, in their order.
    pub(crate) fn transfer_all(
        &self,
        transfers: Vec<Transfer>,
        deadline: Deadline,
    ) -> Vec<(Option<Transfer>, io::Result<()>)> {
        let mut batch = TransferBatch::new(transfers);
        self.run(&mut batch, deadline);
        let TransferBatch { mut waiting, finished, .. } = batch;
        let answers = finished.into_iter().map(|finished| match finished {
            Some(TransferOutcome { transfer, result }) => (transfer, result.map(drop)),
            None => (waiting.next(), Err(io::ErrorKind::TimedOut.into())),
        });
        answers.collect()
    }
}
