//! Typed access to the fields of a JSON object, with errors that name position and expectation.

use serde_json::Value;

use super::parser::{BlockName, Parser};
use super::{REQUEST_BLOCKS_MAX, TraceError, date};

/// A JSON object of a trace file and its position.
#[derive(Debug, Clone, Copy)]
pub(super) struct TraceObject<'a> {
    pub(super) file: &'a str,
    pub(super) line: usize,
    /// Prefix of field names in errors, such as `requests[3].`.
    pub(super) prefix: &'a str,
    pub(super) value: &'a Value,
}

/// Limit of a time (300 years), so that sums of times cannot overflow.
const SECONDS_MAX: f64 = 1e10;

impl<'a> TraceObject<'a> {
    pub(super) fn error(&self, field: &str, expected: &str, found: String) -> TraceError {
        TraceError::Field {
            file: self.file.to_owned(),
            line: self.line,
            field: format!("{}{field}", self.prefix),
            expected: expected.to_owned(),
            found,
        }
    }

    pub(super) fn optional(&self, field: &str) -> Option<&'a Value> {
        self.value.get(field).filter(|value| !value.is_null())
    }

    fn required(&self, field: &str, expected: &str) -> Result<&'a Value, TraceError> {
        let found = self.optional(field);
        found.ok_or_else(|| self.error(field, expected, "nothing".to_owned()))
    }

    /// An integer in `min..=max`. `1.0e5` is one.
    pub(super) fn integer(&self, field: &str, min: u32, max: u32) -> Result<u32, TraceError> {
        let expected = format!("an integer from {min} to {max}");
        let value = self.required(field, &expected)?;
        let integer = whole_number(value).and_then(|integer| u32::try_from(integer).ok());
        let inside = integer.filter(|integer| (min..=max).contains(integer));
        inside.ok_or_else(|| self.error(field, &expected, shown(value)))
    }

    /// A time that is not negative, in units of `1 / per_second` seconds.
    pub(super) fn time(
        &self,
        field: &str,
        per_second: f64,
    ) -> Result<std::time::Duration, TraceError> {
        let expected = "a time that is not negative";
        let value = self.required(field, expected)?;
        let seconds = value.as_f64().map(|time| time / per_second);
        let inside = seconds.filter(|seconds| (0.0..=SECONDS_MAX).contains(seconds));
        let seconds = inside.ok_or_else(|| self.error(field, expected, shown(value)))?;
        Ok(std::time::Duration::from_secs_f64(seconds))
    }

    /// A date with a time of day, as the time since 1970.
    pub(super) fn date(&self, field: &str) -> Result<std::time::Duration, TraceError> {
        let value = self.required(field, date::EXPECTED)?;
        let found = value.as_str().and_then(date::since_1970);
        found.ok_or_else(|| self.error(field, date::EXPECTED, shown(value)))
    }

    /// Tokens of a prompt for which the trace names no blocks, so that they are made here.
    pub(super) fn made_block_tokens(
        &self,
        field: &str,
        block_tokens: u32,
    ) -> Result<u32, TraceError> {
        let blocks_max = u32::try_from(REQUEST_BLOCKS_MAX).unwrap_or(u32::MAX);
        self.integer(field, 0, blocks_max.saturating_mul(block_tokens))
    }

    pub(super) fn required_text(&self, field: &str) -> Result<&'a str, TraceError> {
        let value = self.required(field, "a string")?;
        value.as_str().ok_or_else(|| self.error(field, "a string", shown(value)))
    }

    pub(super) fn text(&self, field: &str, default: &'a str) -> Result<&'a str, TraceError> {
        let Some(value) = self.optional(field) else { return Ok(default) };
        value.as_str().ok_or_else(|| self.error(field, "a string", shown(value)))
    }

    pub(super) fn list(&self, field: &str, expected: &str) -> Result<&'a [Value], TraceError> {
        let value = self.required(field, expected)?;
        let list = value.as_array().ok_or_else(|| self.error(field, expected, shown(value)))?;
        Ok(list)
    }

    /// The blocks of a request: integers, also as decimal text, or keys in hexadecimal. Keys are
    /// global unless the format says that ids are of one session.
    pub(super) fn blocks(
        &self,
        parser: &mut Parser,
        scope: IdScope,
    ) -> Result<Vec<u64>, TraceError> {
        let list = self.list("hash_ids", "a list of block ids")?;
        if list.len() > REQUEST_BLOCKS_MAX {
            let expected = format!("at most {REQUEST_BLOCKS_MAX} block ids");
            return Err(self.error("hash_ids", &expected, list.len().to_string()));
        }
        let mut blocks = Vec::with_capacity(list.len());
        for (index, value) in list.iter().enumerate() {
            let name = block_name(value, scope, parser.scope()).ok_or_else(|| {
                let expected = "an integer from 0 to 2^64 - 1, or 1 to 64 hex digits";
                self.error(&format!("hash_ids[{index}]"), expected, shown(value))
            })?;
            blocks.push(parser.number(name));
        }
        Ok(blocks)
    }

    /// Whether the last of `ids` block ids is a block that is not full.
    pub(super) fn has_partial_tail(
        &self,
        field: &str,
        input_tokens: u32,
        block_tokens: u32,
        ids: usize,
    ) -> Result<bool, TraceError> {
        let full = (input_tokens / block_tokens) as usize;
        let has_rest = !input_tokens.is_multiple_of(block_tokens);
        if ids == full {
            return Ok(false);
        }
        if has_rest && ids == full + 1 {
            return Ok(true);
        }
        let expected = format!(
            "{full} block ids{} for {field} = {input_tokens} at {block_tokens} tokens per block",
            if has_rest { " or one more" } else { "" },
        );
        Err(self.error("hash_ids", &expected, ids.to_string()))
    }
}

/// Which blocks an id names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IdScope {
    /// Integers name blocks of their source, keys in hexadecimal those of all sources.
    Source,
    /// All ids name blocks of their session.
    Session,
    /// All ids name blocks of all sources.
    Everywhere,
}

/// The scope number of ids that are global.
const EVERYWHERE: u32 = u32::MAX;

fn block_name(value: &Value, scope: IdScope, local: u32) -> Option<BlockName> {
    let number = value.as_u64().or_else(|| decimal(value.as_str()?));
    if let Some(id) = number {
        let scope = if scope == IdScope::Everywhere { EVERYWHERE } else { local };
        return Some(BlockName::Local { scope, id });
    }
    let text = value.as_str().filter(|text| (1..=64).contains(&text.len()))?;
    let digits = u8::try_from(text.len()).ok()?;
    let mut key = [0; 32];
    for (at, digit) in text.bytes().rev().enumerate() {
        let nibble = u8::try_from(char::from(digit).to_digit(16)?).ok()?;
        key[31 - at / 2] |= nibble << (4 * (at % 2));
    }
    Some(match scope {
        IdScope::Session => BlockName::LocalKey { scope: local, digits, key },
        IdScope::Source | IdScope::Everywhere => BlockName::Global { digits, key },
    })
}

/// An integer as some programs write it, which have no integers of 64 bits. Keys in hexadecimal are
/// longer, or have letters or a leading zero.
fn decimal(text: &str) -> Option<u64> {
    let is_plain = text == "0" || !text.starts_with('0');
    let is_number = is_plain && text.bytes().all(|digit| digit.is_ascii_digit());
    if is_number { text.parse().ok() } else { None }
}

/// A number without a fraction.
fn whole_number(value: &Value) -> Option<u64> {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a whole number of 32 bits, which was checked"
    )]
    let whole = |number: f64| {
        let is_whole = number.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&number);
        is_whole.then_some(number as u64)
    };
    value.as_u64().or_else(|| whole(value.as_f64()?))
}

/// The first characters of a value, for an error.
pub(super) fn shown(value: &Value) -> String {
    const CHARS_MAX: usize = 40;
    let text = value.to_string();
    let mut short: String = text.chars().take(CHARS_MAX).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}
