//! Sizes in bytes with units: `512MiB`, `100MB`, `4096`.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// A number of bytes, parsed from and printed as text.
///
/// `KiB`, `MiB`, `GiB`, `TiB` are powers of 1024; `KB`, `MB`, `GB`, `TB` are powers of 1000; `B`
/// or nothing is bytes. Upper or lower case, with or without a space before the unit.
///
/// ```
/// use cascade_block::ByteSize;
/// assert_eq!("512MiB".parse(), Ok(ByteSize(512 << 20)));
/// assert_eq!("100 MB".parse(), Ok(ByteSize(100_000_000)));
/// assert_eq!(ByteSize(64 << 10).to_string(), "64KiB");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ByteSize(pub u64);

/// Why a text is not a valid size.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ByteSizeError {
    /// The text does not start with a whole number.
    #[error("{text:?} is not a size; write a whole number and a unit, such as 512MiB or 100MB")]
    Number {
        /// What was given.
        text: String,
    },
    /// An unknown unit.
    #[error(
        "{unit:?} in {text:?} is not a unit; write B, KiB, MiB, GiB, TiB (powers of 1024) or \
             KB, MB, GB, TB (powers of 1000)"
    )]
    Unit {
        /// What was given.
        text: String,
        /// The part that is not a unit.
        unit: String,
    },
    /// More bytes than fit 64 bits.
    #[error("{text:?} is too large; the largest size is 16777215TiB")]
    TooLarge {
        /// What was given.
        text: String,
    },
}

const BINARY: [(&str, u64); 4] =
    [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
const DECIMAL: [(&str, u64); 4] =
    [("TB", 1_000_000_000_000), ("GB", 1_000_000_000), ("MB", 1_000_000), ("KB", 1_000)];

impl ByteSize {
    /// The size to one decimal in the largest binary unit that fits, for display only.
    pub fn rounded(self) -> String {
        match BINARY.iter().find(|(_, unit)| self.0 >= *unit) {
            Some((name, unit)) => {
                let tenths = (u128::from(self.0) * 10 + u128::from(unit / 2)) / u128::from(*unit);
                format!("{}.{} {name}", tenths / 10, tenths % 10)
            }
            None => format!("{} B", self.0),
        }
    }
}

impl fmt::Display for ByteSize {
    /// Exact: parsing the printed text returns the same size.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = BINARY.iter().find(|(_, unit)| self.0 != 0 && self.0.is_multiple_of(*unit));
        match exact {
            Some((name, unit)) => f.pad(&format!("{}{name}", self.0 / unit)),
            None => f.pad(&format!("{}B", self.0)),
        }
    }
}

impl FromStr for ByteSize {
    type Err = ByteSizeError;

    fn from_str(text: &str) -> Result<Self, ByteSizeError> {
        let quoted = || text.chars().take(80).collect::<String>();
        let trimmed = text.trim();
        let digits_end = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
        let (digits, unit) = trimmed.split_at(digits_end);
        let unit = unit.trim_start();
        if digits.is_empty() || unit.starts_with('.') {
            return Err(ByteSizeError::Number { text: quoted() });
        }
        let factor = unit_bytes(unit).ok_or_else(|| ByteSizeError::Unit {
            text: quoted(),
            unit: unit.chars().take(80).collect(),
        })?;
        // Only digits remain, so the only possible error is overflow.
        let number = digits.parse::<u64>().ok();
        let bytes = number.and_then(|number| number.checked_mul(factor));
        bytes.map(Self).ok_or_else(|| ByteSizeError::TooLarge { text: quoted() })
    }
}

fn unit_bytes(unit: &str) -> Option<u64> {
    if unit.is_empty() || unit.eq_ignore_ascii_case("B") {
        return Some(1);
    }
    let mut known = BINARY.iter().chain(&DECIMAL);
    known.find(|(name, _)| unit.eq_ignore_ascii_case(name)).map(|(_, bytes)| *bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_with_and_without_units_are_parsed() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("17B", 17),
            ("64KiB", 64 << 10),
            ("64 kib", 64 << 10),
            ("512MiB", 512 << 20),
            ("4GiB", 4 << 30),
            ("100MB", 100_000_000),
            (" 3TB ", 3_000_000_000_000),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn an_invalid_size_is_refused_with_an_example() {
        for text in ["", "MiB", "-1", "1.5GiB", "1e9"] {
            let error = text.parse::<ByteSize>().expect_err(text).to_string();
            assert!(error.contains("512MiB") || error.contains("KiB, MiB"), "{error}");
        }
        let unit = "4G".parse::<ByteSize>().expect_err("a unit is written out");
        assert!(unit.to_string().contains("GiB"), "{unit}");
        assert_eq!(
            "99999999999TiB".parse::<ByteSize>(),
            Err(ByteSizeError::TooLarge { text: "99999999999TiB".to_owned() })
        );
    }

    #[test]
    fn rounded_sizes_are_short() {
        assert_eq!(ByteSize(1023).rounded(), "1023 B");
        assert_eq!(ByteSize(1536).rounded(), "1.5 KiB");
        assert_eq!(ByteSize(u64::MAX).rounded(), "16777216.0 TiB");
    }

    proptest! {
        #[test]
        fn a_printed_size_parses_to_the_same_size(bytes: u64, shift in 0_u32..40) {
            let size = ByteSize(bytes >> shift << shift);
            prop_assert_eq!(size.to_string().parse(), Ok(size));
        }
    }
}
