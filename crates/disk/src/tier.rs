//! The interface of the file tier for all layouts.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use cascade_block::{BlockKey, Namespace};
use cascade_memory::{Pool, Slab, SlabMut};
use cascade_runtime::{Clock, Deadline};

use crate::io::FileIo;
use crate::per_block::PerBlockFiles;
use crate::segments::SegmentFiles;
use crate::{
    DiskError, FileAddress, FileEraseReport, FileTierConfig, FileTierLayout, RecordMeta,
    StoredManifest,
};

/// A block to read and the slab to read it into.
#[derive(Debug)]
pub struct ReadRequest {
    /// The address of the block.
    pub address: FileAddress,
    /// Its key, which is checked.
    pub key: BlockKey,
    /// The destination, exactly as long as the block.
    pub slab: SlabMut,
}

/// The result of reading one block.
#[derive(Debug)]
pub enum ReadOutcome {
    /// The slab holds the block's bytes; their checksum was verified.
    Hit(SlabMut),
    /// The block is damaged and a miss from now on.
    Damaged(DamageKind),
    /// The block was removed or was never stored here.
    Gone,
    /// The read failed. The block may still be stored.
    Failed(DiskError),
}

/// The kind of damage of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DamageKind {
    /// The bytes do not match their checksum.
    Checksum,
    /// The file is truncated.
    Truncated,
    /// The header of a block file is invalid or belongs to another block.
    Header,
}

/// The blocks of one call, from the caller to the tier and back.
///
/// The tier takes the next block when it has capacity, and gives each back as its read ends, while
/// others are in flight. All methods are called in the thread that called
/// [`BlockFiles::read_each`], with no lock of the tier held.
pub trait ReadQueue {
    /// Returns the next block to read with the caller's number for it, or `None` if there is none
    /// now. There may be more after a read has ended.
    fn next_request(&mut self) -> Option<(usize, ReadRequest)>;

    /// Reports the result of the block with this number.
    fn ended(&mut self, number: usize, outcome: ReadOutcome);

    /// All blocks that were taken are being read. Does a short piece of other work, or returns
    /// false if there is none. There may be another block afterwards.
    fn idle(&mut self) -> bool {
        false
    }
}

/// A list of blocks to read and their results.
struct ReadBatch {
    waiting: std::vec::IntoIter<ReadRequest>,
    taken_count: usize,
    outcomes: Vec<Option<ReadOutcome>>,
}

impl ReadQueue for ReadBatch {
    fn next_request(&mut self) -> Option<(usize, ReadRequest)> {
        let request = self.waiting.next()?;
        self.taken_count += 1;
        Some((self.taken_count - 1, request))
    }

    fn ended(&mut self, number: usize, outcome: ReadOutcome) {
        self.outcomes[number] = Some(outcome);
    }
}

/// The result of a reclaim. Old addresses of moved blocks stay readable until the next reclaim.
#[derive(Debug, Default)]
pub struct ReclaimOutcome {
    /// Blocks that were kept and moved: key, old address, new address.
    pub moved: Vec<(BlockKey, FileAddress, FileAddress)>,
    /// Blocks that were dropped because they were not to be kept, had expired or were damaged.
    pub dropped: Vec<(BlockKey, FileAddress)>,
    /// Bytes by which the files shrank.
    pub bytes_freed: u64,
}

/// The result of recovery at opening.
#[derive(Debug, Default)]
pub struct Recovery {
    /// All live blocks and aliases, oldest first.
    pub live: Vec<(RecordMeta, FileAddress)>,
    /// Blocks that were not written completely.
    pub torn_records: u64,
    /// Headers and footers that do not match their checksum.
    pub damaged_structures: u64,
    /// Blocks omitted because they had expired.
    pub expired_records: u64,
    /// Number of files.
    pub files: u64,
    /// Number of files that were scanned frame by frame.
    pub scanned_files: u64,
    /// Whether a checkpoint was used.
    pub used_checkpoint: bool,
    /// Manifest files that are invalid.
    pub invalid_manifests: Vec<StoredManifest>,
    /// Paths that cannot be used, such as a directory with the name of a file. They are not
    /// touched.
    pub misplaced_files: u64,
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

/// Blocks in files, with one implementation per layout. [`crate::conformance`] holds the checks for
/// all.
///
/// Calls may come from any thread. Writers take turns; readers never wait for them. A call that
/// reaches its deadline returns `Timeout`, and its operation may still complete.
pub trait BlockFiles: Send + Sync + fmt::Debug {
    /// Writes blocks and returns one result for each: the address once the whole block is written
    /// (in a durable tier: is on stable storage). On `Full` the caller should reclaim.
    ///
    /// Compares each slab with its recorded checksum, or records it. A slab that does not match
    /// fails with `ChangedInMemory`: otherwise its bytes would get a new, valid checksum.
    ///
    /// If the key already has a block at another address, that block stays until it is removed.
    fn append(
        &self,
        batch: Vec<(RecordMeta, Slab)>,
        deadline: Deadline,
    ) -> Vec<Result<FileAddress, DiskError>>;

    /// Reads the blocks of a queue into their slabs and checks key, length and checksum, until the
    /// queue is empty or the deadline passes.
    ///
    /// Each block that was taken from the queue is given back once, before this returns. Those that
    /// are not taken by the deadline stay in the queue.
    fn read_each(&self, queue: &mut dyn ReadQueue, deadline: Deadline);

    /// As [`Self::read_each`], for a list of blocks; one result for each, in order.
    fn read(&self, batch: Vec<ReadRequest>, deadline: Deadline) -> Vec<ReadOutcome> {
        let outcomes = batch.iter().map(|_| None).collect();
        let mut queue = ReadBatch { waiting: batch.into_iter(), taken_count: 0, outcomes };
        self.read_each(&mut queue, deadline);
        let timed_out = || {
            let path = self.directory().to_owned();
            ReadOutcome::Failed(DiskError::Timeout { operation: "read", path })
        };
        queue.outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(timed_out)).collect()
    }

    /// The directory of the tier.
    fn directory(&self) -> &Path;

    /// Adds another key to stored bytes and returns the address for that key.
    fn alias(
        &self,
        batch: &[(RecordMeta, FileAddress)],
        deadline: Deadline,
    ) -> Vec<Result<FileAddress, DiskError>>;

    /// Removes keys from addresses; the removal lasts across restarts. Unknown pairs are skipped.
    ///
    /// Reads return `Gone` from now on, even if the removal could not be written. In that case an
    /// error is returned, and a restart may bring the key back. The exception is a `Timeout` while
    /// waiting for earlier writes: then nothing was removed.
    fn remove(&self, keys: &[(BlockKey, FileAddress)], deadline: Deadline)
    -> Result<(), DiskError>;

    /// Frees one segment: a mostly dead one if there is one, otherwise the oldest. `keep` is called
    /// for every live key in it; blocks to keep are moved first, as far as the capacity allows.
    /// `keep` may read, but not write or reclaim.
    ///
    /// Reads do not wait: those in flight complete on the old file. After an error the old
    /// addresses of blocks that were moved before it stay valid, until the next reclaim that
    /// succeeds reports the new ones.
    fn reclaim(
        &self,
        keep: &mut dyn FnMut(&RecordMeta, FileAddress) -> bool,
        deadline: Deadline,
    ) -> Result<ReclaimOutcome, DiskError>;

    /// Looks up a key that another writer may have stored (file per block only).
    fn lookup(
        &self,
        key: &BlockKey,
        deadline: Deadline,
    ) -> Result<Option<(RecordMeta, FileAddress)>, DiskError>;

    /// Syncs everything written so far to stable storage.
    fn sync(&self, deadline: Deadline) -> Result<(), DiskError>;

    /// Syncs, and writes a checkpoint of the live blocks so that the next opening is short.
    fn checkpoint(&self, deadline: Deadline) -> Result<(), DiskError>;

    /// Writes a namespace's compatibility manifest beside its blocks unless it is already there.
    fn register_manifest(&self, namespace: &Namespace, deadline: Deadline)
    -> Result<(), DiskError>;

    /// The manifests beside the blocks, including invalid ones.
    fn manifests(&self, deadline: Deadline) -> Result<Vec<StoredManifest>, DiskError>;

    /// Checks that the device answers and that the directory is still the one that was opened:
    /// writes a page beside the blocks, syncs it and reads it back. `NoSpace` means that the device
    /// answers.
    fn probe_device(&self, deadline: Deadline) -> Result<(), DiskError>;

    /// Reads a page of a file with blocks, bypassing the page cache if possible, and checks that
    /// the directory is still the one that was opened. Writes nothing.
    fn probe_reads(&self, deadline: Deadline) -> Result<(), DiskError>;

    /// Descriptions of the latest problems found at opening and since.
    fn problems(&self) -> Vec<String>;

    /// Overwrites and removes every file of the tier: blocks, checkpoint, manifests. The tier is
    /// empty and usable afterwards. The result lists files that could not be erased.
    fn erase(&self, deadline: Deadline) -> Result<FileEraseReport, DiskError>;

    /// Bytes that the files use on the device.
    fn used_bytes(&self) -> u64;

    /// Counters and sizes.
    fn stats(&self) -> DiskStats;
}

/// Opens a file tier on the file systems of this machine and recovers what it holds.
///
/// `pool` is where slabs come from; `io_uring` may register its memory.
pub fn open(
    config: FileTierConfig,
    clock: Arc<dyn Clock>,
    pool: &Pool,
    deadline: Deadline,
) -> Result<(Arc<dyn BlockFiles>, Recovery), DiskError> {
    let io = FileIo::system(config.engine, config.direct, config.queue_depth, Some(pool), clock)?;
    open_with(config, io, deadline)
}

/// Opens a file tier with the caller's I/O, such as one that injects faults.
pub fn open_with(
    config: FileTierConfig,
    io: FileIo,
    deadline: Deadline,
) -> Result<(Arc<dyn BlockFiles>, Recovery), DiskError> {
    let config = config.checked()?;
    match config.layout {
        FileTierLayout::Segments => {
            let (files, recovery) = SegmentFiles::open(config, io, deadline)?;
            Ok((Arc::new(files), recovery))
        }
        FileTierLayout::FilePerBlock => {
            let (files, recovery) = PerBlockFiles::open(config, io, deadline)?;
            Ok((Arc::new(files), recovery))
        }
    }
}
