//! The bare limit of a control path: a round trip of 64 bytes over a Unix socket, and nothing else.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use super::crew::Worker;
use super::order::Order;
use super::process::ProcessFacts;
use super::served::scratch;
use crate::cli::Failure;
use crate::measure::timed;

/// Bytes that go there and come back.
pub(super) const FRAME_BYTES: usize = 64;

/// How this limit is told.
pub(super) const LIMIT_IS: &str =
    "round trip of 64 bytes over a Unix socket to a process that does nothing else";

/// A process that sends back what it is told.
#[derive(Debug)]
pub(super) struct Echo {
    stream: UnixStream,
    worker: Worker,
    directory: PathBuf,
}

impl Echo {
    pub(super) fn start() -> Result<Self, Failure> {
        let failed = |error| Failure::measure("a bare round trip", error);
        let directory = scratch().map_err(failed)?;
        let mut worker = Worker::start()?;
        worker.tell(&Order::Echo { socket: directory.join("e") })?;
        let stream = UnixStream::connect(directory.join("e")).map_err(failed)?;
        stream.set_read_timeout(Some(Duration::from_secs(10))).map_err(failed)?;
        Ok(Self { stream, worker, directory })
    }

    /// One round trip.
    pub(super) fn round_trip(&mut self) -> Result<Duration, Failure> {
        let mut frame = [7; FRAME_BYTES];
        let mut done = Ok(());
        let took = timed(|| {
            done = self.stream.write_all(&frame).and_then(|()| self.stream.read_exact(&mut frame));
        });
        done.map_err(|error| Failure::measure("a bare round trip", error)).map(|()| took)
    }

    /// What the kernel tells of the other process.
    pub(super) fn facts(&self) -> Result<ProcessFacts, Failure> {
        self.worker.facts()
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        // What stays behind is a socket's file.
        drop(std::fs::remove_dir_all(&self.directory));
    }
}
