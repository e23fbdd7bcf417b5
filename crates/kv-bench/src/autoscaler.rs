//! Autoscaling: how many users the storage carries, or how much it moves at most.

use std::time::Duration;

use serde::Serialize;

/// Intervals without a decision after fewer users, so that their effect is seen.
const COOLDOWN: u32 = 3;
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

/// Settings that a configuration file may change. The defaults are those of the original.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScaleSettings {
    /// Fewest users.
    pub users_min: u32,
    /// Most users.
    pub users_max: u32,
    /// What the number of users is multiplied by to add some.
    pub up_factor: f64,
    /// What the number of users is multiplied by to take some away.
    pub down_factor: f64,
    /// Intervals that have to agree before users are taken away, or before the peak is final.
    pub agreeing: u32,
    /// Read latency of a call that counts as saturation.
    pub read_ms_max: f64,
    /// Write latency of a call that counts as saturation.
    pub write_ms_max: f64,
}

impl Default for ScaleSettings {
    fn default() -> Self {
        Self {
            users_min: 1,
            users_max: 10_000,
            up_factor: 1.2,
            down_factor: 0.8,
            agreeing: 2,
            read_ms_max: 100.0,
            write_ms_max: 50.0,
        }
    }
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
    /// Factors and limits.
    pub settings: ScaleSettings,
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
    settings: ScaleSettings,
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
            settings: options.settings,
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
        let saturation = saturation(interval, &self.settings);
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
            if self.agreeing >= self.settings.agreeing {
                self.agreeing = 0;
                self.cooldown = COOLDOWN;
                self.users = self.fewer();
            }
            return;
        }
        self.agreeing = 0;
        if saturation < self.target_saturation * 0.9 {
            self.users = self.more(self.settings.up_factor - 1.0, 1);
        }
    }

    /// Returns whether the peak is final.
    fn decide_by_throughput(&mut self, interval: &Interval) -> bool {
        let now = interval.gib_per_second;
        let (steps, is_gain) = match self.peak {
            // Twice as many more at first: two fifths, then a fifth.
            None => (2.0, true),
            Some((peak, ..)) => (1.0, now > peak * GAIN_MIN),
        };
        if !is_gain {
            self.agreeing += 1;
            return self.agreeing >= self.settings.agreeing;
        }
        self.agreeing = 0;
        self.peak = Some((now, interval.tokens_per_second, self.users));
        let most = self.users.saturating_add(100);
        self.users = self.more((self.settings.up_factor - 1.0) * steps, 5).min(most);
        false
    }

    /// Users after this share and at least this number more, within the limits.
    fn more(&self, share: f64, least: u32) -> u32 {
        let step = whole(f64::from(self.users) * share).max(least);
        // A run that starts above the limit keeps its users.
        let most = self.settings.users_max.max(self.users);
        self.users.saturating_add(step).clamp(self.settings.users_min, most)
    }

    /// Users after some are taken away, within the limits.
    fn fewer(&self) -> u32 {
        let users = whole(f64::from(self.users) * self.settings.down_factor);
        users.max(self.settings.users_min.min(self.users)).max(1)
    }
}

/// The larger of both latencies over their limits, at most 1.
fn saturation(interval: &Interval, settings: &ScaleSettings) -> Option<f64> {
    let read = interval.read_ms_p95.map(|ms| ms / settings.read_ms_max);
    let write = interval.write_ms_p95.map(|ms| ms / settings.write_ms_max);
    let level = read.into_iter().chain(write).fold(f64::NAN, f64::max);
    (!level.is_nan()).then(|| level.min(1.0))
}

/// The whole part, where a product such as `0.2 * 25` is a little less than a whole number.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a product of numbers that are not negative; casts of floats saturate"
)]
fn whole(number: f64) -> u32 {
    (number + 1e-6) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scaler(mode: AutoscalerMode, users: u32) -> Autoscaler {
        let (interval, settings) = (Duration::from_secs(10), ScaleSettings::default());
        Autoscaler::new(
            &AutoscalerOptions { mode, target_saturation: 0.8, interval, settings },
            users,
        )
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
    fn settings_change_factors_and_limits() {
        let settings = ScaleSettings {
            users_min: 15,
            users_max: 50,
            up_factor: 2.0,
            down_factor: 0.5,
            agreeing: 1,
            read_ms_max: 10.0,
            ..ScaleSettings::default()
        };
        let of = |mode, users| {
            let interval = Duration::from_secs(10);
            let options = AutoscalerOptions { mode, target_saturation: 0.8, interval, settings };
            Autoscaler::new(&options, users)
        };
        let mut qos = of(AutoscalerMode::Qos, 20);
        let mut decide = |read| qos.decide(Duration::ZERO, &latencies(read, 1.0));
        assert_eq!(decide(5.0), ScaleAction::Users(40));
        assert_eq!(decide(5.0), ScaleAction::Users(50));
        assert_eq!(decide(5.0), ScaleAction::Hold, "at the limit");
        assert_eq!(decide(9.5), ScaleAction::Users(25));
        assert_eq!([(); 3].map(|()| decide(5.0)), [ScaleAction::Hold; 3]);
        assert_eq!(decide(9.5), ScaleAction::Users(15));
        let mut above = of(AutoscalerMode::Qos, 60);
        let first = above.decide(Duration::ZERO, &latencies(5.0, 1.0));
        assert_eq!(first, ScaleAction::Hold, "a run that starts above the limit keeps its users");
        let mut capacity = of(AutoscalerMode::Capacity, 20);
        let mut decide = |gib| capacity.decide(Duration::ZERO, &throughput(gib));
        assert_eq!(decide(1.0), ScaleAction::Users(50));
        assert_eq!(decide(1.0), ScaleAction::Stop);
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
