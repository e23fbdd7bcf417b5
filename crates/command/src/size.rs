//! Parsers for the sizes, durations and counts of the command line: `512MiB`, `5s`, `10%`.

use std::num::NonZeroU64;
use std::time::Duration;

use cascade_block::{ByteSize, TimeSpan};

/// Parses a size such as `512MiB` (binary), `2GB` (decimal) or `4096` (bytes). Refuses zero.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    match text.parse::<ByteSize>() {
        Ok(ByteSize(0)) => Err("give a size of at least one byte".to_owned()),
        Ok(ByteSize(bytes)) => Ok(bytes),
        Err(error) => Err(error.to_string()),
    }
}

/// Parses a duration such as `5s`, `250ms` or `10` (seconds). Refuses zero.
pub fn parse_time(text: &str) -> Result<Duration, String> {
    match text.parse::<TimeSpan>() {
        Ok(TimeSpan(time)) if time.is_zero() => {
            Err("give a duration above 0, such as 5s".to_owned())
        }
        Ok(TimeSpan(time)) => Ok(time),
        Err(error) => Err(error.to_string()),
    }
}

/// A count of at least one.
pub type Count = NonZeroU64;

/// How many requests fill the cache before counting begins.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum WarmUp {
    /// A number of requests.
    Requests(usize),
    /// A share of all requests, in percent.
    Percent(f64),
}

impl WarmUp {
    /// The number of warm-up requests among `total`.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of a count of requests; a fraction of one does not matter"
    )]
    pub fn of(self, total: usize) -> usize {
        match self {
            Self::Requests(count) => count.min(total),
            Self::Percent(percent) => (total as f64 * percent / 100.0) as usize,
        }
    }

    /// Parses `500` or `10%`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let advice =
            || format!("{text:?} is not a number of requests (500) or a share below 100 % (10%)");
        let Some(percent) = text.trim().strip_suffix('%') else {
            return text.trim().parse().map(Self::Requests).map_err(|_| advice());
        };
        let percent: f64 = percent.trim().parse().map_err(|_| advice())?;
        if (0.0..100.0).contains(&percent) { Ok(Self::Percent(percent)) } else { Err(advice()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_binary_or_decimal_as_written() {
        assert_eq!(parse_bytes("512MiB"), Ok(512 << 20));
        assert_eq!(parse_bytes("2GB"), Ok(2_000_000_000));
        assert_eq!(parse_bytes("4096"), Ok(4096));
        assert!(parse_bytes("lots").unwrap_err().contains("512MiB"));
        assert!(parse_bytes("0").is_err());
        assert!(parse_bytes("-1MiB").is_err());
    }

    #[test]
    fn durations_have_a_unit_or_are_seconds() {
        assert_eq!(parse_time("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(parse_time("10"), Ok(Duration::from_secs(10)));
        assert!(parse_time("0").is_err());
        assert!(parse_time("soon").unwrap_err().contains("5s"));
    }

    #[test]
    fn warm_up_is_a_count_or_a_share() {
        assert_eq!(WarmUp::parse("500").map(|warm| warm.of(200)), Ok(200));
        assert_eq!(WarmUp::parse("10%").map(|warm| warm.of(200)), Ok(20));
        assert!(WarmUp::parse("100%").is_err());
        assert!(WarmUp::parse("some").is_err());
        assert!(WarmUp::parse("nan%").is_err());
    }
}
