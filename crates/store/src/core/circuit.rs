//! Health of a stage: a circuit breaker with one circuit for reads and one for writes.
//!
//! A circuit counts calls, not blocks: two failures among the last eight calls open it. While it is
//! open, the store makes no such calls to the stage but probes; a successful probe closes it. The
//! caller passes the time.

use std::time::Duration;

use cascade_block::with_causes;
use cascade_tier::tier::TierError;
use cascade_tier::{CircuitHealth, HealthState, StageHealth, StoreError};

/// Maximum length of the window of calls: bits of the history in [`Circuit`].
const WINDOW_MAX: u32 = 64;
/// A stage that makes a caller wait is probed at once, unless its last success or probe is more
/// recent than the probe interval divided by this.
const RECENT_SUCCESS_DIVISOR: u32 = 5;

/// When the circuits of a stage open, and how often it is probed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HealthConfig {
    /// Time between two probes while a circuit is open or idle. Default: 5 s. Minimum: 1 ms.
    pub probe_interval: Duration,
    /// Timeout of a probe. A call without an answer for `threshold` times this time opens its
    /// circuit, unless the stage itself keeps deadlines. Default: 3 s. Minimum: 1 ms.
    pub probe_timeout: Duration,
    /// Number of most recent calls that count. Default: 8. Minimum: 1. Maximum: 64.
    pub window: u32,
    /// Failures within the window that open the circuit. Default: 2. Minimum: 1. Maximum: the
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
    /// Checks all settings; an error names the setting.
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        let least = Duration::from_millis(1);
        let (setting, reason) = if self.probe_interval < least {
            ("probe_interval", "the minimum is 1 ms".to_owned())
        } else if self.probe_timeout < least {
            ("probe_timeout", "the minimum is 1 ms".to_owned())
        } else if !(1..=WINDOW_MAX).contains(&self.window) {
            let reason = format!("{} calls; valid are 1 to {WINDOW_MAX}", self.window);
            ("failure_window", reason)
        } else if !(1..=self.window).contains(&self.threshold) {
            let (threshold, window) = (self.threshold, self.window);
            let reason = format!("{threshold}; valid are 1 to failure_window, which is {window}");
            ("failure_threshold", reason)
        } else {
            return Ok(());
        };
        Err(StoreError::Config { setting, reason })
    }
}

/// The kind of a call to a stage; each kind has a circuit of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// Calls that read blocks.
    Reads,
    /// Calls that store, alias, remove or flush blocks, or make room.
    Writes,
}

/// How an event changed a circuit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CircuitChange {
    /// The circuit did not change.
    None,
    /// The circuit opened.
    Opened,
    /// The circuit closed.
    Closed,
}

/// The circuit breaker of one stage.
#[derive(Debug)]
pub(crate) struct Breaker {
    reads: Circuit,
    writes: Circuit,
    since_unix_ms: u64,
    opened_count: u64,
    last_error: Option<TierError>,
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

    /// As [`Circuit::fail`]. Also requests a probe of the other direction: the whole device may
    /// have failed.
    pub(crate) fn fail(
        &mut self,
        direction: Direction,
        error: TierError,
        now: Duration,
        now_unix_ms: u64,
    ) -> CircuitChange {
        self.last_error = Some(error.clone());
        self.other(direction).suspect(now);
        let change = self.circuit(direction).fail(error, now, now_unix_ms);
        self.note_stage_change(direction, change, now_unix_ms)
    }

    /// As [`Circuit::hang`].
    pub(crate) fn hang(
        &mut self,
        direction: Direction,
        now: Duration,
        now_unix_ms: u64,
    ) -> CircuitChange {
        self.last_error = Some(TierError::Timeout);
        self.other(direction).suspect(now);
        let change = self.circuit(direction).hang(now, now_unix_ms);
        self.note_stage_change(direction, change, now_unix_ms)
    }

    /// As [`Circuit::suspect`].
    pub(crate) fn suspect(&mut self, direction: Direction, now: Duration) {
        self.circuit(direction).suspect(now);
    }

    /// As [`Circuit::begin_probe`].
    pub(crate) fn begin_probe(&mut self, direction: Direction, now: Duration) -> bool {
        self.circuit(direction).begin_probe(now)
    }

    /// As [`Circuit::end_probe`]. A write probe reads back what it wrote: its success also counts
    /// as a successful read.
    pub(crate) fn end_probe(
        &mut self,
        direction: Direction,
        result: Result<(), TierError>,
        now: Duration,
        now_unix_ms: u64,
    ) -> CircuitChange {
        match &result {
            // An open read circuit stays open: only its own probe closes it.
            Ok(()) if direction == Direction::Writes => self.reads.succeed(now),
            Ok(()) => {}
            Err(error) => {
                self.last_error = Some(error.clone());
                self.other(direction).suspect(now);
            }
        }
        let change = self.circuit(direction).end_probe(result, now, now_unix_ms);
        self.note_stage_change(direction, change, now_unix_ms)
    }

    fn note_stage_change(
        &mut self,
        direction: Direction,
        change: CircuitChange,
        now_unix_ms: u64,
    ) -> CircuitChange {
        // While the other circuit is open, the state of the stage as a whole does not change.
        if change != CircuitChange::None && self.other(direction).is_healthy() {
            self.since_unix_ms = now_unix_ms;
            self.opened_count += u64::from(change == CircuitChange::Opened);
        }
        change
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

/// The circuit of one direction of a stage.
#[derive(Debug)]
struct Circuit {
    config: HealthConfig,
    state: HealthState,
    since_unix_ms: u64,
    opened_count: u64,
    last_error: Option<TierError>,
    /// Results of the last calls, the newest in the lowest bit; 1 is a failure.
    failures: u64,
    last_success: Duration,
    last_probe: Duration,
    /// Consecutive failed probes. Successful calls do not reset it: reads from the page cache can
    /// succeed while the device fails.
    failed_probes: u32,
    probe_requested: bool,
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
            probe_requested: false,
        }
    }

    fn is_healthy(&self) -> bool {
        self.state == HealthState::Healthy
    }

    /// Records a successful call. A call that started before the circuit opened does not close it.
    fn succeed(&mut self, now: Duration) {
        if self.is_healthy() {
            self.failures <<= 1;
            self.last_success = now;
        }
    }

    /// Records a failed call. Opens the circuit if the failures within the window reach the
    /// threshold; below that, requests a probe.
    fn fail(&mut self, error: TierError, now: Duration, now_unix_ms: u64) -> CircuitChange {
        self.last_error = Some(error);
        // Late calls and probes can fail while it is open: only the last error changes.
        if !self.is_healthy() {
            return CircuitChange::None;
        }
        self.failures = self.failures << 1 | 1;
        // The newest call is in the lowest bit. `check` limits the window to 1 to 64 calls, so that
        // the shift does not overflow.
        let window = u64::MAX >> (WINDOW_MAX - self.config.window);
        if (self.failures & window).count_ones() < self.config.threshold {
            self.probe_requested = true;
            return CircuitChange::None;
        }
        self.open(now, now_unix_ms)
    }

    /// Records a call that hangs. Opens the circuit at once, whatever other calls did.
    fn hang(&mut self, now: Duration, now_unix_ms: u64) -> CircuitChange {
        self.last_error = Some(TierError::Timeout);
        if self.is_healthy() { self.open(now, now_unix_ms) } else { CircuitChange::None }
    }

    fn open(&mut self, now: Duration, now_unix_ms: u64) -> CircuitChange {
        self.state = HealthState::Open;
        self.since_unix_ms = now_unix_ms;
        self.opened_count += 1;
        // The first probe comes one interval after the opening.
        self.last_probe = now;
        CircuitChange::Opened
    }

    /// Requests a probe because a caller waits for the stage, unless a recent success or probe
    /// shows that the stage works. (The deadline of the caller may just be too short.)
    fn suspect(&mut self, now: Duration) {
        let since_success = now.saturating_sub(self.last_success.max(self.last_probe));
        self.probe_requested |=
            since_success >= self.config.probe_interval / RECENT_SUCCESS_DIVISOR;
    }

    /// Begins a probe if one is due: after an interval with the circuit open, after an interval
    /// without a success, or on request.
    fn begin_probe(&mut self, now: Duration) -> bool {
        let since = match self.state {
            HealthState::Probing => return false,
            HealthState::Open => self.last_probe,
            // A stage in use needs no probe: every success postpones it.
            HealthState::Healthy => self.last_probe.max(self.last_success),
        };
        let is_due = now.saturating_sub(since) >= self.config.probe_interval;
        // A request does not shorten the interval of an open circuit.
        let is_wanted = is_due || (self.is_healthy() && self.probe_requested);
        if !is_wanted {
            return false;
        }
        self.last_probe = now;
        self.probe_requested = false;
        // A closed circuit stays closed during its probe: callers use the stage meanwhile.
        if self.state == HealthState::Open {
            self.state = HealthState::Probing;
        }
        true
    }

    /// Records the result of a probe. Success closes the circuit. A failure counts as a failed
    /// call, and `threshold` consecutive failed probes open the circuit by themselves.
    fn end_probe(
        &mut self,
        result: Result<(), TierError>,
        now: Duration,
        now_unix_ms: u64,
    ) -> CircuitChange {
        match result {
            Ok(()) if self.is_healthy() => {
                self.failed_probes = 0;
                self.succeed(now);
                CircuitChange::None
            }
            Ok(()) => {
                self.state = HealthState::Healthy;
                self.since_unix_ms = now_unix_ms;
                // Otherwise the next single failure could open the circuit again.
                self.failures = 0;
                self.failed_probes = 0;
                self.last_success = now;
                CircuitChange::Closed
            }
            Err(error) => {
                // With a closed circuit the failed probe also counts in the window.
                if self.state == HealthState::Probing {
                    self.state = HealthState::Open;
                }
                self.failed_probes = self.failed_probes.saturating_add(1);
                match self.fail(error, now, now_unix_ms) {
                    CircuitChange::None
                        if self.is_healthy() && self.failed_probes >= self.config.threshold =>
                    {
                        self.open(now, now_unix_ms)
                    }
                    change => change,
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
