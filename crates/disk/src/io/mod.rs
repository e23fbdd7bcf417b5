//! The I/O layer of the file tier: transfers, file operations, deadlines.
//!
//! [`FileIo`] has two replaceable parts: a [`TransferEngine`], which reads, writes and syncs
//! payloads, and [`FileOperations`], which do everything else. Tests replace them to inject faults,
//! and a simulator by a disk of its own.

pub mod fault;
mod file_handle;
mod files;
mod fixed;
mod io_vec;
mod late_syncs;
mod psync;
mod read_window;
mod ring_refusal;
mod transfer;
mod uring;

use std::path::Path;
use std::sync::Arc;
use std::{fmt, io};

use cascade_memory::Pool;
use cascade_runtime::{CallError, CallLimit, Calls, Clock, Deadline};

use crate::{DiskError, IoEngine};
pub use file_handle::FileHandle;
pub use files::{FileIdentity, FileOperations, HeldLock, LockedBy, OpenMode, SystemFiles};
pub(crate) use files::{is_not_own, make_tier_directory, read_whole};
pub use late_syncs::LateSyncs;
pub use psync::PsyncEngine;
pub use ring_refusal::RingRefusal;
pub use transfer::{Buffer, PageBuffer, Transfer, TransferKind};
pub use uring::UringEngine;

/// Name of the threads for calls that may hang.
const THREAD_NAME: &str = "cascade-disk";
/// Maximum number of these threads for writes and for reads, with an engine of the caller's.
const THREADS_MAX: usize = 4;

/// The result of a transfer.
#[derive(Debug)]
pub struct TransferOutcome {
    /// The transfer with its buffers, or `None` while the device still uses them. After success it
    /// is there.
    pub transfer: Option<Transfer>,
    /// Bytes transferred in this attempt, zero for a sync. `TimedOut` if the deadline passed first.
    pub result: io::Result<usize>,
}

impl TransferOutcome {
    /// Drops an outcome that no caller waits for. The next sync of the file reports a sync that has
    /// failed.
    pub(crate) fn end_late(self) {
        let Some(transfer) = self.transfer else { return };
        if transfer.kind == TransferKind::Sync {
            transfer.file.late_syncs().end(self.result.is_err());
        }
    }
}

/// The transfers of one call, from the caller to the I/O engine and back.
///
/// The engine takes the next transfer when it has capacity, and completes each as it ends while
/// others are in flight. The caller can thus compute checksums while the disk works.
pub trait TransferQueue {
    /// Returns the next transfer with its completion number, or `None` if there is none now. There
    /// may be more after a completion.
    fn next_transfer(&mut self) -> Option<(usize, Transfer)>;

    /// Reports the end of the transfer with this number.
    fn complete(&mut self, number: usize, outcome: TransferOutcome);

    /// All transfers that were taken are in flight. Does a short piece of other work, or returns
    /// false if there is none. There may be another transfer afterwards.
    fn idle(&mut self) -> bool {
        false
    }
}

/// An I/O engine: makes transfers of files that the [`FileOperations`] of the same [`FileIo`]
/// opened. It owns the buffers of a transfer until it completes the transfer.
pub trait TransferEngine: Send + Sync + fmt::Debug {
    /// The name of the engine in statistics.
    fn name(&self) -> &'static str;

    /// Whether the pool's memory is registered with the kernel.
    fn is_registered(&self) -> bool {
        false
    }

    /// Ends the registration of the pool's memory: from now on no transfer uses it, and the kernel
    /// lets go of it when the transfers in flight have ended.
    fn release_pool(&self) {}

    /// Transfers past their deadline that the device has not ended.
    fn stuck_calls(&self) -> u64 {
        0
    }

    /// Makes the transfers of a queue, several at once and in any order, until the queue is empty
    /// or the deadline passes.
    ///
    /// Each transfer that was taken from the queue is completed once, before this returns. After
    /// each completion the queue may have another transfer. Those that are not taken by the
    /// deadline stay in the queue. An engine that would wait calls [`TransferQueue::idle`] before.
    ///
    /// An attempt starts at [`Transfer::next_offset`]. It reads into [`Transfer::slices_mut`] or
    /// writes [`Transfer::slices`], in their order. A result may be short, as with `preadv`: the
    /// queue then has the same transfer again, from the page at which it stopped. At the end of a
    /// file a read is short. A sync covers the writes that were completed before it was taken.
    ///
    /// If the device has not ended a transfer by the deadline, the transfer is completed with
    /// `TimedOut` and without its buffers. They stay with the engine until the device has ended it,
    /// and are then released. What it does to the file by then counts: a late write may overwrite
    /// what was written since. A file of another implementation fails with `Unsupported`.
    fn run(&self, queue: &mut dyn TransferQueue, deadline: Deadline);
}

/// A list of transfers and their results.
#[derive(Debug)]
pub(crate) struct TransferBatch {
    waiting: std::vec::IntoIter<Transfer>,
    taken_count: usize,
    pub(crate) outcomes: Vec<Option<TransferOutcome>>,
}

impl TransferBatch {
    pub(crate) fn new(transfers: Vec<Transfer>) -> Self {
        let outcomes = transfers.iter().map(|_| None).collect();
        Self { waiting: transfers.into_iter(), taken_count: 0, outcomes }
    }
}

impl TransferQueue for TransferBatch {
    fn next_transfer(&mut self) -> Option<(usize, Transfer)> {
        let transfer = self.waiting.next()?;
        self.taken_count += 1;
        Some((self.taken_count - 1, transfer))
    }

    fn complete(&mut self, number: usize, outcome: TransferOutcome) {
        self.outcomes[number] = Some(outcome);
    }
}

/// Runs each transfer to its end: continues short transfers and repeats interrupted ones.
struct ResumingQueue<'a> {
    inner: &'a mut dyn TransferQueue,
    resumed: Vec<(usize, Transfer)>,
    deadline: Deadline,
    clock: &'a dyn Clock,
}

impl TransferQueue for ResumingQueue<'_> {
    fn next_transfer(&mut self) -> Option<(usize, Transfer)> {
        // The rest of a short transfer is not started after the deadline either.
        if self.deadline.has_passed(self.clock) {
            return None;
        }
        self.resumed.pop().or_else(|| self.inner.next_transfer())
    }

    fn complete(&mut self, number: usize, TransferOutcome { transfer, result }: TransferOutcome) {
        let Some(mut transfer) = transfer else {
            // The kernel still uses the buffers, so the transfer cannot be continued.
            return self.inner.complete(number, TransferOutcome { transfer: None, result });
        };
        let is_sync = transfer.kind == TransferKind::Sync;
        let advanced = transfer.advance(result).and_then(|is_complete| {
            // A late sync has the error of bytes that this one was to make safe.
            if is_sync && is_complete {
                transfer.file.late_syncs().result()?;
            }
            Ok(is_complete)
        });
        match advanced {
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

    fn idle(&mut self) -> bool {
        self.inner.idle()
    }
}

/// The file tier's access to files, threads and time.
#[derive(Debug, Clone)]
pub struct FileIo {
    /// Transfers payloads.
    pub engine: Arc<dyn TransferEngine>,
    /// All other file operations.
    pub files: Arc<dyn FileOperations>,
    /// Threads for calls that may hang.
    pub workers: Arc<Calls>,
    /// Threads for calls that only read, so that hung writes do not block reads.
    pub read_workers: Arc<Calls>,
    /// Threads for work of the writer beside its writes. They make calls on `workers`.
    pub background: Arc<Calls>,
    /// The clock for deadlines.
    pub clock: Arc<dyn Clock>,
    /// Why the engine is not `io_uring`, if that was tried.
    pub ring_refusal: Option<RingRefusal>,
    /// Syncs of directories whose callers have gone.
    pub directory_syncs: Arc<LateSyncs>,
}

impl FileIo {
    /// Access to files through an engine and file operations of the caller's, such as a simulated
    /// disk. The two belong together: the engine gets the files that `files` opens.
    pub fn new(
        engine: Arc<dyn TransferEngine>,
        files: Arc<dyn FileOperations>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let threads = || Arc::new(Calls::new(THREAD_NAME, THREADS_MAX, Arc::clone(&clock)));
        let (workers, read_workers) = (threads(), threads());
        let background = background(&clock);
        let (ring_refusal, directory_syncs) = (None, Arc::default());
        Self {
            engine,
            files,
            workers,
            read_workers,
            background,
            clock,
            ring_refusal,
            directory_syncs,
        }
    }

    /// Access to the file systems of this machine with an I/O engine of this kind.
    ///
    /// The engine may register the memory of `pool` with the kernel.
    ///
    /// # Errors
    /// If the kernel rejects `io_uring` and `kind` requires it.
    pub fn system(
        kind: IoEngine,
        direct: bool,
        queue_depth: u32,
        pool: Option<&Pool>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, DiskError> {
        let threads_max = queue_depth.clamp(2, 16) as usize;
        let threads = || Arc::new(Calls::new(THREAD_NAME, threads_max, Arc::clone(&clock)));
        let (workers, read_workers) = (threads(), threads());
        let psync = || {
            let (workers, read_workers) = (Arc::clone(&workers), Arc::clone(&read_workers));
            PsyncEngine::new(workers, read_workers, queue_depth, Arc::clone(&clock))
        };
        let uring = || UringEngine::new(queue_depth, pool, Arc::clone(&clock));
        let mut ring_refusal = None;
        let engine: Arc<dyn TransferEngine> = match kind {
            IoEngine::Psync => Arc::new(psync()),
            IoEngine::Auto if !direct => Arc::new(psync()),
            IoEngine::Auto => match uring() {
                Ok(engine) => Arc::new(engine),
                Err(error) => {
                    ring_refusal = Some(RingRefusal::of(&error));
                    Arc::new(psync())
                }
            },
            IoEngine::Uring => Arc::new(uring().map_err(|source| DiskError::Config {
                setting: "engine",
                reason: format!(
                    "{} ({source}); use auto or psync, or: {}",
                    RingRefusal::of(&source),
                    RingRefusal::of(&source).remedy()
                ),
            })?),
        };
        let io = Self::new(engine, Arc::new(SystemFiles), clock);
        Ok(Self { workers, read_workers, ring_refusal, ..io })
    }

    /// Calls past their deadline that the kernel has not completed.
    pub(crate) fn stuck_calls(&self) -> u64 {
        self.workers.stuck_calls() + self.read_workers.stuck_calls() + self.engine.stuck_calls()
    }

    /// Runs a file operation on a worker thread, so that a hung file system delays the caller only
    /// until the deadline.
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

    /// As [`Self::call`], for operations that only read.
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
        self.call_on(&self.read_workers, operation, path, deadline, work)
    }

    /// Syncs a directory, so that names in it are on stable storage. An error also if an earlier
    /// sync of a directory failed after its caller had gone, which is then reported, or still runs.
    pub(crate) fn sync_directory(
        &self,
        directory: &Path,
        deadline: Deadline,
    ) -> Result<(), DiskError> {
        let (files, target) = (Arc::clone(&self.files), directory.to_owned());
        self.directory_syncs
            .call(&self.workers, deadline, move || files.sync_directory(&target))
            .map_err(|source| DiskError::from_io("sync", directory, source))
    }

    fn call_on<T, F>(
        &self,
        workers: &Calls,
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
            .call(CallLimit::until(deadline), move || work(files.as_ref()), drop)
            .unwrap_or_else(|error| Err(io_error(error)))
            .map_err(|source| DiskError::from_io(operation, path, source))
    }

    /// Runs every transfer to its end or to the deadline.
    ///
    /// Transfers that are still in the queue when this returns were not started.
    pub(crate) fn run(&self, queue: &mut dyn TransferQueue, deadline: Deadline) {
        let clock = self.clock.as_ref();
        let mut resuming = ResumingQueue { inner: queue, resumed: Vec::new(), deadline, clock };
        self.engine.run(&mut resuming, deadline);
        // The deadline passed between a short transfer and its continuation.
        for (number, transfer) in std::mem::take(&mut resuming.resumed) {
            let result = Err(io::ErrorKind::TimedOut.into());
            resuming.inner.complete(number, TransferOutcome { transfer: Some(transfer), result });
        }
    }

    /// Runs one transfer to its end.
    pub(crate) fn transfer_one(&self, transfer: Transfer, deadline: Deadline) -> io::Result<()> {
        self.transfer_all(vec![transfer], deadline).remove(0).1
    }

    /// Runs a list of transfers. Returns one result each, in their order.
    pub(crate) fn transfer_all(
        &self,
        transfers: Vec<Transfer>,
        deadline: Deadline,
    ) -> Vec<(Option<Transfer>, io::Result<()>)> {
        let mut batch = TransferBatch::new(transfers);
        self.run(&mut batch, deadline);
        let TransferBatch { mut waiting, outcomes, .. } = batch;
        let results = outcomes.into_iter().map(|outcome| match outcome {
            Some(TransferOutcome { transfer, result }) => (transfer, result.map(drop)),
            // Transfers are started in order, so those without an outcome are the rest of
            // `waiting`.
            None => (waiting.next(), Err(io::ErrorKind::TimedOut.into())),
        });
        results.collect()
    }
}

/// Two threads: a tier seals one segment at a time, and creates one.
fn background(clock: &Arc<dyn Clock>) -> Arc<Calls> {
    Arc::new(Calls::new(THREAD_NAME, 2, Arc::clone(clock)))
}

/// The error of a file operation that was not made or has no result.
fn io_error(error: CallError) -> io::Error {
    match error {
        CallError::TimedOut => io::ErrorKind::TimedOut.into(),
        CallError::Panicked => io::Error::other("a file operation panicked"),
        CallError::NoThread(source) => source,
        other => io::Error::other(other),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use cascade_runtime::SystemClock;

    use super::*;
    use crate::conformance::deadline;

    #[test]
    fn a_hung_call_returns_at_its_deadline_and_other_calls_work() {
        let io = FileIo::system(IoEngine::Psync, false, 1, None, Arc::new(SystemClock)).unwrap();
        let path = Path::new("there");
        let (hung, is_released) = channel::<()>();
        let short = Deadline::after(&SystemClock, Duration::from_millis(50));
        let late = io.call("list", path, short, move |_| {
            // Fails when the other end is dropped.
            assert!(is_released.recv().is_err());
            Ok(())
        });
        assert!(matches!(late, Err(DiskError::Timeout { .. })), "{late:?}");
        assert_eq!(io.stuck_calls(), 1);
        assert_eq!(io.call("list", path, deadline(), |_| Ok(7)).unwrap(), 7);
        drop(hung);
        let limit = deadline();
        while io.stuck_calls() > 0 {
            assert!(!limit.has_passed(&SystemClock), "the call never ended");
            cascade_runtime::yield_now();
        }
    }
}
