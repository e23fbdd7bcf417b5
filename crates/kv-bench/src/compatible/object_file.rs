//! One file of an entry: written from front to back and synced, read past the page cache.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::time::Duration;

use cascade_runtime::Clock;

use crate::backend::KvTier;

/// The time in the kernel, in the original's two parts.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct IoTimes {
    /// Reading, or syncing what was written.
    pub(crate) device: Duration,
    /// Dropping cached pages, or writing into the page cache.
    pub(crate) host: Duration,
}

impl IoTimes {
    /// All of it.
    pub(crate) fn total(self) -> Duration {
        self.device + self.host
    }
}

/// Why an entry was not written, read or moved.
#[derive(Debug)]
pub(crate) enum Unfinished {
    /// The run ended before its last piece: the tier, and the bytes of the pieces before.
    Cut {
        tier: KvTier,
        bytes: u64,
    },
    Failed(io::Error),
}

impl From<io::Error> for Unfinished {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

/// A file with the time that its calls took. The caller's time between them does not count.
pub(crate) struct ObjectFile<'a> {
    file: File,
    clock: &'a dyn Clock,
    times: IoTimes,
}

impl<'a> ObjectFile<'a> {
    /// Creates a file.
    pub(crate) fn create(path: &Path, clock: &'a dyn Clock) -> io::Result<Self> {
        let began = clock.monotonic();
        let file = File::create(path)?;
        let host = clock.monotonic().saturating_sub(began);
        Ok(Self { file, clock, times: IoTimes { host, ..IoTimes::default() } })
    }

    /// Opens a file, and drops what the page cache has of it.
    pub(crate) fn open(path: &Path, clock: &'a dyn Clock) -> io::Result<Self> {
        let began = clock.monotonic();
        let file = File::open(path)?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
        let host = clock.monotonic().saturating_sub(began);
        Ok(Self { file, clock, times: IoTimes { host, ..IoTimes::default() } })
    }

    /// Writes what comes next.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let began = self.clock.monotonic();
        let written = self.file.write_all(bytes);
        self.times.host += self.clock.monotonic().saturating_sub(began);
        written
    }

    /// Reads what comes next.
    pub(crate) fn read(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        let began = self.clock.monotonic();
        let read = self.file.read_exact(bytes);
        self.times.device += self.clock.monotonic().saturating_sub(began);
        read
    }

    /// Waits until what was written is on the device.
    pub(crate) fn sync(mut self) -> io::Result<IoTimes> {
        let began = self.clock.monotonic();
        self.file.sync_all()?;
        self.times.device += self.clock.monotonic().saturating_sub(began);
        Ok(self.times)
    }

    /// The time of its calls.
    pub(crate) fn times(&self) -> IoTimes {
        self.times
    }
}
