//! What a row of a transfer has beyond a figure.

use serde::Serialize;

/// The fields of a transfer's row.
#[derive(Debug, Clone, Serialize)]
pub struct TransferRow {
    /// `tcp` or `shm`.
    pub backend: String,
    /// The model whose geometry the pages have.
    pub model: String,
    /// `push`: the prefill process writes; `pull`: the decode process reads.
    pub direction: String,
    /// Layers.
    pub layers: u64,
    /// Tokens of the prompt.
    pub tokens: u64,
    /// Blocks of the prompt.
    pub blocks: u64,
    /// Length of keys and values of one block in one layer.
    pub block_bytes: u64,
    /// Bytes of the prompt.
    pub bytes: u64,
    /// Median rate in 10^9 bytes a second.
    pub gbps: f64,
    /// Median rate of the limit.
    pub limit_gbps: f64,
    /// Median time from the first call until the receiver has the first layer.
    pub first_layer_ms: f64,
    /// The same of the last layer.
    pub last_layer_ms: f64,
    /// Share of the time of the transfer that is hidden behind the simulated computation.
    pub overlap: Option<f64>,
    /// How a layer's computation is simulated: `sleep` leaves the processors free, as a GPU does;
    /// `spin` occupies one.
    pub simulated_compute: Option<&'static str>,
    /// Time of a layer's computation.
    pub compute_ms_per_layer: Option<f64>,
    /// Time of the transfer over that of local copies of the same bytes.
    pub times_local: Option<f64>,
    /// The same of the limit.
    pub limit_times_local: Option<f64>,
    /// Whether each byte of each page, of those too that were not moved, was right in each round.
    pub verified: bool,
    /// Processor time of both processes for one block of one layer.
    pub cpu_ns_per_block: f64,
}

impl TransferRow {
    /// The columns after those of a figure.
    pub(crate) fn columns(&self) -> String {
        let cpu = self.cpu_ns_per_block / 1e3;
        format!("{:>10.2}{:>9.1}{cpu:>14.2}", self.first_layer_ms, self.last_layer_ms)
    }
}

/// Their header.
pub const TRANSFER_COLUMNS: &str = "  first ms  last ms  CPU us/block";
