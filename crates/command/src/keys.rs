//! Keys of blocks on the command line: 64 hexadecimal digits, at least the first 8, or a text key.

use clap::builder::{NonEmptyStringValueParser, TypedValueParser as _, ValueParser};

use crate::Failure;

/// The least number of digits that name a block.
const DIGITS_MIN: usize = 8;
/// The digits of a whole key.
const DIGITS_MAX: usize = 64;

/// Refuses texts that are not the digits of a key, before a node is asked.
pub(super) fn check(keys: &[String]) -> Result<(), Failure> {
    let is_key = |key: &&String| {
        key.bytes().all(|digit| digit.is_ascii_hexdigit())
            && (DIGITS_MIN..=DIGITS_MAX).contains(&key.len())
    };
    match keys.iter().find(|key| !is_key(key)) {
        None => Ok(()),
        Some(invalid) => Err(Failure::usage(
            format!("{:?} is not a key", invalid.chars().take(80).collect::<String>()),
            "give the 64 hexadecimal digits of a block's key, or at least the first 8",
        )),
    }
}

/// Refuses texts with which no key begins, before a node is asked.
pub(super) fn check_beginning(digits: &str) -> Result<(), Failure> {
    let is_beginning = digits.bytes().all(|digit| digit.is_ascii_hexdigit())
        && (1..=DIGITS_MAX).contains(&digits.len());
    if is_beginning {
        return Ok(());
    }
    Err(Failure::usage(
        format!("no key begins with {:?}", digits.chars().take(80).collect::<String>()),
        "give 1 to 64 hexadecimal digits",
    ))
}

/// The parser of a text key: the digits of its block key.
pub(super) fn of_text() -> ValueParser {
    let digits = |text: String| cascade_block::text_key(&text).to_string();
    NonEmptyStringValueParser::new().map(digits).into()
}
