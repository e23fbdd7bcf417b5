//! The protocol between a measurement and its worker processes: one JSON object per line.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A command. The worker answers each with one report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum WorkerCommand {
    /// Listen on the socket, report, then echo all messages of one connection.
    Echo { socket: PathBuf },
    /// Connect to a node.
    Open { socket: PathBuf },
    /// Compute the keys and payload of these blocks, and allocate a buffer for them.
    Blocks(WorkerBlocks),
    /// Put and clear blocks, so that the pages of the pool are mapped in the worker.
    Warm { label: String, count: usize, size: usize },
    /// Reserve a slab for each block, for copies without a node.
    Reserve,
    /// Hold views of the blocks, for copies without a node.
    Hold,
    /// Release the slabs and views of `Reserve` and `Hold`.
    Drop,
    /// Work from the start time: one pass over all blocks, or repeatedly until the stop time.
    Work { work: Work, start_ns: u64, stop_ns: Option<u64> },
    /// Check the bytes that the last `Get` or copy wrote to the buffer.
    Check,
}

/// The blocks of a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct WorkerBlocks {
    /// Namespace of the keys. Workers with the same label share blocks.
    pub(super) label: String,
    /// Number of the first block.
    pub(super) first: usize,
    /// Number of blocks.
    pub(super) count: usize,
    /// Bytes of each.
    pub(super) size: usize,
    /// Blocks of one call.
    pub(super) batch: usize,
}

/// The work of a worker with its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Work {
    /// memcpy into reserved slabs.
    CopyIn,
    /// The store's copy function into reserved slabs.
    StreamIn,
    /// Put the blocks.
    Put,
    /// memcpy from reserved slabs or held views.
    CopyOut,
    /// The store's copy function from reserved slabs or held views.
    StreamOut,
    /// Get the blocks into the buffer.
    Get,
    /// Put, get, check and delete random blocks of several sizes. Each worker has another seed.
    Churn(u64),
}

/// The answer of a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum WorkerReport {
    /// The command was executed.
    Done,
    /// Work was done, with its start and end as `machine_ns`.
    Span { began_ns: u64, ended_ns: u64, blocks: u64, hits: u64 },
    /// The command failed, or a byte was wrong.
    Failed(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_reports_are_one_line_each_and_are_read_back() {
        let label = "a\nb".to_owned();
        let blocks = WorkerBlocks { label, first: 3, count: 2, size: 128, batch: 1 };
        let commands = [
            WorkerCommand::Blocks(blocks),
            WorkerCommand::Echo { socket: "/tmp/x".into() },
            WorkerCommand::Work { work: Work::Churn(7), start_ns: u64::MAX, stop_ns: None },
        ];
        for command in commands {
            let line = serde_json::to_string(&command).unwrap();
            assert!(!line.contains('\n'), "{line}");
            assert_eq!(serde_json::from_str::<WorkerCommand>(&line).unwrap(), command);
        }
        let report = WorkerReport::Span { began_ns: 1, ended_ns: 2, blocks: 3, hits: 4 };
        let line = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<WorkerReport>(&line).unwrap(), report);
    }
}
