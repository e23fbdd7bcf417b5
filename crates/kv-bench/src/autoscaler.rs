//! Autoscaling: how many users the storage carries, or how much it moves at most.

use std::time::Duration;

use serde::Serialize;

/// Read latency of a call that counts as saturation.
const READ_MS_MAX: f64 = 100.0;
/// Write latency of a call that counts as saturation.
const WRITE_MS_MAX: f64 = 50.0;
/// Most users.
pub const USERS_MAX: u32 = 10_000;
/// Intervals without a decision after fewer users, so that their effect is seen.
const COOLDOWN: u32 = 3;
/// Intervals that have to agree before users are taken away, or before the peak is final.
const AGREEING: u32 = 2;
/// A throughput above the peak by less than this is noise.
const GAIN_MIN: f64 = 1.01;

/// What is searched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AutoscalerMode {
    /// The number of users at which latencies reach a share of their limits.
    Qos,
    /// The highest throughput. The run ends once more users do not raise it.
    Capacity,
}

/// How users are added and taken away.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AutoscalerOptions {
    /// What is searched.
    pub mode: AutoscalerMode,
    /// The share of the latency limits to reach, from 0 to 1.
    pub target_saturation: f64,
    /// Time between two decisions.
    pub interval: Duration,
}

/// What was measured since the last decision.
#[derive(Debug, Clone, Copy)]
pub struct Interval {
    /// 95th percentile of calls that read. `None` without any.
    pub read_ms_p95: Option<f64>,
    /// 95th percentile of calls that wrote.
    pub write_ms_p95: Option<f64>,
    /// Bytes read and written in GiB a second.
    pub gib_per_second: f64,
    /// Tokens of answered requests a second.
    pub tokens_per_second: f64,
}

/// A change of the number of users, or the end.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScaleEvent {
    /// Seconds since the start of the window.
    pub timestamp: f64,
    /// `qos` or `capacity`.
    pub mode: &'static str,
    /// `scale_up`, `scale_down` or `stop`.
    pub action: &'static str,
    /// Users from then on.
    pub users: u32,
    /// The larger of both latencies over their limits, at most 1.
    pub saturation_level: Option<f64>,
    /// 95th percentile of calls that read, in the interval before.
    pub read_latency_p95_ms: Option<f64>,
    /// 95th percentile of calls that wrote.
    pub write_latency_p95_ms: Option<f64>,
    /// Tokens a second in the interval before.
    pub throughput_tokens_per_sec: f64,
    /// Bytes read and written in the interval before.
    pub gib_per_second: f64,
}

/// What to do until the next decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleAction {
    /// Go on with as many users.
    Hold,
    /// Go on with this many.
    Users(u32),
    /// End the run: the peak is found.
    Stop,
}

/// Decides after each interval.
#[derive(Debug, Clone)]
pub struct Autoscaler {
    mode: AutoscalerMode,
    target_saturation: f64,
    /// Users at the start.
    pub initial_users: u32,
    /// Users now.
    pub users: u32,
    /// The highest throughput of an interval, its tokens a second, and its users.
    pub peak: Option<(f64, f64, u32)>,
    /// What was decided.
    pub events: Vec<ScaleEvent>,
    cooldown: u32,
    agreeing: u32,
}

impl AutoscalerMode {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Qos => "qos",
            Self::Capacity => "capacity",
        }
    }
}

impl Autoscaler {
    /// A run that starts with `users`.
    pub fn new(options: &AutoscalerOptions, users: u32) -> Self {
        Self {
            mode: options.mode,
            target_saturation: options.target_saturation,
            initial_users: users,
            users,
            peak: None,
            events: Vec::new(),
            cooldown: 0,
            agreeing: 0,
        }
    }

    /// Decides by the last interval, `since_start` after the start of the window.
    pub fn decide(&mut self, since_start: Duration, interval: &Interval) -> ScaleAction {
        let saturation = saturation(interval);
        let users = self.users;
        let has_ended = match self.mode {
            AutoscalerMode::Qos => {
                self.decide_by_latency(saturation);
                false
            }
            AutoscalerMode::Capacity => self.decide_by_throughput(interval),
        };
        let action = match (has_ended, self.users > users, self.users < users) {
            (true, ..) => "stop",
            (_, true, _) => "scale_up",
            (.., true) => "scale_down",
            _ => return ScaleAction::Hold,
        };
        self.events.push(ScaleEvent {
            timestamp: since_start.as_secs_f64(),
            mode: self.mode.name(),
            action,
            users: self.users,
            saturation_level: saturation,
            read_latency_p95_ms: interval.read_ms_p95,
            write_latency_p95_ms: interval.write_ms_p95,
            throughput_tokens_per_sec: interval.tokens_per_second,
            gib_per_second: interval.gib_per_second,
        });
        if has_ended { ScaleAction::Stop } else { ScaleAction::Users(self.users) }
    }

    fn decide_by_latency(&mut self, saturation: Option<f64>) {
        if self.cooldown > 0 {
            self.cooldown -= 1;
            return;
        }
        let Some(saturation) = saturation else { return };
        if saturation > self.target_saturation * 1.1 {
            self.agreeing += 1;
            if self.agreeing >= AGREEING {
                self.agreeing = 0;
                self.cooldown = COOLDOWN;
                self.users = (self.users * 4 / 5).max(1);
            }
            return;
        }
        self.agreeing = 0;
        if saturation < self.target_saturation * 0.9 {
            self.users = (self.users + (self.users / 5).max(1)).min(USERS_MAX);
        }
    }

    /// Returns whether the peak is final.
    fn decide_by_throughput(&mut self, interval: &Interval) -> bool {
        let now = interval.gib_per_second;
        let (fraction, is_gain) = match self.peak {
            // Two fifths more at first, then a fifth.
            None => (2, true),
            Some((peak, ..)) => (1, now > peak * GAIN_MIN),
        };
        if !is_gain {
            self.agreeing += 1;
            return self.agreeing >= AGREEING;
        }
        self.agreeing = 0;
        self.peak = Some((now, interval.tokens_per_second, self.users));
        let step = (self.users * fraction / 5).clamp(5, 100);
        self.users = (self.users + step).min(USERS_MAX);
        false
    }
}

/// The larger of both latencies over their limits, at most 1.
fn saturation(interval: &Interval) -> Option<f64> {
    let read = interval.read_ms_p95.map(|ms| ms / READ_MS_MAX);
    let write = interval.write_ms_p95.map(|ms| ms / WRITE_MS_MAX);
    let level = read.into_iter().chain(write).fold(f64::NAN, f64::max);
    (!level.is_nan()).then(|| level.min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scaler(mode: AutoscalerMode, users: u32) -> Autoscaler {
        let interval = Duration::from_secs(10);
        Autoscaler::new(&AutoscalerOptions { mode, target_saturation: 0.8, interval }, users)
    }

    fn latencies(read: f64, write: f64) -> Interval {
        Interval {
            read_ms_p95: Some(read),
            write_ms_p95: Some(write),
            gib_per_second: 1.0,
            tokens_per_second: 10.0,
        }
    }

    fn throughput(gib_per_second: f64) -> Interval {
        Interval { gib_per_second, ..latencies(1.0, 1.0) }
    }

    #[test]
    fn users_are_added_below_the_target_and_taken_away_above_it() {
        let mut scaler = scaler(AutoscalerMode::Qos, 20);
        let mut decide = |read, write| scaler.decide(Duration::ZERO, &latencies(read, write));
        assert_eq!(decide(50.0, 10.0), ScaleAction::Users(24));
        assert_eq!(decide(50.0, 10.0), ScaleAction::Users(28));
        // Within a tenth of the target.
        assert_eq!(decide(82.0, 10.0), ScaleAction::Hold);
        // One interval is not enough; the worse of both latencies counts.
        assert_eq!(decide(50.0, 50.0), ScaleAction::Hold);
        assert_eq!(decide(95.0, 10.0), ScaleAction::Users(22));
        // Its effect is waited for.
        assert_eq!([(); 3].map(|()| decide(10.0, 10.0)), [ScaleAction::Hold; 3]);
        assert_eq!(decide(10.0, 10.0), ScaleAction::Users(26));
        let actions: Vec<_> = scaler.events.iter().map(|event| event.action).collect();
        assert_eq!(actions, ["scale_up", "scale_up", "scale_down", "scale_up"]);
        assert_eq!(scaler.events[2].saturation_level, Some(0.95));
    }

    #[test]
    fn an_interval_without_calls_changes_nothing() {
        let mut scaler = scaler(AutoscalerMode::Qos, 20);
        let nothing = Interval { read_ms_p95: None, write_ms_p95: None, ..latencies(0.0, 0.0) };
        assert_eq!(scaler.decide(Duration::ZERO, &nothing), ScaleAction::Hold);
        assert!(scaler.events.is_empty());
    }

    #[test]
    fn the_search_for_the_peak_ends_once_more_users_do_not_help() {
        let mut scaler = scaler(AutoscalerMode::Capacity, 10);
        let mut decide = |gib| scaler.decide(Duration::ZERO, &throughput(gib));
        assert_eq!(decide(1.0), ScaleAction::Users(15));
        assert_eq!(decide(1.5), ScaleAction::Users(20));
        assert_eq!(decide(1.505), ScaleAction::Hold);
        assert_eq!(decide(1.4), ScaleAction::Stop);
        assert_eq!(scaler.peak, Some((1.5, 10.0, 15)));
        assert_eq!(scaler.events.last().unwrap().action, "stop");
    }
}
