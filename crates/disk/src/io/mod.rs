//! The seam between decisions about files and the kernel: transfers, file operations, deadlines.

pub mod fault;
mod files;
mod psync;
mod transfer;
mod uring;
mod workers;

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use cascade_block::{Clock, Deadline};

use crate::{DiskError, EngineKind};

pub use files::{FileOperations, OpenMode, SystemFiles};
pub use psync::PsyncEngine;
pub use transfer::{Buffer, PageBuffer, Transfer, TransferKind};
pub use uring::UringEngine;
pub use workers::Workers;

/// What became of a transfer.
#[derive(Debug)]
pub struct Finished {
    /// The transfer with its buffers; absent while the kernel still has them.
    pub transfer: Option<Transfer>,
    /// Bytes moved by it, or why not. `TimedOut` when the deadline passed first.
    pub result: io::Result<usize>,
}

/// Reads and writes files. Buffers go in owned and come back owned.
pub trait Engine: Send + Sync + fmt::Debug {
    /// What the engine is called in statistics.
    fn name(&self) -> &'static str;

    /// Carries out the transfers, in any order, and returns one answer each, in their order.
    ///
    /// Returns when all are done, or at the deadline; buffers of a transfer that the kernel has
    /// not finished by then stay with the engine until it has, and then go back where they
    /// belong. A result may be short, as `preadv`'s may.
    fn transfer(&self, transfers: Vec<Transfer>, deadline: Deadline) -> Vec<Finished>;
}

/// Everything that the file tier does with the machine.
#[derive(Debug, Clone)]
pub struct Io {
    /// Moves payloads.
    pub engine: Arc<dyn Engine>,
    /// Everything else about files.
    pub files: Arc<dyn FileOperations>,
    /// Threads for calls that could hang.
    pub workers: Arc<Workers>,
    /// Time.
    pub clock: Arc<dyn Clock>,
}

impl Io {
    /// The machine's own files, read and written by the engine that was asked for.
    pub fn system(
        kind: EngineKind,
        direct: bool,
        queue_depth: u32,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, DiskError> {
        let workers = Arc::new(Workers::new(queue_depth.clamp(2, 16) as usize));
        let psync = || PsyncEngine::new(Arc::clone(&workers), queue_depth, Arc::clone(&clock));
        let uring = || UringEngine::new(queue_depth, Arc::clone(&clock));
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
        Ok(Self { engine, files: Arc::new(SystemFiles), workers, clock })
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
        let files = Arc::clone(&self.files);
        self.workers
            .call(move || work(files.as_ref()), deadline, self.clock.as_ref())
            .and_then(|result| result)
            .map_err(|source| DiskError::from_io(operation, path, source))
    }

    /// Carries transfers out to the end: short ones are continued, interrupted ones repeated.
    pub(crate) fn transfer_all(
        &self,
        transfers: Vec<Transfer>,
        deadline: Deadline,
    ) -> Vec<(Option<Transfer>, io::Result<()>)> {
        let mut answers: Vec<_> = transfers.iter().map(|_| None).collect();
        let mut open: Vec<(usize, Transfer)> = transfers.into_iter().enumerate().collect();
        while !open.is_empty() {
            let (indices, batch): (Vec<_>, Vec<_>) = open.drain(..).unzip();
            let finished = self.engine.transfer(batch, deadline);
            for (index, Finished { transfer, result }) in indices.into_iter().zip(finished) {
                let Some(mut transfer) = transfer else {
                    answers[index] = Some((None, result.map(|_| ())));
                    continue;
                };
                match transfer.advance(result) {
                    Ok(true) => answers[index] = Some((Some(transfer), Ok(()))),
                    Ok(false) if !deadline.has_passed(self.clock.as_ref()) => {
                        open.push((index, transfer));
                    }
                    Ok(false) => {
                        let late = Err(io::ErrorKind::TimedOut.into());
                        answers[index] = Some((Some(transfer), late));
                    }
                    Err(error) => answers[index] = Some((Some(transfer), Err(error))),
                }
            }
        }
        answers.into_iter().flatten().collect()
    }
}
