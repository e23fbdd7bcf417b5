//! The eviction policies by name.

/// Eviction policy of DRAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PolicyKind {
    /// Least recently used.
    Lru,
    /// Two FIFO queues and a ghost queue.
    S3Fifo,
    /// Adaptive replacement.
    Arc,
    /// Least recently used; new data always in the fastest tier, as in the `MLPerf` document.
    Waterfall,
    /// Learns online which conversations continue (`docs/eviction.md`).
    #[default]
    PrefixCost,
}
