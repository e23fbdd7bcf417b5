//! What a store is made of: one typed struct, checked before anything starts.

use std::num::{NonZeroU32, NonZeroU64};
use std::path::PathBuf;
use std::time::Duration;

use cascade_block::DigestMode;
use cascade_memory::{HugePages, PoolConfig};
use thiserror::Error;

use crate::{HealthConfig, StoreError};

const MIB: u64 = 1 << 20;
/// Most changes that a store may keep: 8.25 GiB of them.
const CHANGES_MAX: usize = 1 << 28;

/// Which blocks leave DRAM first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PolicyKind {
    /// Least recently used.
    Lru,
    /// Two FIFO queues and a ghost queue.
    S3Fifo,
    /// Adaptive replacement.
    Arc,
    /// Least recently used, new data always in the fastest tier (the `MLPerf` document's).
    Waterfall,
    /// Learns online which conversations return (`docs/eviction.md`).
    #[default]
    PrefixCost,
}

/// When a block that was put reaches the tiers below the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WritePolicy {
    /// A put returns once the block is in the first tier; the mover writes it down soon after.
    #[default]
    Back,
    /// A put returns once every tier has the block.
    Through,
}

/// How blocks lie in the file tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FileLayout {
    /// Append-only segments of many blocks.
    #[default]
    Segments,
    /// One file a block, in sharded directories, for file systems shared by name.
    FilePerBlock,
}

/// When the blocks in DRAM survive the store, if its pool has a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KeepPool {
    /// When its process dies; a store that is closed takes its pool with it.
    #[default]
    AfterCrash,
    /// When it is closed, too: for an upgrade of the program.
    Always,
    /// Never; what an earlier run left is removed.
    Never,
}

/// What reads and writes the file tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IoEngine {
    /// `io_uring` where the kernel allows it, else `Psync`.
    #[default]
    Auto,
    /// `io_uring` or an error.
    Uring,
    /// `preadv` and `pwritev`.
    Psync,
}

/// The file tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilesConfig {
    /// Directory of this store alone.
    pub directory: PathBuf,
    /// Bytes that its files may take. Default: 4 GiB. Minimum: two segments.
    pub capacity_bytes: u64,
    /// Default: segments.
    pub layout: FileLayout,
    /// Size of a segment. Default: 256 MiB. Minimum: 1 MiB.
    pub segment_bytes: u64,
    /// Whether to pass by the page cache. Default: yes, where the file system allows it.
    pub direct: bool,
    /// Default: auto.
    pub engine: IoEngine,
    /// Whether a block counts as stored only once it is on stable storage. Default: no.
    pub durable: bool,
}

impl FilesConfig {
    /// The defaults, for a directory.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
            capacity_bytes: 4096 * MIB,
            layout: FileLayout::default(),
            segment_bytes: 256 * MIB,
            direct: true,
            engine: IoEngine::default(),
            durable: false,
        }
    }
}

/// Encryption of what leaves DRAM: AES-256-GCM, every block for itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncryptionConfig {
    /// A file of 32 raw bytes, or of lines of 64 hexadecimal digits: the first one writes, further
    /// ones read what was written before. Mode 0600 or 0400, outside of the file tier's directory.
    pub key_file: PathBuf,
    /// Whose blocks these are; tenants with one key have different ciphers. Default: `default`.
    pub scope: String,
}

impl EncryptionConfig {
    /// The defaults, for a key file.
    pub fn new(key_file: impl Into<PathBuf>) -> Self {
        Self { key_file: key_file.into(), scope: "default".to_owned() }
    }
}

/// Everything that a store needs to know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreConfig {
    /// Stages from fast to slow, such as `Dram|Files`. Default: `Dram`.
    pub pipeline: String,
    /// Size of the DRAM pool. Default: 256 MiB. Minimum: 4 MiB.
    pub dram_bytes: u64,
    /// Most blocks in DRAM; for studies in blocks. Default: no limit but the bytes.
    pub dram_blocks: Option<u64>,
    /// Whether the pool asks for huge pages. Default: yes.
    pub huge_pages: bool,
    /// Where the pool lies so that a process that dies leaves its blocks to the next one, such as
    /// `/dev/shm/cascade-pool`; its ledger lies beside it. Needs a file system in memory to be
    /// fast. Default: none, the pool ends with the process.
    pub pool_file: Option<PathBuf>,
    /// What `pool_file` outlives. Default: a crash.
    pub keep_pool: KeepPool,
    /// The file tier, when the pipeline names it.
    pub files: Option<FilesConfig>,
    /// Encrypts every tier below DRAM. Default: none.
    pub encryption: Option<EncryptionConfig>,
    /// Default: prefix-cost.
    pub policy: PolicyKind,
    /// Default: off.
    pub digest: DigestMode,
    /// Default: back.
    pub write: WritePolicy,
    /// Bytes that may wait to be written down before puts wait too. Default: a quarter of DRAM.
    pub dirty_bytes_max: Option<u64>,
    /// Bytes a second that the mover may write to each stage, and that prefetch may bring up.
    /// Default: no limit.
    pub mover_bytes_per_second: Option<u64>,
    /// Share of DRAM that protected prefixes may hold, in percent; beyond it further ones are
    /// ordinary blocks. Default: 90.
    pub protected_percent: u8,
    /// Whether a request's last partial block is taken. Default: no.
    pub admit_partial: bool,
    /// Changes of what the store has that are kept for [`crate::Store::changes`], 33 bytes each,
    /// once somebody asks for them. Default: 1,048,576. Most: 2^28. 0: none, and asking fails.
    pub changes_max: usize,
    /// How long a call may take unless it says otherwise. Default: 30 s.
    pub timeout: Duration,
    /// When a stage below DRAM is left alone because it fails, and how it comes back.
    pub health: HealthConfig,
    /// Bytes a second of DRAM that are compared with their checksums in the background, so that a
    /// bit that flipped there is found. Default: 256 MiB, 3 to 5 percent of a core. None: never,
    /// but for blocks that are written down.
    pub scrub_bytes_per_second: Option<NonZeroU64>,
    /// Makes the hash tables of keys the same in every run, for tests and studies. Whoever knows it
    /// can choose keys that are slow to find. Default: drawn from the system's randomness.
    pub hash_seed: Option<u64>,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            pipeline: "Dram".to_owned(),
            dram_bytes: 256 * MIB,
            dram_blocks: None,
            huge_pages: true,
            pool_file: None,
            keep_pool: KeepPool::default(),
            files: None,
            encryption: None,
            policy: PolicyKind::default(),
            digest: DigestMode::default(),
            write: WritePolicy::default(),
            dirty_bytes_max: None,
            mover_bytes_per_second: None,
            protected_percent: 90,
            admit_partial: false,
            changes_max: 1 << 20,
            timeout: Duration::from_secs(30),
            health: HealthConfig::default(),
            scrub_bytes_per_second: NonZeroU64::new(256 * MIB),
            hash_seed: None,
        }
    }
}

impl StoreConfig {
    /// Refuses what makes no sense, by name.
    pub fn check(&self) -> Result<(), StoreError> {
        let bad = |setting, reason: String| Err(StoreError::Config { setting, reason });
        if self.dram_bytes < 4 * MIB {
            return bad("dram", format!("{} bytes; the minimum is 4 MiB", self.dram_bytes));
        }
        if usize::try_from(self.dram_bytes).is_err() {
            return bad("dram", format!("{} bytes do not fit the address space", self.dram_bytes));
        }
        if self.dram_blocks == Some(0) {
            return bad("dram_blocks", "0 blocks; the least is 1, or leave it out".to_owned());
        }
        if self.protected_percent > 100 {
            return bad("protected_share", format!("{} is over 100", self.protected_percent));
        }
        if self.changes_max > CHANGES_MAX {
            return bad("changes_max", format!("{}; the most is 2^28", self.changes_max));
        }
        if self.timeout.is_zero() {
            return bad("timeout", "0; every call would fail: give at least 1 ms".to_owned());
        }
        if self.dirty_bytes_max == Some(0) {
            return bad("dirty_max", "0 would never take a block; leave it out".to_owned());
        }
        if self.mover_bytes_per_second == Some(0) {
            return bad("mover_rate", "0 would never write; leave it out".to_owned());
        }
        self.health.check()
    }

    pub(crate) fn pool(&self) -> PoolConfig {
        PoolConfig {
            capacity_bytes: usize::try_from(self.dram_bytes).expect("checked by check()"),
            huge_pages: if self.huge_pages { HugePages::Auto } else { HugePages::Never },
            populate: true,
        }
    }
}

/// What one call asks beyond its arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CallOptions {
    /// How long this call may take; the store's timeout otherwise.
    pub timeout: Option<Duration>,
    /// Who calls: kept with the blocks that it puts, for [`crate::Store::explain`].
    pub writer: Option<Writer>,
}

/// Who put a block: a number that means something to the caller, such as a session's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Writer(pub NonZeroU32);

/// What is wrong with a pipeline.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PipelineError {
    /// A stage nobody registered.
    #[error("pipeline {pipeline:?} names the stage {stage:?}; known are {known}")]
    UnknownStage {
        /// The whole pipeline.
        pipeline: String,
        /// The culprit.
        stage: String,
        /// What could stand there.
        known: String,
    },
    /// Stages in an order that makes no sense, or no stage.
    #[error("pipeline {pipeline:?}: {reason}")]
    BadOrder {
        /// The whole pipeline.
        pipeline: String,
        /// What is wrong, and with which stage.
        reason: String,
    },
}
