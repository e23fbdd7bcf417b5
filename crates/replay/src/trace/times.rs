//! The unit of timestamps, and whether the times of a trace look like another one.

use std::time::Duration;

use super::Trace;

/// The unit of times. Sessions have times in seconds, whatever the unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TimeUnit {
    /// Seconds.
    Seconds,
    /// Milliseconds.
    #[default]
    Milliseconds,
    /// Microseconds.
    Microseconds,
}

/// What the times of a trace are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Times {
    /// Numbers.
    In {
        /// Their unit.
        unit: TimeUnit,
        /// Whether the user gave it; else it is that of the format.
        is_given: bool,
    },
    /// Dates with a time of day.
    Dates,
    /// The trace has none: requests follow one another.
    None,
}

/// Real services are below this mean rate of requests.
const REQUESTS_PER_SECOND_MAX: f64 = 100.0;
/// Traces are recorded of services with more than one request in this time.
const INTERVAL_MAX: Duration = Duration::from_secs(60);
/// What rounding may make of a whole millisecond.
const ROUNDING_NS: u32 = 10_000;

impl TimeUnit {
    /// Timestamps in one second.
    pub(super) fn per_second(self) -> f64 {
        match self {
            Self::Seconds => 1.0,
            Self::Milliseconds => 1e3,
            Self::Microseconds => 1e6,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Seconds => "seconds",
            Self::Milliseconds => "milliseconds",
            Self::Microseconds => "microseconds",
        }
    }
}

impl Times {
    /// In a word: `seconds`, `milliseconds`, `microseconds`, `dates` or `none`.
    pub fn name(self) -> &'static str {
        match self {
            Self::In { unit, .. } => unit.name(),
            Self::Dates => "dates",
            Self::None => "none",
        }
    }

    /// In words, with the rule that decided.
    pub fn text(self) -> String {
        match self {
            Self::In { unit, is_given: true } => {
                format!("times in {} (--time-unit)", unit.name())
            }
            Self::In { unit, .. } => format!("times in {} (by the format)", unit.name()),
            Self::Dates => "times are dates".to_owned(),
            Self::None => "no times: requests in the order of the file".to_owned(),
        }
    }

    /// Timestamps in one second.
    pub(super) fn per_second(self) -> f64 {
        match self {
            Self::In { unit, .. } => unit.per_second(),
            Self::Dates | Self::None => 1.0,
        }
    }
}

impl Trace {
    /// Says why times that were read as milliseconds, because no unit was given, may be of another
    /// unit.
    pub fn time_note(&self) -> Option<String> {
        let assumed = Times::In { unit: TimeUnit::Milliseconds, is_given: false };
        let last = self.requests.last()?.at;
        let first = self.requests.first()?.at;
        let intervals = (self.requests.len() - 1) as f64;
        let seconds = last.saturating_sub(first).as_secs_f64();
        if self.import.times != Some(assumed) || seconds <= 0.0 {
            return None;
        }
        let (reason, unit, name) = if self.requests.iter().any(|one| has_fraction(one.at)) {
            ("some have fractions".to_owned(), "seconds", "s")
        } else if intervals / seconds > REQUESTS_PER_SECOND_MAX {
            (format!("that is {:.0} requests a second", intervals / seconds), "seconds", "s")
        } else if seconds / intervals > INTERVAL_MAX.as_secs_f64() {
            let each = seconds / intervals;
            (format!("that is a request every {each:.0} s"), "microseconds", "us")
        } else {
            return None;
        };
        Some(format!(
            "timestamps were read as milliseconds: {} requests in {seconds:.3} s; {reason}. If \
             they are {unit}, add --time-unit {name}; if not, --time-unit ms",
            self.requests.len(),
        ))
    }
}

/// Whether a time is not a whole number of milliseconds.
fn has_fraction(time: Duration) -> bool {
    let rest = time.subsec_nanos() % 1_000_000;
    (ROUNDING_NS..1_000_000 - ROUNDING_NS).contains(&rest)
}
