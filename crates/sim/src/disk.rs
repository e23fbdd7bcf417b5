//! A disk in memory on virtual time, for the file tier of a simulated store.
//!
//! It keeps apart what the page cache shows and what stable storage has. A crash of the process
//! leaves the former, a power loss the latter and any part of the rest.

mod content;
mod device;
mod engine;
mod faults;
mod files;
mod names;
mod paths;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_disk::io::{FileIo, TransferKind};
use cascade_runtime::{Clock, LeafMutex, is_simulated, now, sleep};

use device::{Device, Inode};
use engine::SimEngine;
use files::SimFiles;

pub use faults::{CallKind, DiskFault, Episode};

/// A simulated disk. Clones share it.
///
/// The harness owns it: it survives the process that uses it.
#[derive(Clone)]
pub struct SimDisk(Arc<LeafMutex<Device>>);

/// What a simulated disk is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskSettings {
    /// Decides latencies, and what crashes and faults leave.
    pub seed: u64,
    /// Space for the content of files.
    pub capacity_bytes: u64,
    /// Whether files can bypass the page cache.
    pub supports_direct: bool,
    /// Maximum number of transfers in flight per call.
    pub queue_depth: usize,
    /// The time that a read takes.
    pub read: Latency,
    /// The time that a write takes.
    pub write: Latency,
    /// The time that a sync takes, of a file or of a directory.
    pub sync: Latency,
    /// The time that any other call takes.
    pub name: Latency,
    /// Whether the file system commits all changes of names in their order, as ext4 and XFS do: any
    /// sync makes all earlier ones durable. Else each directory needs a sync of its own, which is
    /// all that POSIX promises.
    pub has_journal: bool,
    /// After a power loss, what was never synced reads as noise in one file of so many. In the
    /// others, and with 0 in all, it reads as zeroes.
    pub noise_one_in: u32,
}

/// The time that a call takes: `min`, and an exponentially distributed time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Latency {
    /// The least time.
    pub min: Duration,
    /// The mean of the time added to it.
    pub mean: Duration,
    /// Nanoseconds for each KiB moved.
    pub ns_per_kib: u64,
}

/// What a disk has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DiskCounts {
    /// Reads started.
    pub reads: u64,
    /// Their bytes.
    pub bytes_read: u64,
    /// Writes started.
    pub writes: u64,
    /// Their bytes.
    pub bytes_written: u64,
    /// Syncs of files started as transfers.
    pub syncs: u64,
    /// Transfers that ended after the deadline of their call.
    pub late_transfers: u64,
    /// Calls that failed by an injected error.
    pub errors: u64,
    /// Calls that hung.
    pub hangs: u64,
    /// Calls that were slower by an injected fault.
    pub slow_calls: u64,
    /// Transfers that were short by an injected fault.
    pub short_transfers: u64,
    /// Writes of which a part was written.
    pub torn_writes: u64,
    /// Writes that the device lost.
    pub lost_writes: u64,
    /// Bits that were flipped, in a read or on the disk.
    pub flipped_bits: u64,
    /// Pages that were made unreadable.
    pub failed_pages: u64,
    /// Calls refused because the disk was full, by its capacity or by a fault.
    pub refused_for_space: u64,
    /// Calls that found another directory.
    pub other_directories: u64,
    /// Crashes of the process.
    pub kills: u64,
    /// Power losses.
    pub power_losses: u64,
    /// Violations of the contract by callers.
    pub violations: u64,
    /// The same, but of a transfer whose call has reported a time-out.
    pub late_violations: u64,
    /// When a fault last had an effect; of a call that hangs, when it ends.
    pub last_fault: Option<Duration>,
}

/// A caller did something that a disk answers with arbitrary bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContractViolation {
    /// When it happened.
    pub at: Duration,
    /// The file, if it has a name.
    pub path: Option<PathBuf>,
    /// Whether it concerns a transfer whose call has reported a time-out.
    pub is_late: bool,
    /// What happened.
    pub text: String,
}

impl Default for DiskSettings {
    /// A disk like one with flash memory.
    fn default() -> Self {
        let latency = |min_us, mean_us, ns_per_kib| Latency {
            min: Duration::from_micros(min_us),
            mean: Duration::from_micros(mean_us),
            ns_per_kib,
        };
        Self {
            seed: 0,
            capacity_bytes: 1 << 30,
            supports_direct: true,
            queue_depth: 8,
            read: latency(40, 40, 300),
            write: latency(10, 10, 500),
            sync: latency(100, 200, 0),
            name: latency(2, 8, 0),
            has_journal: false,
            noise_one_in: 4,
        }
    }
}

impl DiskSettings {
    /// A disk that takes no time, for use outside of a world.
    pub fn without_latency(seed: u64) -> Self {
        let none = Latency::default();
        Self { seed, read: none, write: none, sync: none, name: none, ..Self::default() }
    }
}

impl DiskCounts {
    fn add_transfer(&mut self, kind: TransferKind, bytes: usize) {
        match kind {
            TransferKind::Read => {
                self.reads += 1;
                self.bytes_read += bytes as u64;
            }
            TransferKind::Write => {
                self.writes += 1;
                self.bytes_written += bytes as u64;
            }
            TransferKind::Sync => self.syncs += 1,
        }
    }
}

impl SimDisk {
    /// An empty disk.
    pub fn new(settings: DiskSettings) -> Self {
        Self(Arc::new(LeafMutex::new(Device::new(settings))))
    }

    /// Access to the disk for one file tier. Times out by this clock.
    pub fn file_io(&self, clock: &Arc<dyn Clock>) -> FileIo {
        let queue_depth = self.device().settings.queue_depth;
        let engine = SimEngine::new(self.clone(), Arc::clone(clock), queue_depth);
        FileIo::new(Arc::new(engine), Arc::new(SimFiles(self.clone())), Arc::clone(clock))
    }

    /// Creates a directory with its parents, and makes their names durable.
    ///
    /// # Errors
    /// If a file has the name of one of them.
    pub fn make_durable_directory(&self, path: &Path) -> io::Result<()> {
        let mut device = self.device();
        device.make_directory(path)?;
        for parent in path.ancestors() {
            let inode = device.resolve(parent)?;
            let last = device.name_changes;
            device.end_directory_sync(inode, last, None, now())?;
        }
        Ok(())
    }

    /// The process that uses the disk has been killed, as with `kill -9`. What it wrote stays, each
    /// write in flight leaves all, nothing, or its beginning, and its locks are free.
    ///
    /// The caller kills the threads first. Outside of a world, handles of the killed process fail.
    pub fn kill(&self) {
        let mut device = self.device();
        device.counts.kills += 1;
        device.cut_transfers();
        device.end_process();
    }

    /// The machine has lost power. What was synced stays, and any part of the rest.
    ///
    /// The caller kills the threads first.
    pub fn power_loss(&self) {
        let mut device = self.device();
        device.counts.power_losses += 1;
        device.cut_transfers();
        device.end_process();
        device.lose_power();
    }

    /// Adds an episode of a fault.
    pub fn inject(&self, episode: Episode) {
        self.device().faults.add(episode);
    }

    /// Ends all episodes. A call that hangs still hangs until the end of its episode.
    pub fn clear_faults(&self) {
        self.device().faults.clear();
    }

    /// The end of the last episode that was added.
    pub fn faults_end(&self) -> Duration {
        self.device().faults.end()
    }

    /// Changes the capacity. Files that are there stay.
    pub fn set_capacity(&self, capacity_bytes: u64) {
        self.device().settings.capacity_bytes = capacity_bytes;
    }

    /// Flips a bit of a file on the disk. Returns whether the file has data there.
    pub fn flip_bit(&self, path: &Path, offset: u64, bit: u8) -> bool {
        let mut device = self.device();
        let Ok(inode) = device.file(path) else { return false };
        let is_flipped = device.content(inode).is_ok_and(|content| content.flip_bit(offset, bit));
        if is_flipped {
            device.count_fault(DiskFault::FlippedWrite, now());
        }
        is_flipped
    }

    /// Makes a page of a file unreadable until it is written again. Returns whether there is such a
    /// file.
    pub fn fail_page(&self, path: &Path, offset: u64) -> bool {
        let mut device = self.device();
        let Ok(inode) = device.file(path) else { return false };
        device.counts.failed_pages += 1;
        device.counts.last_fault = device.counts.last_fault.max(Some(now()));
        device.content(inode).map(|content| content.fail_page(offset)).is_ok()
    }

    /// A page with data drawn by lot: its file and its offset.
    pub fn draw_page(&self) -> Option<(PathBuf, u64)> {
        let mut device = self.device();
        let mut pages = Vec::new();
        for (path, inode) in device.files() {
            if let Some(Inode::File(content)) = device.inodes.get(&inode) {
                pages.extend(content.data().map(|offset| (path.clone(), offset)));
            }
        }
        let drawn = device.random.index_below(pages.len());
        pages.into_iter().nth(drawn)
    }

    /// The paths and lengths of all files.
    pub fn files(&self) -> Vec<(PathBuf, u64)> {
        let device = self.device();
        let length = |inode| match device.inodes.get(&inode) {
            Some(Inode::File(content)) => content.length(),
            _ => 0,
        };
        device.files().into_iter().map(|(path, inode)| (path, length(inode))).collect()
    }

    /// Bytes that the content of files uses.
    pub fn used_bytes(&self) -> u64 {
        self.device().used_bytes()
    }

    /// What the disk has done so far.
    pub fn counts(&self) -> DiskCounts {
        self.device().counts
    }

    /// The first violations of the contract by callers, and the first that concern a transfer whose
    /// call has reported a time-out.
    pub fn violations(&self) -> Vec<ContractViolation> {
        self.device().violations.clone()
    }

    /// Held for one step, never over a scheduling point.
    fn device(&self) -> MutexGuard<'_, Device> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimDisk").field("settings", &self.device().settings).finish_non_exhaustive()
    }
}

/// Waits for the end of a call. In a world other threads can run first even if it takes no time.
fn wait_until(due: Duration) {
    let left = due.saturating_sub(now());
    if is_simulated() || !left.is_zero() {
        sleep(left);
    }
}
