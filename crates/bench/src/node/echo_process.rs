//! The limit of the control path: a bare round trip of 64 bytes over a Unix socket.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use super::process::ProcessStats;
use super::protocol::WorkerCommand;
use super::served::socket_directory;
use super::worker_group::WorkerProcess;
use crate::{MeasureError, timed};

/// Bytes of a message, in both directions.
pub(super) const FRAME_BYTES: usize = 64;

/// Description of this limit.
pub(super) const LIMIT_IS: &str =
    "round trip of 64 bytes over a Unix socket to a process that does nothing else";

/// A worker process that echoes messages.
#[derive(Debug)]
pub(super) struct EchoProcess {
    stream: UnixStream,
    worker: WorkerProcess,
    directory: PathBuf,
}

impl EchoProcess {
    pub(super) fn start() -> Result<Self, MeasureError> {
        let failed = |error| MeasureError::measure("a bare round trip", error);
        let directory = socket_directory().map_err(failed)?;
        let mut worker = WorkerProcess::start()?;
        worker.run(&WorkerCommand::Echo { socket: directory.join("e") })?;
        let stream = UnixStream::connect(directory.join("e")).map_err(failed)?;
        stream.set_read_timeout(Some(Duration::from_secs(10))).map_err(failed)?;
        Ok(Self { stream, worker, directory })
    }

    /// The duration of one round trip.
    pub(super) fn round_trip(&mut self) -> Result<Duration, MeasureError> {
        let mut frame = [7; FRAME_BYTES];
        let mut done = Ok(());
        let took = timed(|| {
            done = self.stream.write_all(&frame).and_then(|()| self.stream.read_exact(&mut frame));
        });
        done.map_err(|error| MeasureError::measure("a bare round trip", error)).map(|()| took)
    }

    /// The kernel's statistics of the worker process.
    pub(super) fn stats(&self) -> Result<ProcessStats, MeasureError> {
        self.worker.stats()
    }
}

impl Drop for EchoProcess {
    fn drop(&mut self) {
        // If this fails, only the file of a socket remains in the temporary directory.
        drop(std::fs::remove_dir_all(&self.directory));
    }
}
