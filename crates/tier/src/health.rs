//! Health of a stage, for statistics.

use serde::{Deserialize, Serialize};

/// State of a circuit, or of a stage with its two circuits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum HealthState {
    /// The circuit is closed: the stage is used.
    Healthy,
    /// The circuit is open: only probes call the stage.
    Open,
    /// The circuit is open, and a probe is in flight.
    Probing,
}

/// Health of one circuit of a stage at one time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CircuitHealth {
    /// State of the circuit.
    pub state: HealthState,
    /// When the circuit last opened or closed, in milliseconds since 1970.
    pub since_unix_ms: u64,
    /// How often the circuit opened.
    pub opened_count: u64,
    /// The last error, if there was one.
    pub last_error: Option<String>,
}

/// Health of a stage at one time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageHealth {
    /// `Healthy` if both circuits are closed, otherwise the state of an open one.
    pub state: HealthState,
    /// When the stage last changed between both circuits closed and any open, in milliseconds
    /// since 1970.
    pub since_unix_ms: u64,
    /// How often a circuit opened while the other was closed.
    pub opened_count: u64,
    /// The last error, if there was one.
    pub last_error: Option<String>,
    /// Calls in flight after their deadline.
    pub stuck_calls: u64,
    /// The circuit for reads. While it is open, reads treat the stage as empty.
    pub reads: CircuitHealth,
    /// The circuit for writes. While it is open, no block is queued for the stage.
    pub writes: CircuitHealth,
}
