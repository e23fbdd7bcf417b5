//! Blocks in append-only segments: one writer, many readers.
//!
//! Invariants: a segment is written only after its last frame, and never again once it is sealed or
//! failed. A slot appears in memory only after its whole frame was written. An address refers to
//! the same bytes for as long as it is valid.

mod alias;
mod background;
mod capacity;
mod create;
mod erase;
mod flush;
mod read;
mod reclaim;
mod recovery;
mod repair;
mod replay;
mod seal;
mod segment;
mod tier;
mod write;
mod write_run;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use cascade_block::BlockKey;
use cascade_runtime::{Deadline, DeadlineMutex, DeadlineMutexGuard, Mutex, MutexGuard, RwLock};

use self::capacity::Capacity;
use self::flush::sync_for_flush;
pub use self::recovery::Recovery;
pub(crate) use self::recovery::checkpoint_bytes_max;
pub(crate) use self::replay::replay;
use self::segment::Segment;
pub use self::tier::TIER_NAME;
use self::write::WriterState;
use crate::io::FileIo;
use crate::lock::DirectoryLock;
use crate::problem_log::ProblemLog;
use crate::shared_sync::SharedSync;
use crate::{Address, BlockFacts, DiskError, FilesConfig, device_probe};

/// The file tier. A store uses it as a [`Tier`](cascade_tier::tier::Tier).
///
/// Calls may come from any thread. Writers take turns; readers never wait for them. A call that
/// reaches its deadline returns `Timeout`, and its operation may still complete.
#[derive(Debug)]
pub struct SegmentFiles {
    /// As at opening; `capacity` has the current one.
    config: FilesConfig,
    capacity: Capacity,
    io: FileIo,
    is_direct: bool,
    /// By number. Numbers only ascend, so the first segment is the oldest and the last the newest.
    segments: RwLock<BTreeMap<u32, Arc<Segment>>>,
    /// Locked before the state of a segment where both are locked.
    aliases: Mutex<Aliases>,
    /// New addresses of blocks by their old address: of those that the last reclaim moved, and of
    /// `UnreportedMoves`.
    moved_addresses: RwLock<HashMap<Address, Address>>,
    /// Locked during the I/O of writes. Reads never lock it.
    writer: DeadlineMutex<WriterState>,
    /// Locked before `writer` where both are locked. Only its holder moves blocks or removes
    /// segments.
    reclaim_lock: DeadlineMutex<UnreportedMoves>,
    /// Syncs and checkpoints for all callers that wait for one.
    syncs: SharedSync,
    checkpoints: SharedSync,
    counters: SegmentCounters,
    problems: ProblemLog,
    recovery: Mutex<Recovery>,
    /// None once the tier is closed. Calls in flight have clones: the directory's lock is released
    /// with the last.
    directory_lock: RwLock<Option<Arc<DirectoryLock>>>,
}

/// Counters since the opening, and current sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DiskStats {
    /// Name of the I/O engine.
    pub engine: &'static str,
    /// Whether the page cache is bypassed. False if the file system does not support it.
    pub is_direct: bool,
    /// Whether the pool's memory is registered with the kernel, which saves pinning it for each
    /// transfer.
    pub is_registered: bool,
    /// Number of files.
    pub files: u64,
    /// Bytes that the files use.
    pub used_bytes: u64,
    /// Bytes of live payloads, padded to pages.
    pub live_bytes: u64,
    /// Live blocks, aliases not counted.
    pub live_records: u64,
    /// Blocks and aliases written.
    pub records_written: u64,
    /// Payload bytes written.
    pub bytes_written: u64,
    /// Blocks that were read and match their checksum.
    pub records_read: u64,
    /// Their payload bytes.
    pub bytes_read: u64,
    /// Blocks read and found damaged.
    pub records_damaged: u64,
    /// Footers found damaged since the opening.
    pub structures_damaged: u64,
    /// Segments closed because a write failed.
    pub segments_failed: u64,
    /// Bytes that reclaims moved.
    pub bytes_moved: u64,
    /// Calls past their deadline that the kernel has not completed.
    pub stuck_calls: u64,
}

/// Blocks that failed reclaims moved: key, old address, new address. The caller still has the old
/// addresses, and the next reclaim that succeeds reports the new ones.
pub(super) type UnreportedMoves = Vec<(BlockKey, Address, Address)>;

/// The aliases of each block, by its address.
pub(super) type Aliases = HashMap<Address, Vec<Alias>>;

/// An additional key of a block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Alias {
    meta: BlockFacts,
    sequence: u64,
}

#[derive(Debug, Default)]
struct SegmentCounters {
    records_written: AtomicU64,
    bytes_written: AtomicU64,
    records_read: AtomicU64,
    bytes_read: AtomicU64,
    records_damaged: AtomicU64,
    structures_damaged: AtomicU64,
    segments_failed: AtomicU64,
    bytes_moved: AtomicU64,
}

fn count(counter: &AtomicU64, by: u64) {
    // Relaxed: the counters are statistics and order nothing.
    counter.fetch_add(by, Ordering::Relaxed);
}

impl SegmentFiles {
    fn segment(&self, number: u32) -> Option<Arc<Segment>> {
        let segments = self.segments.read().unwrap_or_else(PoisonError::into_inner);
        segments.get(&number).cloned()
    }

    fn all_segments(&self) -> Vec<Arc<Segment>> {
        let segments = self.segments.read().unwrap_or_else(PoisonError::into_inner);
        segments.values().cloned().collect()
    }

    fn aliases(&self) -> MutexGuard<'_, Aliases> {
        self.aliases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The current address of a block that may have moved.
    fn resolve(&self, mut address: Address) -> Address {
        // More than one step if a block moved again after a failed reclaim. The loop ends because
        // an address is never used twice.
        while let Some(moved) = self.moved_address(address) {
            address = moved;
        }
        address
    }

    fn moved_address(&self, address: Address) -> Option<Address> {
        let moved_addresses = self.moved_addresses.read().unwrap_or_else(PoisonError::into_inner);
        moved_addresses.get(&address).copied()
    }

    /// Calls `find` for an address and then for the addresses that its block was moved to, until it
    /// returns something.
    fn find_moved<T>(
        &self,
        mut address: Address,
        mut find: impl FnMut(Address) -> Option<T>,
    ) -> Option<T> {
        loop {
            if let Some(found) = find(address) {
                return Some(found);
            }
            // Only now: a reclaim redirects an address before it removes keys from the old block.
            address = self.moved_address(address)?;
        }
    }

    fn lock<'a, T>(
        &self,
        mutex: &'a DeadlineMutex<T>,
        deadline: Deadline,
    ) -> Result<DeadlineMutexGuard<'a, T>, DiskError> {
        mutex.lock(deadline, self.io.clock.as_ref()).ok_or_else(|| self.too_late())
    }

    /// The error of a call whose deadline passes before it begins.
    fn too_late(&self) -> DiskError {
        let operation = "waiting for earlier writes";
        DiskError::Timeout { operation, path: self.config.directory.clone() }
    }

    /// The lock of the directory, which a call keeps until it ends.
    fn held_lock(&self) -> Result<Arc<DirectoryLock>, DiskError> {
        let lock = self.directory_lock.read().unwrap_or_else(PoisonError::into_inner);
        lock.clone().ok_or_else(|| DiskError::Closed { directory: self.config.directory.clone() })
    }

    /// Waits for the segments that are being sealed, if nothing is written now.
    fn end_seal(&self) {
        let now = Deadline::at(self.io.clock.monotonic());
        let Ok(mut writer) = self.lock(&self.writer, now) else { return };
        if let Some(deadline) = writer.sealing.iter().map(|sealing| sealing.deadline).max() {
            self.finish_seals(&mut writer, deadline);
        }
    }

    /// Syncs everything written so far to stable storage.
    pub fn sync(&self, deadline: Deadline) -> Result<(), DiskError> {
        self.syncs.run(
            deadline,
            self.io.clock.as_ref(),
            || self.too_late(),
            || {
                let mut writer = self.lock(&self.writer, deadline)?;
                sync_for_flush(self, &mut writer, deadline)
            },
        )
    }

    /// Syncs, and writes a checkpoint of the live blocks so that the next opening is short.
    pub fn checkpoint(&self, deadline: Deadline) -> Result<(), DiskError> {
        self.checkpoints.run(
            deadline,
            self.io.clock.as_ref(),
            || self.too_late(),
            || self.write_checkpoint(deadline),
        )
    }

    /// Checks that the device answers and that the directory is still the one that was opened:
    /// writes a page beside the blocks, syncs it and reads it back. `NoSpace` means that the device
    /// answers.
    pub fn probe_device(&self, deadline: Deadline) -> Result<(), DiskError> {
        let lock = self.held_lock()?;
        device_probe::probe(&self.io, &self.config, &lock, self.is_direct, deadline)
    }

    /// What the opening found. The live blocks are in the first result only.
    pub fn recovery(&self) -> Recovery {
        let mut recovery = self.recovery.lock().unwrap_or_else(PoisonError::into_inner);
        let live = std::mem::take(&mut recovery.live);
        Recovery { live, ..recovery.clone() }
    }

    /// Bytes that the files use on the device.
    pub fn used_bytes(&self) -> u64 {
        self.all_segments().iter().map(|segment| segment.state().file_bytes).sum()
    }

    /// Counters and sizes.
    pub fn disk_stats(&self) -> DiskStats {
        let segments = self.all_segments();
        let total = |size: fn(&Segment) -> u64| segments.iter().map(|each| size(each)).sum();
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        DiskStats {
            engine: self.io.engine.name(),
            is_direct: self.is_direct,
            is_registered: self.io.engine.is_registered(),
            files: segments.len() as u64,
            used_bytes: total(|segment| segment.state().file_bytes),
            live_bytes: total(|segment| segment.state().live_bytes),
            live_records: total(|segment| segment.state().live_records()),
            records_written: load(&self.counters.records_written),
            bytes_written: load(&self.counters.bytes_written),
            records_read: load(&self.counters.records_read),
            bytes_read: load(&self.counters.bytes_read),
            records_damaged: load(&self.counters.records_damaged),
            structures_damaged: load(&self.counters.structures_damaged),
            segments_failed: load(&self.counters.segments_failed),
            bytes_moved: load(&self.counters.bytes_moved),
            stuck_calls: self.io.stuck_calls(),
        }
    }

    fn segment_path(&self, number: u32) -> PathBuf {
        self.config.directory.join(format!("{}-{number:08x}.segment", self.config.writer))
    }
}

impl Drop for SegmentFiles {
    /// The directory's lock is free afterwards, unless the device hangs.
    fn drop(&mut self) {
        self.end_seal();
    }
}
