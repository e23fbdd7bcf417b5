//! What a row of a transport has beyond a figure.

use serde::Serialize;

/// The fields of a transport's row.
#[derive(Debug, Clone, Serialize)]
pub struct TransportRow {
    /// `tcp`, `tls`, `shm`; of a peer, its own name of a transport.
    pub backend: String,
    /// What encrypts: `kernel` or `userspace`. Only of `tls`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub record_layer: Option<&'static str>,
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
    /// System calls of both processes for a batch, counted by strace in one that is not timed.
    pub system_calls_per_batch: Option<f64>,
    /// How often each byte is copied on its way, by construction of the transport.
    pub copies_per_byte: Option<u64>,
}

impl TransportRow {
    /// The columns after those of a figure.
    pub(crate) fn columns(&self) -> String {
        let optional = |value: Option<f64>| value.map_or("-".to_owned(), |it| format!("{it:.0}"));
        let copies = self.copies_per_byte.map_or("-".to_owned(), |copies| copies.to_string());
        let (cpu, calls) = (self.cpu_ns_per_block, self.system_calls_per_batch);
        format!("{:>14}{:>13}{copies:>8}", optional(cpu), optional(calls))
    }
}

/// Their header.
pub const TRANSPORT_COLUMNS: &str = "  CPU ns/block  calls/batch  copies";
