//! Blocks in append-only segments: one writer, many readers.
//!
//! Invariants: a segment is written only after its last frame, and never again once it is sealed or
//! failed. A slot appears in memory only after its whole frame was written. An address refers to
//! the same bytes for as long as it is valid.

mod alias;
mod background;
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
mod write;
mod write_run;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use cascade_block::{BlockKey, Namespace};
use cascade_memory::Slab;
use cascade_runtime::{Deadline, DeadlineMutex, DeadlineMutexGuard, Mutex, MutexGuard, RwLock};

use self::flush::sync_for_flush;
pub(crate) use self::recovery::checkpoint_bytes_max;
pub(crate) use self::replay::replay;
use self::segment::Segment;
use self::write::WriterState;
use crate::io::FileIo;
use crate::lock::DirectoryLock;
use crate::problem_log::ProblemLog;
use crate::shared_sync::SharedSync;
use crate::{
    Address, BlockFacts, BlockFiles, DiskError, DiskStats, EraseOutcome, FilesConfig,
    MakeRoomOutcome, StoredManifest, device_probe, manifests,
};
use cascade_tier::tier::LoadQueue;

/// The file tier with segments.
#[derive(Debug)]
pub struct SegmentFiles {
    config: FilesConfig,
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
    directory_lock: Arc<DirectoryLock>,
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

    fn segment_path(&self, number: u32) -> PathBuf {
        self.config.directory.join(format!("{}-{number:08x}.segment", self.config.writer))
    }
}

impl Drop for SegmentFiles {
    /// Waits for a segment that is being sealed. The directory's lock is then free, unless the
    /// device hangs.
    fn drop(&mut self) {
        let now = Deadline::at(self.io.clock.monotonic());
        // Nobody else can have locked it.
        let Ok(mut writer) = self.lock(&self.writer, now) else { return };
        if let Some(deadline) = writer.sealing.as_ref().map(|sealing| sealing.deadline) {
            self.finish_seal(&mut writer, deadline);
        }
    }
}

impl BlockFiles for SegmentFiles {
    fn append(
        &self,
        batch: Vec<(BlockFacts, Slab)>,
        deadline: Deadline,
    ) -> Vec<Result<Address, DiskError>> {
        self.append_blocks(batch, deadline)
    }

    fn read_each(&self, queue: &mut dyn LoadQueue, deadline: Deadline) {
        self.read_blocks(queue, deadline);
    }

    fn alias(
        &self,
        batch: &[(BlockFacts, Address)],
        deadline: Deadline,
    ) -> Vec<Result<Address, DiskError>> {
        self.alias_blocks(batch, deadline)
    }

    fn remove(&self, keys: &[(BlockKey, Address)], deadline: Deadline) -> Result<(), DiskError> {
        self.remove_keys(keys, deadline)
    }

    fn reclaim(
        &self,
        keep: &mut dyn FnMut(&BlockFacts, Address) -> bool,
        deadline: Deadline,
    ) -> Result<MakeRoomOutcome, DiskError> {
        self.reclaim_segment(keep, deadline)
    }

    fn lookup(
        &self,
        _key: &BlockKey,
        _deadline: Deadline,
    ) -> Result<Option<(BlockFacts, Address)>, DiskError> {
        // No other process writes this writer's segments. The opening and `append` have reported
        // every block of them.
        Ok(None)
    }

    fn sync(&self, deadline: Deadline) -> Result<(), DiskError> {
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

    fn checkpoint(&self, deadline: Deadline) -> Result<(), DiskError> {
        self.checkpoints.run(
            deadline,
            self.io.clock.as_ref(),
            || self.too_late(),
            || self.write_checkpoint(deadline),
        )
    }

    fn register_manifest(
        &self,
        namespace: &Namespace,
        deadline: Deadline,
    ) -> Result<(), DiskError> {
        manifests::register(&self.io, &self.config.directory, namespace, deadline)
    }

    fn manifests(&self, deadline: Deadline) -> Result<Vec<StoredManifest>, DiskError> {
        manifests::load_all(&self.io, &self.config.directory, deadline)
    }

    fn probe_device(&self, deadline: Deadline) -> Result<(), DiskError> {
        device_probe::probe(&self.io, &self.config, &self.directory_lock, self.is_direct, deadline)
    }

    fn probe_reads(&self, deadline: Deadline) -> Result<(), DiskError> {
        let newest = self.all_segments().pop().map(|segment| Arc::clone(&segment.file));
        device_probe::probe_reads(&self.io, &self.config, &self.directory_lock, newest, deadline)
    }

    fn problems(&self) -> Vec<String> {
        self.problems.all()
    }

    fn erase(&self, deadline: Deadline) -> Result<EraseOutcome, DiskError> {
        self.erase_all(deadline)
    }

    fn used_bytes(&self) -> u64 {
        self.all_segments().iter().map(|segment| segment.state().file_bytes).sum()
    }

    fn stats(&self) -> DiskStats {
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
}
