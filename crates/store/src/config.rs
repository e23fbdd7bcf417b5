//! Configuration of a store: one typed struct, checked before anything starts.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use cascade_block::DigestMode;
use cascade_disk::FilesConfig;
use cascade_memory::{HugePages, PoolConfig};
use cascade_tier::StoreError;

use crate::core::eviction::policy_kind::PolicyKind;
use crate::{HealthConfig, HoldRecorder, SourceList};

const MIB: u64 = 1 << 20;
/// Maximum length of the change log: 8.25 GiB.
const CHANGES_MAX: usize = 1 << 28;

/// When a put writes to the lower tiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WritePolicy {
    /// Write-back: a put returns once the block is in the first tier; the mover writes it to the
    /// lower tiers soon after.
    #[default]
    Back,
    /// Write-through: a put returns once every tier has written the block, or another caller has
    /// removed it. It fails if a tier does not accept the block, such as an empty block in a file
    /// tier; DRAM may still have it.
    Through,
}

/// When the blocks of a named pool survive the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KeepPool {
    /// After a crash of the process. A clean close removes the pool.
    #[default]
    AfterCrash,
    /// Also after a clean close, for an upgrade of the program.
    Always,
    /// Never. The pool of an earlier run is removed.
    Never,
}

/// Encryption of the tiers below DRAM: AES-256-GCM, each block separately.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncryptionConfig {
    /// A file of 32 raw bytes, or of lines of 64 hexadecimal digits. The first key encrypts;
    /// further keys only decrypt older blocks. Mode 0600 or 0400, outside the directory of the
    /// file tier.
    pub key_file: PathBuf,
    /// Name of the owner of the blocks, such as a tenant. It enters the key derivation, so that
    /// tenants with the same key file cannot read each other's blocks. Default: `default`.
    pub scope: String,
}

impl EncryptionConfig {
    /// Default settings for a key file.
    pub fn new(key_file: impl Into<PathBuf>) -> Self {
        Self { key_file: key_file.into(), scope: "default".to_owned() }
    }
}

/// Configuration of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreConfig {
    /// Stages from fast to slow, such as `Dram|Files`. Default: `Dram`.
    pub pipeline: String,
    /// Size of the DRAM pool. Default: 256 MiB. Minimum: 4 MiB.
    pub dram_bytes: u64,
    /// Limit on the number of blocks in DRAM, for studies. Default: no limit.
    pub dram_blocks: Option<u64>,
    /// Whether the pool requests huge pages. Default: yes.
    pub huge_pages: bool,
    /// File of a named pool, such as `/dev/shm/cascade-pool`, from which the next process restores
    /// the blocks of a process that died. Its ledger is a file beside it. For speed it should be
    /// on a file system in memory. Default: none; the pool ends with the process.
    pub pool_file: Option<PathBuf>,
    /// When the blocks of `pool_file` survive the store. Default: after a crash.
    pub keep_pool: KeepPool,
    /// The file tier, if the pipeline has one.
    pub files: Option<FilesConfig>,
    /// Encryption of every tier below DRAM. Default: none.
    pub encryption: Option<EncryptionConfig>,
    /// Eviction policy of DRAM. Default: prefix-cost.
    pub policy: PolicyKind,
    /// Whether blocks are deduplicated by a digest of their bytes. Default: off.
    pub digest: DigestMode,
    /// Write policy. Default: back.
    pub write: WritePolicy,
    /// Limit of the write backlog of all lower tiers together; at the limit, puts wait. Default: a
    /// quarter of DRAM.
    pub dirty_bytes_max: Option<u64>,
    /// Rate limit of the mover's writes to each stage, and of prefetch. Default: no limit.
    pub mover_bytes_per_second: Option<u64>,
    /// Share of DRAM for protected prefixes, in percent. Beyond the quota, further protected blocks
    /// are ordinary blocks. Default: 90.
    pub protected_percent: u8,
    /// Whether the last partial block of a request is admitted. Default: no.
    pub admit_partial: bool,
    /// Length of the change log for [`crate::Store::changes`], 33 bytes for each change; the log
    /// starts with the first call. Default: 1,048,576. Maximum: 2^28. 0: no log, and
    /// [`crate::Store::changes`] fails.
    pub changes_max: usize,
    /// Default timeout of a call. Default: 30 s.
    pub timeout: Duration,
    /// When the circuit breakers of the lower stages open and close.
    pub health: HealthConfig,
    /// Rate at which DRAM is compared with its checksums in the background, to find flipped bits.
    /// Default: 256 MiB/s, 3 to 5 percent of a core. `None`: only blocks that are written to a
    /// lower stage are compared.
    pub scrub_bytes_per_second: Option<NonZeroU64>,
    /// Fixed seed of the hash tables, for tests and studies. An attacker who knows the seed can
    /// choose keys that collide. Default: random.
    pub hash_seed: Option<u64>,
    /// Records each hold of the store's lock, for measurements and tests. Default: none.
    pub holds: Option<HoldRecorder>,
    /// Sources, such as peers. The store asks them for blocks that no tier has. Default: none.
    pub sources: SourceList,
    /// Most time that a lookup, or a read without a lookup, waits for sources to say which blocks
    /// they have; what no source has named by then counts as absent. Default: 100 ms.
    pub locate_timeout: Duration,
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
            holds: None,
            sources: SourceList::default(),
            locate_timeout: Duration::from_millis(100),
        }
    }
}

impl StoreConfig {
    /// Checks all settings; an error names the setting.
    pub fn check(&self) -> Result<(), StoreError> {
        let bad = |setting, reason: String| Err(StoreError::Config { setting, reason });
        if self.dram_bytes < 4 * MIB {
            return bad("dram", format!("{} bytes; the minimum is 4 MiB", self.dram_bytes));
        }
        if usize::try_from(self.dram_bytes).is_err() {
            return bad("dram", format!("{} bytes exceed the address space", self.dram_bytes));
        }
        if self.dram_blocks == Some(0) {
            return bad("dram_blocks", "0 blocks; the minimum is 1, or leave it out".to_owned());
        }
        if self.protected_percent > 100 {
            return bad(
                "protected_share",
                format!("{}; the maximum is 100", self.protected_percent),
            );
        }
        if self.changes_max > CHANGES_MAX {
            return bad("changes_max", format!("{}; the maximum is 2^28", self.changes_max));
        }
        if self.timeout.is_zero() {
            return bad("timeout", "0; every call would fail: set at least 1 ms".to_owned());
        }
        if self.dirty_bytes_max == Some(0) {
            return bad(
                "dirty_max",
                "0; every put would wait forever: set at least 1, or leave it out".to_owned(),
            );
        }
        if self.mover_bytes_per_second == Some(0) {
            return bad(
                "mover_rate",
                "0; nothing would be written: set at least 1, or leave it out".to_owned(),
            );
        }
        if self.locate_timeout.is_zero() {
            return bad(
                "locate_timeout",
                "0; no source could answer: set at least 1 ms".to_owned(),
            );
        }
        self.health.check()
    }

    pub(crate) fn pool(&self) -> PoolConfig {
        PoolConfig {
            capacity_bytes: usize::try_from(self.dram_bytes).expect("check() has checked the size"),
            huge_pages: if self.huge_pages { HugePages::Auto } else { HugePages::Never },
            populate: true,
        }
    }
}
