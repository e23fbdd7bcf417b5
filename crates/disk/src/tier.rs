//! The interface of the file tier for all layouts.

use std::fmt;

use cascade_block::{BlockKey, Namespace};
use cascade_memory::Slab;
use cascade_runtime::Deadline;
use cascade_tier::tier::{LoadQueue, load_list};

use crate::{
    Address, BlockFacts, DiskError, EraseOutcome, Load, LoadOutcome, MakeRoomOutcome,
    StoredManifest,
};

/// The result of recovery at opening.
#[derive(Debug, Default)]
pub struct Recovery {
    /// All live blocks and aliases, oldest first.
    pub live: Vec<(BlockFacts, Address)>,
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
        batch: Vec<(BlockFacts, Slab)>,
        deadline: Deadline,
    ) -> Vec<Result<Address, DiskError>>;

    /// Reads the blocks of a queue into their slabs and checks key, length and checksum, until the
    /// queue is empty or the deadline passes.
    ///
    /// Gives each block that it takes from the queue back once, before it returns. Blocks that it
    /// has not taken by the deadline stay in the queue.
    fn read_each(&self, queue: &mut dyn LoadQueue, deadline: Deadline);

    /// As [`Self::read_each`], for a list of blocks; one result for each, in order.
    fn read(&self, batch: Vec<Load>, deadline: Deadline) -> Vec<LoadOutcome> {
        load_list(batch, |queue| self.read_each(queue, deadline))
    }

    /// Adds another key to stored bytes and returns the address for that key.
    fn alias(
        &self,
        batch: &[(BlockFacts, Address)],
        deadline: Deadline,
    ) -> Vec<Result<Address, DiskError>>;

    /// Removes keys from addresses; the removal lasts across restarts. Unknown pairs are skipped.
    ///
    /// Reads return `Gone` from now on, even if the removal could not be written. In that case an
    /// error is returned, and a restart may bring the key back. The exception is a `Timeout` while
    /// waiting for earlier writes: then nothing was removed.
    fn remove(&self, keys: &[(BlockKey, Address)], deadline: Deadline) -> Result<(), DiskError>;

    /// Frees one segment: a mostly dead one if there is one, otherwise the oldest. `keep` is called
    /// for every live key in it; blocks to keep are moved first, as far as the capacity allows.
    /// `keep` may read, but not write or reclaim.
    ///
    /// Reads do not wait: those in flight complete on the old file. After an error the old
    /// addresses of blocks that were moved before it stay valid, until the next reclaim that
    /// succeeds reports the new ones.
    fn reclaim(
        &self,
        keep: &mut dyn FnMut(&BlockFacts, Address) -> bool,
        deadline: Deadline,
    ) -> Result<MakeRoomOutcome, DiskError>;

    /// Looks up a key that another writer may have stored (file per block only).
    fn lookup(
        &self,
        key: &BlockKey,
        deadline: Deadline,
    ) -> Result<Option<(BlockFacts, Address)>, DiskError>;

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
    fn erase(&self, deadline: Deadline) -> Result<EraseOutcome, DiskError>;

    /// Bytes that the files use on the device.
    fn used_bytes(&self) -> u64;

    /// Counters and sizes.
    fn stats(&self) -> DiskStats;
}
