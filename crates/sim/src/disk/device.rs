//! The state of a simulated disk: files, directories, open files and locks.

mod transfers;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cascade_disk::format::PAGE_BYTES;
use cascade_runtime::simulated::{Random, World};

use super::content::Content;
use super::faults::{CallKind, DiskFault, FaultPlan};
use super::names::Directory;
use transfers::InFlight;

use super::{ContractViolation, DiskCounts, DiskSettings, Latency};

/// The root directory.
pub(super) const ROOT: u64 = 1;
/// Pages of removed files that stay readable by handles. Nothing reports that a handle was closed.
const REMOVED_PAGES_MAX: u64 = 1 << 16;
/// Removed files that stay readable, however long they are.
const REMOVED_FILES_MIN: usize = 64;
/// Violations that are kept of each kind: late, or not.
const VIOLATIONS_MAX: u64 = 100;
/// The number of the first simulated process.
const FIRST_PROCESS: u32 = 1000;

/// A simulated disk.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) settings: DiskSettings,
    pub(super) random: Random,
    pub(super) faults: FaultPlan,
    pub(super) inodes: BTreeMap<u64, Inode>,
    handles: BTreeMap<u64, OpenFile>,
    /// The locked files and the numbers of their locks.
    pub(super) locks: BTreeMap<u64, u64>,
    pub(super) in_flight: BTreeMap<u64, InFlight>,
    /// Files without a name that a handle may still use, the oldest first.
    removed: VecDeque<u64>,
    used_pages: u64,
    /// The number of the process that uses the disk. Each crash adds one.
    process: u32,
    last_number: u64,
    /// The number of the last change of a name.
    pub(super) name_changes: u64,
    pub(super) counts: DiskCounts,
    pub(super) violations: Vec<ContractViolation>,
}

/// A file or a directory.
#[derive(Debug)]
pub(super) enum Inode {
    File(Content),
    Directory(Directory),
}

/// An open file.
#[derive(Debug, Clone, Copy)]
pub(super) struct OpenFile {
    pub(super) inode: u64,
    pub(super) is_direct: bool,
    pub(super) is_writable: bool,
}

/// The error of a device that could not do what it was asked.
pub(super) fn device_error() -> io::Error {
    const EIO: i32 = 5;
    io::Error::from_raw_os_error(EIO)
}

/// The error of a handle that is not open.
pub(super) fn bad_handle() -> io::Error {
    const EBADF: i32 = 9;
    io::Error::from_raw_os_error(EBADF)
}

impl Device {
    pub(super) fn new(settings: DiskSettings) -> Self {
        Self {
            random: Random::new(settings.seed, 0),
            settings,
            faults: FaultPlan::default(),
            inodes: BTreeMap::from([(ROOT, Inode::Directory(Directory::default()))]),
            handles: BTreeMap::new(),
            locks: BTreeMap::new(),
            in_flight: BTreeMap::new(),
            removed: VecDeque::new(),
            used_pages: 0,
            process: FIRST_PROCESS,
            last_number: ROOT,
            name_changes: 0,
            counts: DiskCounts::default(),
            violations: Vec::new(),
        }
    }

    /// A number that no inode, handle, transfer or lock had before.
    pub(super) fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    pub(super) fn next_name_change(&mut self) -> u64 {
        self.name_changes += 1;
        self.name_changes
    }

    pub(super) fn process(&self) -> u32 {
        self.process
    }

    pub(super) fn used_bytes(&self) -> u64 {
        self.used_pages * PAGE_BYTES as u64
    }

    /// Draws the time that a call takes.
    pub(super) fn draw_latency(&mut self, latency: Latency, bytes: usize) -> Duration {
        let mean_ns = u64::try_from(latency.mean.as_nanos()).unwrap_or(u64::MAX);
        let random_ns = if mean_ns == 0 { 0 } else { exponential(mean_ns, &mut self.random) };
        let transfer_ns = bytes as u64 * latency.ns_per_kib / 1024;
        latency.min + Duration::from_nanos(random_ns + transfer_ns)
    }

    /// Counts a fault, and remembers when it happened.
    pub(super) fn count_fault(&mut self, fault: DiskFault, now: Duration) {
        self.counts.last_fault = self.counts.last_fault.max(Some(now));
        let counts = &mut self.counts;
        let count = match fault {
            DiskFault::Error(_) => &mut counts.errors,
            DiskFault::Hang(_) | DiskFault::Stall => &mut counts.hangs,
            DiskFault::Slow(_) => &mut counts.slow_calls,
            DiskFault::ShortTransfer => &mut counts.short_transfers,
            DiskFault::TornWrite => &mut counts.torn_writes,
            DiskFault::LostWrite => &mut counts.lost_writes,
            DiskFault::FlippedRead | DiskFault::FlippedWrite => &mut counts.flipped_bits,
            DiskFault::Full => &mut counts.refused_for_space,
            DiskFault::OtherDirectory => &mut counts.other_directories,
        };
        *count += 1;
    }

    /// Records that a caller broke the contract of the disk.
    pub(super) fn violate(&mut self, inode: u64, is_late: bool, text: String) {
        let counts = &mut self.counts;
        let count = if is_late { &mut counts.late_violations } else { &mut counts.violations };
        *count += 1;
        if *count <= VIOLATIONS_MAX {
            let (at, path) = (cascade_runtime::now(), self.path_of(inode));
            self.violations.push(ContractViolation { at, path, is_late, text });
        }
    }

    // Files.

    pub(super) fn handle(&self, number: u64) -> io::Result<OpenFile> {
        self.handles.get(&number).copied().ok_or_else(bad_handle)
    }

    pub(super) fn add_handle(&mut self, file: OpenFile) -> u64 {
        let number = self.next_number();
        self.handles.insert(number, file);
        number
    }

    /// The content of an open file.
    pub(super) fn content(&mut self, inode: u64) -> io::Result<&mut Content> {
        if !matches!(self.inodes.get(&inode), Some(Inode::File(_))) {
            let text = "uses a file long after its removal; the disk has freed it".to_owned();
            self.violate(inode, false, text);
        }
        match self.inodes.get_mut(&inode) {
            Some(Inode::File(content)) => Ok(content),
            Some(Inode::Directory(_)) => Err(io::ErrorKind::IsADirectory.into()),
            None => Err(bad_handle()),
        }
    }

    /// Changes the content of a file and accounts for its space.
    pub(super) fn change<T>(
        &mut self,
        inode: u64,
        change: impl FnOnce(&mut Content) -> T,
    ) -> io::Result<T> {
        let content = self.content(inode)?;
        let before = content.used_pages();
        let result = change(content);
        let after = content.used_pages();
        if content.is_linked {
            self.used_pages = self.used_pages - before + after;
        }
        Ok(result)
    }

    /// Fails if the device has no room for so many more pages.
    pub(super) fn check_space(&mut self, pages: u64, now: Duration) -> io::Result<()> {
        let is_full = self.faults.is_active(DiskFault::Full, now);
        let wanted = (self.used_pages + pages) * PAGE_BYTES as u64;
        if pages == 0 || (!is_full && wanted <= self.settings.capacity_bytes) {
            return Ok(());
        }
        self.count_fault(DiskFault::Full, now);
        Err(io::ErrorKind::StorageFull.into())
    }

    /// Creates a file of zeroes under a free name.
    pub(super) fn create(
        &mut self,
        path: &Path,
        allocate_bytes: u64,
        now: Duration,
    ) -> io::Result<u64> {
        let (parent, name) = self.parent(path)?;
        if self.directory(parent)?.get(&name).is_some() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        self.check_space(allocate_bytes.div_ceil(PAGE_BYTES as u64), now)?;
        let content = Content::new(allocate_bytes);
        self.used_pages += content.used_pages();
        let inode = self.add_inode(Inode::File(content));
        let change = self.next_name_change();
        self.directory(parent)?.set(change, &name, Some(inode));
        Ok(inode)
    }

    pub(super) fn add_inode(&mut self, inode: Inode) -> u64 {
        let number = self.next_number();
        self.inodes.insert(number, inode);
        number
    }

    /// A file has lost its name. Handles can still use it, for a while.
    pub(super) fn unlinked(&mut self, inode: u64) {
        if let Some(Inode::File(content)) = self.inodes.get_mut(&inode) {
            content.is_linked = false;
            self.used_pages -= content.used_pages();
            self.removed.push_back(inode);
        }
        self.free_removed();
    }

    /// Frees files that neither a name nor a handle can lead to, now or after a power loss.
    pub(super) fn free_removed(&mut self) {
        let used = |device: &Self| -> u64 {
            let removed = device.removed.iter().filter_map(|inode| device.inodes.get(inode));
            let pages = removed.map(|inode| match inode {
                Inode::File(content) => content.used_pages(),
                Inode::Directory(_) => 0,
            });
            pages.sum()
        };
        if self.removed.len() <= REMOVED_FILES_MIN || used(self) <= REMOVED_PAGES_MAX {
            return;
        }
        while self.removed.len() > REMOVED_FILES_MIN && used(self) > REMOVED_PAGES_MAX / 2 {
            self.removed.pop_front();
        }
        self.free_unreferenced();
    }

    pub(super) fn free_unreferenced(&mut self) {
        let mut referenced: BTreeSet<u64> = self.removed.iter().copied().collect();
        referenced.insert(ROOT);
        referenced.extend(self.directories().flat_map(Directory::referenced));
        self.inodes.retain(|inode, _| referenced.contains(inode));
    }

    // A crash.

    /// Ends the process: its handles and locks are gone. What it wrote stays.
    pub(super) fn end_process(&mut self) {
        for inode in self.inodes.values_mut() {
            if let Inode::File(content) = inode {
                content.cancel_syncs();
            }
        }
        self.process += 1;
        self.handles.clear();
        self.locks.clear();
        self.removed.clear();
        self.free_unreferenced();
    }

    /// Leaves what a power loss leaves.
    pub(super) fn lose_power(&mut self) {
        for inode in self.inodes.values_mut() {
            if let Inode::File(content) = inode {
                content.lose_power(&mut self.random, self.settings.noise_one_in);
            }
        }
        self.lose_unsynced_names();
        let reachable = self.reachable();
        self.inodes.retain(|inode, _| reachable.contains(inode));
        self.used_pages = 0;
        for inode in self.inodes.values_mut() {
            if let Inode::File(content) = inode {
                content.is_linked = true;
                self.used_pages += content.used_pages();
            }
        }
    }

    fn reachable(&self) -> BTreeSet<u64> {
        let (mut reachable, mut open) = (BTreeSet::new(), vec![ROOT]);
        while let Some(inode) = open.pop() {
            if reachable.insert(inode)
                && let Some(Inode::Directory(directory)) = self.inodes.get(&inode)
            {
                open.extend(directory.entries().map(|(_, inode)| inode));
            }
        }
        reachable
    }

    // What a harness sees.

    /// All files with their paths.
    pub(super) fn files(&self) -> Vec<(PathBuf, u64)> {
        let (mut files, mut open) = (Vec::new(), vec![(PathBuf::from("/"), ROOT)]);
        while let Some((path, number)) = open.pop() {
            match self.inodes.get(&number) {
                Some(Inode::Directory(directory)) => {
                    open.extend(directory.entries().map(|(name, at)| (path.join(name), at)));
                }
                Some(Inode::File(_)) => files.push((path, number)),
                None => {}
            }
        }
        files.sort_unstable();
        files
    }

    fn path_of(&self, inode: u64) -> Option<PathBuf> {
        self.files().into_iter().find(|(_, number)| *number == inode).map(|(path, _)| path)
    }
}

/// Makes an event part of the hash of the world, if there is one.
pub(super) fn note(kind: CallKind, inode: u64, offset: u64, result: &io::Result<usize>) {
    if let Some(world) = World::current() {
        let kind = 0xd15c_0000 | kind as u64;
        let result = result.as_ref().map_or(u64::MAX, |bytes| *bytes as u64);
        for event in [kind, inode, offset, result] {
            world.note(event);
        }
    }
}

/// A number with an exponential distribution of this mean. Integers alone: the mathematical
/// functions of floats differ between machines, and a seed must not.
fn exponential(mean: u64, random: &mut Random) -> u64 {
    // Minus the binary logarithm of a random fraction, in 1/1024: exact at the powers of two, and
    // linear between them.
    let drawn = random.next_u64() | 1;
    let zeros = u64::from(drawn.leading_zeros());
    let mantissa = (drawn << zeros) << 1 >> 54;
    let logarithm = (zeros + 1) * 1024 - mantissa;
    // By the natural logarithm of two, 710 / 1024.
    mean.saturating_mul(logarithm) / 1024 * 710 / 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_have_their_mean() {
        let mut random = Random::new(1, 0);
        let sum: u64 = (0..20_000).map(|_| exponential(100_000, &mut random)).sum();
        let mean = sum / 20_000;
        assert!((90_000..115_000).contains(&mean), "{mean}");
    }
}
