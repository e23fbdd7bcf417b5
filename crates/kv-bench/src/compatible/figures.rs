//! The figures that only the original's way of storing has: tiers of entries, host and device.

use std::path::PathBuf;
use std::time::Duration;

use crate::backend::KvTier;
use crate::compatible::io_log::LoggedRows;
use crate::compatible::waterfall::{MovedDown, TierContents};
use crate::histogram::LatencyHistogram;
use crate::measurements::Moved;

/// Figures of a run on whole entries, beside those of all runs.
#[derive(Debug, Default)]
pub struct ObjectFigures {
    /// Writes by the tier that took the entry at first.
    pub written: [Moved; 3],
    /// Latency of a write by tier.
    pub write_by_tier: [LatencyHistogram; 3],
    /// Part of a read from files: reading.
    pub read_device: LatencyHistogram,
    /// Part of a read from files: dropping cached pages.
    pub read_host: LatencyHistogram,
    /// Part of a write to files: syncing.
    pub write_device: LatencyHistogram,
    /// Part of a write to files: writing into the page cache.
    pub write_host: LatencyHistogram,
    /// Tokens of entries that files took or gave, demotions included.
    pub storage_tokens: f64,
    /// What the tiers contain after the run.
    pub contents: [TierContents; 3],
    /// What was moved down.
    pub moved: MovedDown,
    /// The log in the place of operations. `None`: they were done.
    pub log: Option<LogFacts>,
}

/// A log of operations that were not done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogFacts {
    /// The file.
    pub path: PathBuf,
    /// Its rows.
    pub rows: LoggedRows,
}

impl ObjectFigures {
    /// Bytes that files took: of new entries, and of those that were moved from memory.
    pub fn written_to_files(&self) -> u64 {
        self.written[KvTier::Storage.index()].bytes + self.moved.demoted_bytes
    }

    /// The 95th percentile of reads and writes of CPU memory in milliseconds. The original judges
    /// them together.
    pub fn cpu_ms_p95(&self, reads: &LatencyHistogram) -> Option<f64> {
        let mut all = reads.clone();
        all.add(&self.write_by_tier[KvTier::Cpu.index()]);
        all.ms_at(0.95)
    }

    /// The parts of reads and writes of files: reading, dropping cached pages, syncing, writing.
    pub fn parts(&self) -> [&LatencyHistogram; 4] {
        [&self.read_device, &self.read_host, &self.write_device, &self.write_host]
    }

    /// Counts the parts of a read from files.
    pub fn read_file(&mut self, device: Duration, host: Duration) {
        self.read_device.record(device);
        self.read_host.record(host);
    }

    /// Counts the parts of a write to files.
    pub fn wrote_file(&mut self, device: Duration, host: Duration) {
        self.write_device.record(device);
        self.write_host.record(host);
    }
}
