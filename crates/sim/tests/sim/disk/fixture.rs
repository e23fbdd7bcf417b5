//! A simulated disk with one directory, and transfers from and to its files.

use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cascade_disk::format::PAGE_BYTES;
use cascade_disk::io::{
    Buffer, FileHandle, FileIo, OpenMode, PageBuffer, Transfer, TransferKind, TransferOutcome,
    TransferQueue,
};
use cascade_runtime::simulated::{Ending, Report, Settings, World};
use cascade_runtime::{Clock, Deadline, SystemClock};
use cascade_sim::disk::{DiskFault, DiskSettings, Episode, SimDisk};

pub(crate) const DIRECTORY: &str = "/files";
pub(crate) const FILE: &str = "/files/one";
pub(crate) const SEEDS: u64 = 200;
pub(crate) const SECTOR_BYTES: usize = 512;

/// Transfers, and their outcomes in the order of their completion.
#[derive(Default)]
pub(crate) struct Batch {
    pub(crate) waiting: VecDeque<Transfer>,
    taken: usize,
    outcomes: Vec<(usize, TransferOutcome)>,
}

impl TransferQueue for Batch {
    fn next_transfer(&mut self) -> Option<(usize, Transfer)> {
        let transfer = self.waiting.pop_front()?;
        self.taken += 1;
        Some((self.taken - 1, transfer))
    }

    fn complete(&mut self, number: usize, outcome: TransferOutcome) {
        self.outcomes.push((number, outcome));
    }
}

/// A disk with one directory, and access to it.
pub(crate) struct Fixture {
    pub(crate) disk: SimDisk,
    pub(crate) io: FileIo,
}

impl Fixture {
    pub(crate) fn new(settings: DiskSettings) -> Self {
        let disk = SimDisk::new(settings);
        disk.make_durable_directory(Path::new(DIRECTORY)).unwrap();
        let io = file_io(&disk);
        Self { disk, io }
    }

    /// A disk for use outside of a world.
    pub(crate) fn instant(seed: u64) -> Self {
        Self::new(DiskSettings::without_latency(seed))
    }

    pub(crate) fn create(&self, path: &str, allocate_bytes: u64) -> Arc<FileHandle> {
        let mode = OpenMode::Create { allocate_bytes };
        Arc::new(self.io.files.open(Path::new(path), mode, true).unwrap())
    }

    pub(crate) fn run(
        &self,
        transfers: Vec<Transfer>,
        timeout: Duration,
    ) -> Vec<(usize, TransferOutcome)> {
        let mut batch = Batch { waiting: transfers.into(), ..Batch::default() };
        self.io.engine.run(&mut batch, Deadline::after(&SystemClock, timeout));
        batch.outcomes
    }

    pub(crate) fn run_one(&self, transfer: Transfer) -> (Option<Transfer>, io::Result<usize>) {
        let (_, outcome) = self.run(vec![transfer], Duration::from_secs(60)).pop().unwrap();
        (outcome.transfer, outcome.result)
    }

    pub(crate) fn write(&self, file: &Arc<FileHandle>, page: u64, fill: u8) -> io::Result<usize> {
        self.run_one(page_write(file, page, fill)).1
    }

    pub(crate) fn sync(&self, file: &Arc<FileHandle>) -> io::Result<usize> {
        self.run_one(Transfer::sync(Arc::clone(file))).1
    }

    pub(crate) fn sync_directory(&self) {
        self.io.files.sync_directory(Path::new(DIRECTORY)).unwrap();
    }

    pub(crate) fn read(&self, path: &str) -> io::Result<Vec<u8>> {
        read(&self.io, path)
    }
}

pub(crate) fn file_io(disk: &SimDisk) -> FileIo {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    disk.file_io(&clock)
}

/// The whole content of a file.
pub(crate) fn read(io: &FileIo, path: &str) -> io::Result<Vec<u8>> {
    let file = io.files.open(Path::new(path), OpenMode::Read, false)?;
    let length = usize::try_from(io.files.length(&file)?).unwrap();
    let mut bytes = vec![0; length];
    let count = io.files.read(&file, 0, &mut bytes)?;
    assert_eq!(count, length);
    Ok(bytes)
}

pub(crate) fn page_write(file: &Arc<FileHandle>, page: u64, fill: u8) -> Transfer {
    pages_write(file, page, 1, fill)
}

pub(crate) fn pages_write(file: &Arc<FileHandle>, page: u64, count: usize, fill: u8) -> Transfer {
    let pages = PageBuffer::copied(&vec![fill; count * PAGE_BYTES]);
    let offset = page * PAGE_BYTES as u64;
    Transfer::new(TransferKind::Write, Arc::clone(file), offset, vec![Buffer::Pages(pages)])
}

pub(crate) fn pages_read(file: &Arc<FileHandle>, page: u64, count: usize) -> Transfer {
    let pages = PageBuffer::zeroed(count * PAGE_BYTES);
    let offset = page * PAGE_BYTES as u64;
    Transfer::new(TransferKind::Read, Arc::clone(file), offset, vec![Buffer::Pages(pages)])
}

pub(crate) fn in_world(seed: u64, body: impl FnOnce() + Send + 'static) -> Report {
    let report = World::run(Settings::from_seed(seed), body);
    assert_eq!(report.ending, Ending::Finished, "seed {seed}");
    assert_eq!(report.panics, [""; 0], "seed {seed}");
    report
}

/// An episode that began and that does not end in a test.
pub(crate) fn always(fault: DiskFault) -> Episode {
    Episode::new(fault, Duration::ZERO, Duration::MAX)
}
