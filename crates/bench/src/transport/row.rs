//! What a row of a transport has beyond a figure.

use serde::Serialize;

/// The fields of a transport's row.
#[derive(Debug, Clone, Serialize)]
pub struct TransportRow {
    /// `tcp`, `shm`; of a peer, its own name of a transport.
    pub backend: String,
    /// Length of a block.
    pub block_bytes: u64,
    /// Blocks of a batch.
    pub batch: u64,
    /// Threads that submit batches.
    pub threads: u64,
    /// Median rate in 10^9 bytes a second.
    pub gbps: f64,
    /// Median rate of the limit.
    pub limit_gbps: Option<f64>,
    /// Whose transport it is: `cascade`, `mooncake` or `nixl`.
    pub peer: String,
    /// Whether each block that was moved had the right bytes afterwards.
    pub verified: bool,
    /// Processor time of both processes, warm-up included.
    pub cpu_ns_per_block: Option<f64>,
}
