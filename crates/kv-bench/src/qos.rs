//! Classes of service: who is served first, and the latencies that each class expects.

use serde::Serialize;

/// A class of service, from first to last served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum QosClass {
    /// A person waits for each token.
    Interactive,
    /// A person waits for the answer.
    Responsive,
    /// Nobody waits.
    Batch,
}

/// Expected latencies of a class in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QosTargets {
    /// 95th percentile.
    pub ms_p95: u64,
    /// 99th percentile.
    pub ms_p99: u64,
    /// 99.9th percentile.
    pub ms_p999: u64,
    /// 99.99th percentile.
    pub ms_p9999: u64,
}

impl QosClass {
    /// All classes, first served first.
    pub const ALL: [Self; 3] = [Self::Interactive, Self::Responsive, Self::Batch];

    /// Its position in [`Self::ALL`].
    pub fn index(self) -> usize {
        match self {
            Self::Interactive => 0,
            Self::Responsive => 1,
            Self::Batch => 2,
        }
    }

    /// Its name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Interactive => "interactive",
            Self::Responsive => "responsive",
            Self::Batch => "batch",
        }
    }

    /// Its expected latencies, unless a configuration file has others.
    pub fn targets(self) -> QosTargets {
        let [ms_p95, ms_p99, ms_p999, ms_p9999] = match self {
            Self::Interactive => [50, 100, 150, 200],
            Self::Responsive => [100, 200, 350, 500],
            Self::Batch => [1000, 5000, 7500, 10_000],
        };
        QosTargets { ms_p95, ms_p99, ms_p999, ms_p9999 }
    }
}
