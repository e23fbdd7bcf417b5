//! Health of a stage: what it did lately, and whether it is asked at all.
//!
//! A breaker counts calls, not blocks: two failures among the last eight open it, and then nobody
//! waits for the stage until it has answered a probe. It takes its time from its caller.

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
    /// Time between two probes of a stage that is shed, or that has had nothing to do.
    /// Default: 5 s. Minimum: 1 ms.
    pub probe_interval: Duration,
    /// How long a probe may take. A call that lasts the threshold's times as long without an answer
    /// has its stage shed, unless that keeps its deadlines by itself. Default: 3 s. Minimum: 1 ms.
    pub probe_timeout: Duration,
    /// How many of the last calls count. Default: 8. Minimum: 1. Maximum: 64.
    pub window: u32,
    /// So many failures among them, and the stage is shed. Default: 2. Minimum: 1. Maximum: the
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
    /// Its breaker is open: nothing is asked of it but probes.
    Open,
    /// As `Open`, and a probe is under way.
    Probing,
}

/// A stage's health at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageHealth {
    /// Whether it is used.
    pub state: HealthState,
    /// Since when it is used, or is not, in milliseconds since 1970.
    pub since_unix_ms: u64,
    /// How often its breaker opened.
    pub opened_count: u64,
    /// Why it failed last, if it ever did.
    pub last_error: Option<String>,
    /// Calls that it has not answered although nobody waits for them any more.
    pub stuck_calls: u64,
}

/// What a breaker has just done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Nothing.
    None,
    /// The stage is shed from now on.
    Opened,
    /// The stage is used again.
    Closed,
}

/// One stage's breaker.
#[derive(Debug)]
pub(crate) struct Breaker {
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

impl Breaker {
    pub(crate) fn new(config: HealthConfig, now: Duration, now_unix_ms: u64) -> Self {
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

    pub(crate) fn is_healthy(&self) -> bool {
        self.state == HealthState::Healthy
    }

    /// A call was answered. What was begun before the breaker opened does not close it.
    pub(crate) fn succeed(&mut self, now: Duration) {
        if self.is_healthy() {
            self.failures <<= 1;
            self.last_success = now;
        }
    }

    /// A call failed.
    pub(crate) fn fail(&mut self, error: StageError, now: Duration, now_unix_ms: u64) -> Turn {
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
    pub(crate) fn hang(&mut self, now: Duration, now_unix_ms: u64) -> Turn {
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
    pub(crate) fn suspect(&mut self, now: Duration) {
        let quiet = now.saturating_sub(self.last_success.max(self.last_probe));
        self.is_suspect |= quiet >= self.config.probe_interval / SUSPICION_PART;
    }

    /// Begins a probe, if one is due: of a stage that is shed, of one that has had nothing to say
    /// for an interval, and of one that is suspected.
    pub(crate) fn begin_probe(&mut self, now: Duration) -> bool {
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
    pub(crate) fn end_probe(
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

    pub(crate) fn health(&self, stuck_calls: u64) -> StageHealth {
        StageHealth {
            state: self.state,
            since_unix_ms: self.since_unix_ms,
            opened_count: self.opened_count,
            last_error: self.last_error.as_ref().map(|error| with_causes(error)),
            stuck_calls,
        }
    }
}

#[cfg(test)]
mod tests;
