//! Health of a stage: what it did lately, and whether it is read and written at all.
//!
//! A breaker has a circuit for reads and one for writes. A circuit counts calls, not blocks: two
//! failures among the last eight open it, and then nobody waits for such a call to the stage until
//! a probe of that direction has succeeded. Time comes from the caller.

use serde::{Deserialize, Serialize};
use std::time::Duration;

use cascade_block::with_causes;

use crate::StoreError;
use crate::stage::StageError;

/// Calls that a breaker can remember.
const WINDOW_MAX: u32 = 64;
/// A stage that keeps a caller waiting is probed at once, unless it succeeded within this part of
/// the interval.
const SUSPICION_PART: u32 = 5;

/// When a stage is left alone, and how it comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HealthConfig {
    /// Time between two probes of a direction whose circuit is open, or that has had nothing to do.
    /// Default: 5 s. Minimum: 1 ms.
    pub probe_interval: Duration,
    /// How long a probe may take. A call that lasts the threshold's times as long without an answer
    /// opens its circuit, unless the stage keeps its deadlines by itself. Default: 3 s. Minimum:
    /// 1 ms.
    pub probe_timeout: Duration,
    /// How many of the last calls count. Default: 8. Minimum: 1. Maximum: 64.
    pub window: u32,
    /// So many failures among them, and the circuit opens. Default: 2. Minimum: 1. Maximum: the
    /// window.
    pub threshold: u32,
}

impl Default for HealthConfig {
    fn default() -> Self {
        Self {
            probe_interval: Duration::from_secs(5),
            probe_timeout: Duration::from_secs(3),
            window: 8,
            threshold: 2,
        }
    }
}

impl HealthConfig {
    /// Refuses what makes no sense, by name.
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        let least = Duration::from_millis(1);
        let (setting, reason) = if self.probe_interval < least {
            ("probe_interval", "the minimum is 1 ms".to_owned())
        } else if self.probe_timeout < least {
            ("probe_timeout", "the minimum is 1 ms".to_owned())
        } else if !(1..=WINDOW_MAX).contains(&self.window) {
            let reason = format!("{} calls; it is from 1 to {WINDOW_MAX}", self.window);
            ("failure_window", reason)
        } else if !(1..=self.window).contains(&self.threshold) {
            let (threshold, window) = (self.threshold, self.window);
            let reason = format!("{threshold}; it is from 1 to failure_window, which is {window}");
            ("failure_threshold", reason)
        } else {
            return Ok(());
        };
        Err(StoreError::Config { setting, reason })
    }
}

/// Whether a stage is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum HealthState {
    /// It is used.
    Healthy,
    /// A circuit is open: nothing is asked of that direction but probes.
    Open,
    /// As `Open`, and a probe is under way.
    Probing,
}

/// What a call to a stage does there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// It reads blocks.
    Reads,
    /// It stores, names, removes or flushes blocks, or makes room.
    Writes,
}

/// One direction of a stage at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CircuitHealth {
    /// Whether it is used.
    pub state: HealthState,
    /// Since when it is used, or is not, in milliseconds since 1970.
    pub since_unix_ms: u64,
    /// How often it opened.
    pub opened_count: u64,
    /// Why it failed last, if it ever did.
    pub last_error: Option<String>,
}

/// A stage's health at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageHealth {
    /// Whether both directions are used.
    pub state: HealthState,
    /// Since when both are used, or one is not, in milliseconds since 1970.
    pub since_unix_ms: u64,
    /// How often one of its circuits opened while the other was closed.
    pub opened_count: u64,
    /// Why it failed last, if it ever did.
    pub last_error: Option<String>,
    /// Calls that it has not answered although nobody waits for them any more.
    pub stuck_calls: u64,
    /// Whether it is read: while it is not, it counts as having no block.
    pub reads: CircuitHealth,
    /// Whether it is written: while it is not, nothing is queued for it.
    pub writes: CircuitHealth,
}

/// What a breaker has just done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Nothing.
    None,
    /// The direction is not used from now on.
    Opened,
    /// It is used again.
    Closed,
}

/// One stage's breaker.
#[derive(Debug)]
pub(crate) struct Breaker {
    reads: Circuit,
    writes: Circuit,
    since_unix_ms: u64,
    opened_count: u64,
    last_error: Option<StageError>,
}

impl Breaker {
    pub(crate) fn new(config: HealthConfig, now: Duration, now_unix_ms: u64) -> Self {
        Self {
            reads: Circuit::new(config, now, now_unix_ms),
            writes: Circuit::new(config, now, now_unix_ms),
            since_unix_ms: now_unix_ms,
            opened_count: 0,
            last_error: None,
        }
    }

    fn circuit(&mut self, direction: Direction) -> &mut Circuit {
        match direction {
            Direction::Reads => &mut self.reads,
            Direction::Writes => &mut self.writes,
        }
    }

    fn other(&mut self, direction: Direction) -> &mut Circuit {
        match direction {
            Direction::Reads => &mut self.writes,
            Direction::Writes => &mut self.reads,
        }
    }

    /// As [`Circuit::succeed`].
    pub(crate) fn succeed(&mut self, direction: Direction, now: Duration) {
        self.circuit(direction).succeed(now);
    }

    /// As [`Circuit::fail`]. The other direction is probed soon: a device may be gone altogether.
    pub(crate) fn fail(
        &mut self,
        direction: Direction,
        error: StageError,
        now: Duration,
        now_unix_ms: u64,
    ) -> Turn {
        self.last_error = Some(error.clone());
        self.other(direction).suspect(now);
        let turn = self.circuit(direction).fail(error, now, now_unix_ms);
        self.note(direction, turn, now_unix_ms)
    }

    /// As [`Circuit::hang`].
    pub(crate) fn hang(&mut self, direction: Direction, now: Duration, now_unix_ms: u64) -> Turn {
        self.last_error = Some(StageError::Timeout);
        self.other(direction).suspect(now);
        let turn = self.circuit(direction).hang(now, now_unix_ms);
        self.note(direction, turn, now_unix_ms)
    }

    /// As [`Circuit::suspect`].
    pub(crate) fn suspect(&mut self, direction: Direction, now: Duration) {
        self.circuit(direction).suspect(now);
    }

    /// As [`Circuit::begin_probe`].
    pub(crate) fn begin_probe(&mut self, direction: Direction, now: Duration) -> bool {
        self.circuit(direction).begin_probe(now)
    }

    /// As [`Circuit::end_probe`]. A probe of writing reads back what it wrote, so that one that
    /// succeeds says that a stage can be read, too.
    pub(crate) fn end_probe(
        &mut self,
        direction: Direction,
        result: Result<(), StageError>,
        now: Duration,
        now_unix_ms: u64,
    ) -> Turn {
        match &result {
            Ok(()) if direction == Direction::Writes => self.reads.succeed(now),
            Ok(()) => {}
            Err(error) => {
                self.last_error = Some(error.clone());
                self.other(direction).suspect(now);
            }
        }
        let turn = self.circuit(direction).end_probe(result, now, now_unix_ms);
        self.note(direction, turn, now_unix_ms)
    }

    fn note(&mut self, direction: Direction, turn: Turn, now_unix_ms: u64) -> Turn {
        if turn != Turn::None && self.other(direction).is_healthy() {
            self.since_unix_ms = now_unix_ms;
            self.opened_count += u64::from(turn == Turn::Opened);
        }
        turn
    }

    pub(crate) fn health(&self, stuck_calls: u64) -> StageHealth {
        let (reads, writes) = (self.reads.health(), self.writes.health());
        StageHealth {
            state: if self.reads.is_healthy() { writes.state } else { reads.state },
            since_unix_ms: self.since_unix_ms,
            opened_count: self.opened_count,
            last_error: self.last_error.as_ref().map(|error| with_causes(error)),
            stuck_calls,
            reads,
            writes,
        }
    }
}

/// One direction of a stage.
#[derive(Debug)]
struct Circuit {
    config: HealthConfig,
    state: HealthState,
    since_unix_ms: u64,
    opened_count: u64,
    last_error: Option<StageError>,
    /// The last calls, the newest in the lowest bit; set where one failed.
    failures: u64,
    last_success: Duration,
    last_probe: Duration,
    /// In a row: successes of other kinds, such as reads from a cache, do not outvote them.
    failed_probes: u32,
    is_suspect: bool,
}

impl Circuit {
    fn new(config: HealthConfig, now: Duration, now_unix_ms: u64) -> Self {
        Self {
            config,
            state: HealthState::Healthy,
            since_unix_ms: now_unix_ms,
            opened_count: 0,
            last_error: None,
            failures: 0,
            last_success: now,
            last_probe: now,
            failed_probes: 0,
            is_suspect: false,
        }
    }

    fn is_healthy(&self) -> bool {
        self.state == HealthState::Healthy
    }

    /// A call was answered. What was begun before the circuit opened does not close it.
    fn succeed(&mut self, now: Duration) {
        if self.is_healthy() {
            self.failures <<= 1;
            self.last_success = now;
        }
    }

    /// A call failed.
    fn fail(&mut self, error: StageError, now: Duration, now_unix_ms: u64) -> Turn {
        self.last_error = Some(error);
        if !self.is_healthy() {
            return Turn::None;
        }
        self.failures = self.failures << 1 | 1;
        let window = u64::MAX >> (WINDOW_MAX - self.config.window);
        if (self.failures & window).count_ones() < self.config.threshold {
            self.is_suspect = true;
            return Turn::None;
        }
        self.open(now, now_unix_ms)
    }

    /// A call has lasted for so long that no other's success counts against it.
    fn hang(&mut self, now: Duration, now_unix_ms: u64) -> Turn {
        self.last_error = Some(StageError::Timeout);
        if self.is_healthy() { self.open(now, now_unix_ms) } else { Turn::None }
    }

    fn open(&mut self, now: Duration, now_unix_ms: u64) -> Turn {
        self.state = HealthState::Open;
        self.since_unix_ms = now_unix_ms;
        self.opened_count += 1;
        self.last_probe = now;
        Turn::Opened
    }

    /// Somebody waits for the stage in vain, for a reason that may lie with him: it is probed soon.
    fn suspect(&mut self, now: Duration) {
        let quiet = now.saturating_sub(self.last_success.max(self.last_probe));
        self.is_suspect |= quiet >= self.config.probe_interval / SUSPICION_PART;
    }

    /// Begins a probe, if one is due: of a stage that is shed, of one that has had nothing to say
    /// for an interval, and of one that is suspected.
    fn begin_probe(&mut self, now: Duration) -> bool {
        let since = match self.state {
            HealthState::Probing => return false,
            HealthState::Open => self.last_probe,
            HealthState::Healthy => self.last_probe.max(self.last_success),
        };
        let is_due = now.saturating_sub(since) >= self.config.probe_interval;
        let is_wanted = is_due || (self.is_healthy() && self.is_suspect);
        if !is_wanted {
            return false;
        }
        self.last_probe = now;
        self.is_suspect = false;
        if self.state == HealthState::Open {
            self.state = HealthState::Probing;
        }
        true
    }

    /// A probe has ended.
    fn end_probe(
        &mut self,
        result: Result<(), StageError>,
        now: Duration,
        now_unix_ms: u64,
    ) -> Turn {
        match result {
            Ok(()) if self.is_healthy() => {
                self.failed_probes = 0;
                self.succeed(now);
                Turn::None
            }
            Ok(()) => {
                self.state = HealthState::Healthy;
                self.since_unix_ms = now_unix_ms;
                self.failures = 0;
                self.failed_probes = 0;
                self.last_success = now;
                Turn::Closed
            }
            Err(error) => {
                if self.state == HealthState::Probing {
                    self.state = HealthState::Open;
                }
                self.failed_probes = self.failed_probes.saturating_add(1);
                match self.fail(error, now, now_unix_ms) {
                    Turn::None
                        if self.is_healthy() && self.failed_probes >= self.config.threshold =>
                    {
                        self.open(now, now_unix_ms)
                    }
                    turn => turn,
                }
            }
        }
    }

    fn health(&self) -> CircuitHealth {
        CircuitHealth {
            state: self.state,
            since_unix_ms: self.since_unix_ms,
            opened_count: self.opened_count,
            last_error: self.last_error.as_ref().map(|error| with_causes(error)),
        }
    }
}

#[cfg(test)]
mod tests;
