//! A node's status: one value behind `cascade status`, the metrics and the status page.

use serde::{Deserialize, Serialize};

/// What a node holds and does, at one moment.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Seconds since it started.
    pub uptime_s: f64,
}
