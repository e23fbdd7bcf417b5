//! The result of a simulation.

use serde::Serialize;

/// What all worlds of a simulation came to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SimResult {
    /// True: times and devices were simulated.
    pub simulated: bool,
    /// The seed of the simulation.
    pub seed: u64,
    /// The bug that was planted.
    pub plant: Option<String>,
    /// Worlds that were run.
    pub worlds: u64,
    /// Calls of the stores, by all clients.
    pub operations: u64,
    /// Real time.
    pub seconds: Seconds,
    /// Virtual time, all worlds together.
    pub simulated_seconds: Seconds,
    /// A hash of all events in all worlds, as 16 hexadecimal digits. It depends on the seed and on
    /// the number of operations only.
    pub event_hash: String,
    /// Reads that returned wrong bytes. Each is a violation too.
    pub wrong_bytes: u64,
    /// Violations of what a store promises.
    pub violations: u64,
    /// The first violations.
    pub listed: Vec<Violation>,
    /// Worlds that gave another result when they were run a second time.
    pub differences: u64,
    /// Times that a store was opened again after it was closed or killed.
    pub reopenings: u64,
    /// Times that the process of a store was killed.
    pub crashes: u64,
    /// Scheduling points.
    pub points: u64,
    /// Switches between threads.
    pub switches: u64,
}

/// A time in milliseconds that is written as seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Seconds(pub u64);

impl Serialize for Seconds {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.as_f64())
    }
}

impl Seconds {
    /// The seconds.
    #[expect(clippy::cast_precision_loss, reason = "53 bits are enough for a time")]
    pub fn as_f64(self) -> f64 {
        self.0 as f64 / 1000.0
    }
}

/// One violation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Violation {
    /// The number of the world.
    pub world: u64,
    /// Virtual time in the world, in microseconds.
    pub time_us: u64,
    /// Scheduling points of the world before it.
    pub points: u64,
    /// What happened.
    pub text: String,
    /// What the world was like.
    pub profile: String,
    /// The command that runs the world again.
    pub repeat: String,
}

impl SimResult {
    /// Whether nothing went wrong.
    pub fn is_clean(&self) -> bool {
        self.violations == 0 && self.wrong_bytes == 0 && self.differences == 0
    }
}
