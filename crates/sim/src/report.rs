//! The result of a simulation.

use std::collections::BTreeMap;
use std::time::Duration;

use cascade_runtime::Plant;
use serde::{Deserialize, Serialize};

use crate::finding::Finding;
use crate::world::WorldResult;

/// What one world came to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WorldReport {
    pub(crate) world: u64,
    pub(crate) operations: u64,
    pub(crate) event_hash: u64,
    /// Virtual time, in microseconds.
    pub(crate) time_us: u64,
    pub(crate) wrong_bytes: u64,
    pub(crate) violations: u64,
    /// The first violations.
    pub(crate) listed: Vec<Finding>,
    pub(crate) late_transfers: u64,
    /// Whether a second run gave another result.
    pub(crate) is_different: bool,
    pub(crate) reopenings: u64,
    pub(crate) crashes: u64,
    pub(crate) recovered_blocks: u64,
    pub(crate) points: u64,
    pub(crate) switches: u64,
    pub(crate) counts: BTreeMap<String, u64>,
    /// What the world was like.
    pub(crate) profile: String,
}

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
    /// Uses of the memory or of the range of a transfer that had not ended at the deadline of its
    /// call. The deadline ended the call and not the transfer, so they are no violations.
    pub late_transfers: u64,
    /// Worlds that gave another result when they were run a second time.
    pub differences: u64,
    /// The commands that run these worlds again.
    pub repeat_differences: Vec<String>,
    /// Times that a store was opened again after it was closed or killed.
    pub reopenings: u64,
    /// Times that the process of a store was killed.
    pub crashes: u64,
    /// Blocks in memory that the next process has found.
    pub recovered_blocks: u64,
    /// Scheduling points.
    pub points: u64,
    /// Switches between threads.
    pub switches: u64,
    /// How often what came about, by name, such as `confirmed`: of the transport.
    pub counts: BTreeMap<String, u64>,
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
    pub(crate) fn of(time: Duration) -> Self {
        Self(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
    }

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

impl WorldReport {
    pub(crate) fn new(world: u64, result: WorldResult, is_different: bool) -> Self {
        let WorldResult { report, findings, .. } = result;
        Self {
            world,
            operations: result.operations,
            event_hash: report.event_hash,
            time_us: u64::try_from(report.now.as_micros()).unwrap_or(u64::MAX),
            wrong_bytes: findings.wrong_bytes,
            violations: findings.count,
            listed: findings.listed,
            late_transfers: result.late_transfers,
            is_different,
            reopenings: result.reopenings,
            crashes: result.crashes,
            recovered_blocks: result.recovered_blocks,
            points: report.points,
            switches: report.switches,
            counts: result.counts,
            profile: result.profile,
        }
    }

    /// The report of a world that was not run to its end. That is a violation.
    pub(crate) fn without_result(world: u64, text: String) -> Self {
        Self {
            world,
            operations: 0,
            event_hash: 0,
            time_us: 0,
            wrong_bytes: 0,
            violations: 1,
            listed: vec![Finding { text, time_us: 0, points: 0 }],
            late_transfers: 0,
            is_different: false,
            reopenings: 0,
            crashes: 0,
            recovered_blocks: 0,
            points: 0,
            switches: 0,
            counts: BTreeMap::new(),
            profile: "not known".to_owned(),
        }
    }
}

impl SimResult {
    pub(crate) fn new(seed: u64, plant: Option<Plant>, took: Duration) -> Self {
        Self {
            simulated: true,
            seed,
            plant: plant.map(|plant| plant.name().to_owned()),
            worlds: 0,
            operations: 0,
            seconds: Seconds::of(took),
            simulated_seconds: Seconds::default(),
            event_hash: String::new(),
            wrong_bytes: 0,
            violations: 0,
            listed: Vec::new(),
            late_transfers: 0,
            differences: 0,
            repeat_differences: Vec::new(),
            reopenings: 0,
            crashes: 0,
            recovered_blocks: 0,
            points: 0,
            switches: 0,
            counts: BTreeMap::new(),
        }
    }

    /// Whether nothing went wrong.
    pub fn is_clean(&self) -> bool {
        self.violations == 0 && self.wrong_bytes == 0 && self.differences == 0
    }
}
