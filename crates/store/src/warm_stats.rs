//! Statistics of the warm restart.

/// How many blocks of an earlier run were recovered, and how full the ledger is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct WarmStats {
    /// Keys that were in DRAM when the previous process ended and are in DRAM again.
    pub recovered_blocks: u64,
    /// Bytes of their contents, each counted once.
    pub recovered_bytes: u64,
    /// Records that were damaged, contradicted each other or described memory outside the pool.
    pub rejected_records: u64,
    /// Time to open the pool and recover its blocks.
    pub recover_ms: u64,
    /// How often a store has opened these files, including this time.
    pub runs: u64,
    /// Places for keys in the ledger.
    pub ledger_capacity: u64,
    /// Places in use.
    pub ledger_records: u64,
    /// Keys stored in DRAM while the ledger was full: a restart does not recover them.
    pub ledger_full_drops: u64,
    /// Pieces of memory that processes of an earlier run may still access.
    pub held_by_earlier: u64,
}
