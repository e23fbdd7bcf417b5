//! The interface of the file tier, whatever its layout.

use std::fmt;
use std::sync::Arc;

use cascade_block::{BlockKey, Clock, Deadline, Namespace};
use cascade_memory::{Pool, Slab, SlabMut};

use crate::io::FileIo;
use crate::per_block::PerBlockFiles;
use crate::segments::SegmentFiles;
use crate::{Address, DiskError, EraseReport, FileTierConfig, Layout, RecordMeta, StoredManifest};

/// A block to read, and where to.
#[derive(Debug)]
pub struct ReadRequest {
    /// Where the block lies.
    pub address: Address,
    /// Its name, which is checked.
    pub key: BlockKey,
    /// Exactly as long as the block.
    pub slab: SlabMut,
}

/// What became of one block of a read.
#[derive(Debug)]
pub enum ReadOutcome {
    /// The slab holds the block's bytes, and they match their checksum.
    Hit(SlabMut),
    /// The file does not hold what was written. The block is a miss from now on.
    Damaged(DamageKind),
    /// The block was removed, or was never here.
    Gone,
    /// Failed. The block may still be there.
    Failed(DiskError),
}

/// In which way a file does not hold what was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DamageKind {
    /// Bytes changed.
    Checksum,
    /// Bytes are missing at the end.
    Truncated,
    /// The header of a block file does not parse, or is another block's.
    Header,
}

/// What a reclaim did. Until the next reclaim, old addresses of moved blocks lead to the new.
#[derive(Debug, Default)]
pub struct ReclaimOutcome {
    /// Blocks that were kept and lie elsewhere now: key, old address, new address.
    pub moved: Vec<(BlockKey, Address, Address)>,
    /// Blocks that are gone, because they were not to be kept, had expired, or were damaged.
    pub dropped: Vec<(BlockKey, Address)>,
    /// By how much the files shrank.
    pub bytes_freed: u64,
}

/// What was found at opening.
#[derive(Debug, Default)]
pub struct Recovery {
    /// Every live block and alias, oldest first.
    pub live: Vec<(RecordMeta, Address)>,
    /// Blocks whose writing was cut short.
    pub torn_records: u64,
    /// Headers and footers that were there and do not match their checksum.
    pub damaged_structures: u64,
    /// Blocks left out because they had expired.
    pub expired_records: u64,
    /// Files that were found.
    pub files: u64,
    /// How many of them had to be scanned frame by frame.
    pub scanned_files: u64,
    /// Whether a checkpoint was used.
    pub used_checkpoint: bool,
    /// Manifests that do not parse, or are not what their name says.
    pub bad_manifests: Vec<StoredManifest>,
    /// Files that are not what their name says, such as a directory; they are left alone.
    pub misplaced_files: u64,
}

/// Counters since the start, and sizes now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DiskStats {
    /// Name of the engine.
    pub engine: &'static str,
    /// Whether the page cache is passed by. False if the file system refused.
    pub is_direct: bool,
    /// Whether the pool's memory is registered with the kernel, so that transfers do not pin it.
    pub is_registered: bool,
    /// Files now.
    pub files: u64,
    /// Bytes that the files take.
    pub used_bytes: u64,
    /// Bytes of live payloads, padded to pages.
    pub live_bytes: u64,
    /// Live blocks, aliases not counted.
    pub live_records: u64,
    /// Blocks and aliases written.
    pub records_written: u64,
    /// Payload bytes written.
    pub bytes_written: u64,
    /// Blocks read and found right.
    pub records_read: u64,
    /// Their payload bytes.
    pub bytes_read: u64,
    /// Blocks read and found damaged.
    pub records_damaged: u64,
    /// Footers that were found damaged since the opening.
    pub structures_damaged: u64,
    /// Segments closed because a write failed.
    pub segments_failed: u64,
    /// Bytes that reclaims rewrote.
    pub bytes_moved: u64,
    /// Calls that go on although their deadline passed.
    pub stuck_calls: u64,
}

/// Blocks in files. Implemented once a layout; `conformance` holds the tests for all.
///
/// All calls may be made from any thread. Writers take turns, readers never wait for them.
/// A call that reaches its deadline returns `Timeout`, and what it began may still happen.
pub trait BlockFiles: Send + Sync + fmt::Debug {
    /// Writes blocks, and returns one answer each: the address once all of the block is written
    /// (on stable storage, in a durable tier). `Full` asks for a reclaim.
    ///
    /// A block that was here under another address stays there until that is removed.
    fn append(
        &self,
        batch: Vec<(RecordMeta, Slab)>,
        deadline: Deadline,
    ) -> Vec<Result<Address, DiskError>>;

    /// Reads blocks straight into their slabs; checks key, length and checksum.
    fn read(&self, batch: Vec<ReadRequest>, deadline: Deadline) -> Vec<ReadOutcome>;

    /// Gives bytes that are stored already another key, and returns where that key finds them.
    fn alias(
        &self,
        batch: &[(RecordMeta, Address)],
        deadline: Deadline,
    ) -> Vec<Result<Address, DiskError>>;

    /// Removes keys from addresses, also beyond a restart. Pairs that are not here are skipped.
    ///
    /// Reads answer `Gone` from now on even if the removal could not be written down (then an
    /// error says so, and a restart may bring the key back), except after a `Timeout` while
    /// earlier writes were waited for: then nothing was done.
    fn remove(&self, keys: &[(BlockKey, Address)], deadline: Deadline) -> Result<(), DiskError>;

    /// Frees the oldest segment, or the one with least left in it. `keep` is asked for every live
    /// key in it; what is kept is moved first, as far as the capacity goes. `keep` may read, but
    /// not write or reclaim.
    ///
    /// Reads are not held up: those under way finish on the old file.
    fn reclaim(
        &self,
        keep: &mut dyn FnMut(&RecordMeta, Address) -> bool,
        deadline: Deadline,
    ) -> Result<ReclaimOutcome, DiskError>;

    /// Looks a key up by name, where others may have stored it (file per block only).
    fn lookup(
        &self,
        key: &BlockKey,
        deadline: Deadline,
    ) -> Result<Option<(RecordMeta, Address)>, DiskError>;

    /// Brings everything that was written before to stable storage.
    fn sync(&self, deadline: Deadline) -> Result<(), DiskError>;

    /// Syncs, and writes down what is live, so that the next opening is short.
    fn checkpoint(&self, deadline: Deadline) -> Result<(), DiskError>;

    /// Writes a namespace's compatibility manifest beside its blocks, unless it is there.
    fn register_manifest(&self, namespace: &Namespace, deadline: Deadline)
    -> Result<(), DiskError>;

    /// The manifests beside the blocks, also those that do not parse.
    fn manifests(&self, deadline: Deadline) -> Result<Vec<StoredManifest>, DiskError>;

    /// Writes a page beside the blocks, syncs it and reads it back: whether the device answers, and
    /// the directory is still the one that was opened. `NoSpace` is an answer.
    fn probe_device(&self, deadline: Deadline) -> Result<(), DiskError>;

    /// Reads a page from beside the blocks, past the page cache where that is possible, and looks
    /// whether the directory is still the one that was opened. Writes nothing.
    fn probe_reads(&self, deadline: Deadline) -> Result<(), DiskError>;

    /// What was found damaged or out of place, at the opening and since: the latest few, in words.
    fn problems(&self) -> Vec<String>;

    /// Overwrites and removes every file of the tier: blocks, checkpoint, manifests. It is empty
    /// and usable afterwards; the result names the files that resisted.
    fn erase(&self, deadline: Deadline) -> Result<EraseReport, DiskError>;

    /// Bytes that the files take on the device.
    fn used_bytes(&self) -> u64;

    /// Counters and sizes.
    fn stats(&self) -> DiskStats;
}

/// Opens a file tier with the machine's own files, and finds what is in it.
///
/// `pool` is where slabs come from.
pub fn open(
    config: FileTierConfig,
    clock: Arc<dyn Clock>,
    pool: &Pool,
    deadline: Deadline,
) -> Result<(Arc<dyn BlockFiles>, Recovery), DiskError> {
    let io = FileIo::system(config.engine, config.direct, config.queue_depth, Some(pool), clock)?;
    open_with(config, io, pool, deadline)
}

/// Opens a file tier on a machine of the caller's making.
pub fn open_with(
    config: FileTierConfig,
    io: Io,
    _pool: &Pool,
    deadline: Deadline,
) -> Result<(Arc<dyn BlockFiles>, Recovery), DiskError> {
    let config = config.checked()?;
    match config.layout {
        Layout::Segments => {
            let (files, recovery) = SegmentFiles::open(config, io, deadline)?;
            Ok((Arc::new(files), recovery))
        }
        Layout::FilePerBlock => {
            let (files, recovery) = PerBlockFiles::open(config, io, deadline)?;
            Ok((Arc::new(files), recovery))
        }
    }
}
