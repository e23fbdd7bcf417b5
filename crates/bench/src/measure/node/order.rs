//! What a measurement tells its worker processes, and what they answer: one JSON object a line.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// An order. Each has one report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Order {
    /// Listen there, report, then send back what one connection says until it ends.
    Echo { socket: PathBuf },
    /// Connect to a node.
    Open { socket: PathBuf },
    /// Name blocks and make memory for them.
    Blocks(Blocks),
    /// Write every page of the pool that these blocks will lie in, so that it is mapped here.
    Warm { label: String, count: usize, size: usize },
    /// Take slabs as many and as large as the blocks, for copies without a node.
    Reserve,
    /// Hold views of the blocks, for copies without a node.
    Hold,
    /// Give back what `Reserve` and `Hold` took.
    Drop,
    /// Work from a time on: once through all blocks, or again and again until another time.
    Work { work: Work, start_ns: u64, stop_ns: Option<u64> },
    /// Compare what the last `Get` or copy brought with what it should be.
    Check,
}

/// Blocks of a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Blocks {
    /// Whose numbers these are: workers with one label share blocks.
    pub(super) label: String,
    /// The first one's number.
    pub(super) first: usize,
    /// How many.
    pub(super) count: usize,
    /// Bytes of each.
    pub(super) size: usize,
    /// Blocks of one call.
    pub(super) batch: usize,
}

/// What a worker does with its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Work {
    /// memcpy into reserved slabs.
    CopyIn,
    /// The store's own copies into reserved slabs.
    StreamIn,
    /// Put them.
    Put,
    /// memcpy from reserved slabs or held views.
    CopyOut,
    /// The store's own copies from reserved slabs or held views.
    StreamOut,
    /// Get them into own memory.
    Get,
    /// Put, get, check and delete blocks of many sizes at random; the seed tells workers apart.
    Churn(u64),
}

/// What a worker answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Report {
    /// Done.
    Done,
    /// Work, and when, on the machine's clock.
    Span { began_ns: u64, ended_ns: u64, blocks: u64, hits: u64 },
    /// It could not be done, or a byte was wrong.
    Failed(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_and_reports_are_one_line_each_and_come_back_as_they_were() {
        let blocks = Blocks { label: "a\nb".into(), first: 3, count: 2, size: 128, batch: 1 };
        let orders = [
            Order::Blocks(blocks),
            Order::Echo { socket: "/tmp/x".into() },
            Order::Work { work: Work::Churn(7), start_ns: u64::MAX, stop_ns: None },
        ];
        for order in orders {
            let line = serde_json::to_string(&order).unwrap();
            assert!(!line.contains('\n'), "{line}");
            assert_eq!(serde_json::from_str::<Order>(&line).unwrap(), order);
        }
        let report = Report::Span { began_ns: 1, ended_ns: 2, blocks: 3, hits: 4 };
        let line = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&line).unwrap(), report);
    }
}
