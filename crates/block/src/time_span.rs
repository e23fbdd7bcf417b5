//! Durations with units: `5s`, `250ms`, `1.5s`, `2h`, `30` (seconds).

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;

/// A duration, parsed from and printed as text.
///
/// Units are `ms`, `s`, `min`, `h` and `d`; a number without a unit is in seconds. The maximum is a
/// hundred years, so that a deadline never overflows a clock.
///
/// ```
/// use std::time::Duration;
/// use cascade_block::TimeSpan;
/// assert_eq!("250ms".parse(), Ok(TimeSpan(Duration::from_millis(250))));
/// assert_eq!("1.5".parse(), Ok(TimeSpan(Duration::from_millis(1500))));
/// assert_eq!(TimeSpan(Duration::from_secs(90)).to_string(), "90s");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct TimeSpan(pub Duration);

/// Why a text or number is not a valid duration.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TimeSpanError {
    /// Not a number, or a negative one.
    #[error("{text:?} is not a duration; write a number from 0 up and a unit, such as 250ms or 5s")]
    Number {
        /// What was given.
        text: String,
    },
    /// An unknown unit.
    #[error("{unit:?} in {text:?} is not a unit of time; write ms, s, min, h or d")]
    Unit {
        /// What was given.
        text: String,
        /// The part that is not a unit.
        unit: String,
    },
    /// More than a hundred years.
    #[error("{text:?} is too long; the longest duration is 36525d")]
    TooLong {
        /// What was given.
        text: String,
    },
}

/// Units of time, from large to small, in milliseconds.
const UNITS: [(&str, u64); 5] =
    [("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000), ("ms", 1)];

impl TimeSpan {
    /// The maximum: a hundred years.
    pub const MAX: Self = Self(Duration::from_secs(36_525 * 86_400));

    /// A duration of `seconds`.
    ///
    /// # Errors
    /// If it is negative, not a number, or longer than [`TimeSpan::MAX`].
    pub fn from_seconds(seconds: f64) -> Result<Self, TimeSpanError> {
        if seconds.is_nan() || seconds < 0.0 {
            return Err(TimeSpanError::Number { text: seconds.to_string() });
        }
        let span = Duration::try_from_secs_f64(seconds).ok().map(Self);
        let too_long = || TimeSpanError::TooLong { text: seconds.to_string() };
        span.filter(|span| *span <= Self::MAX).ok_or_else(too_long)
    }
}

impl FromStr for TimeSpan {
    type Err = TimeSpanError;

    fn from_str(text: &str) -> Result<Self, TimeSpanError> {
        let quoted = || text.chars().take(80).collect::<String>();
        let trimmed = text.trim();
        let is_number = |letter: char| letter.is_ascii_digit() || letter == '.';
        let end = trimmed.find(|letter| !is_number(letter)).unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(end);
        let unit = unit.trim_start();
        if number.is_empty() {
            return Err(TimeSpanError::Number { text: quoted() });
        }
        let unit_ms = match UNITS.iter().find(|(name, _)| *name == unit) {
            Some((_, unit_ms)) => *unit_ms,
            None if unit.is_empty() => 1000,
            None => {
                let unit = unit.chars().take(80).collect();
                return Err(TimeSpanError::Unit { text: quoted(), unit });
            }
        };
        let too_long = || TimeSpanError::TooLong { text: quoted() };
        // Whole numbers stay exact; only fractions are computed in floating point.
        if let Ok(whole) = number.parse::<u64>() {
            let span = whole.checked_mul(unit_ms).map(|ms| Self(Duration::from_millis(ms)));
            return span.filter(|span| *span <= Self::MAX).ok_or_else(too_long);
        }
        let fraction = number.parse::<f64>();
        let fraction = fraction.map_err(|_| TimeSpanError::Number { text: quoted() })?;
        #[expect(clippy::cast_precision_loss, reason = "a unit is far below 2^53")]
        Self::from_seconds(fraction * unit_ms as f64 / 1000.0).map_err(|_| too_long())
    }
}

impl fmt::Display for TimeSpan {
    /// Whole milliseconds are exact: parsing the printed text returns the same duration.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.0.as_millis();
        if Duration::from_millis(u64::try_from(ms).unwrap_or(u64::MAX)) != self.0 {
            return f.pad(&format!("{}s", self.0.as_secs_f64()));
        }
        let exact = |(_, unit): &&(&str, u64)| ms != 0 && ms.is_multiple_of(u128::from(*unit));
        let (name, unit) = UNITS.iter().find(exact).unwrap_or(&UNITS[4]);
        f.pad(&format!("{}{name}", ms / u128::from(*unit)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_parsed_and_printed() {
        for (text, ms, back) in [
            ("0", 0, "0ms"),
            ("30", 30_000, "30s"),
            ("0.25", 250, "250ms"),
            ("5s", 5000, "5s"),
            (" 5 min ", 300_000, "5min"),
            ("1.5s", 1500, "1500ms"),
            ("2h", 7_200_000, "2h"),
            ("90min", 5_400_000, "90min"),
            ("7d", 604_800_000, "7d"),
            ("36525d", 3_155_760_000_000, "36525d"),
        ] {
            let span = TimeSpan(Duration::from_millis(ms));
            assert_eq!(text.parse(), Ok(span), "{text}");
            assert_eq!(span.to_string(), back);
            assert_eq!(back.parse(), Ok(span), "{back}");
        }
    }

    #[test]
    fn an_invalid_duration_is_refused_with_an_example() {
        for (text, hint) in [
            ("", "5s"),
            ("soon", "5s"),
            ("-1s", "5s"),
            (".", "5s"),
            ("1.2.3s", "5s"),
            ("5 minutes", "min"),
            ("5m", "min"),
            ("1e9", "min"),
            ("36526d", "36525d"),
            ("99999999999999999999s", "36525d"),
            ("99999999999999999999.5s", "36525d"),
        ] {
            let message = text.parse::<TimeSpan>().expect_err(text).to_string();
            assert!(message.contains(hint), "{text}: {message}");
        }
        for seconds in [-1.0, f64::NAN, f64::INFINITY, 1e300] {
            assert!(TimeSpan::from_seconds(seconds).is_err(), "{seconds}");
        }
    }
}
