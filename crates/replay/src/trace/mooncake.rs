//! Mooncake's JSONL format: one request per line, blocks of 512 tokens.

use serde_json::Value;

use super::field::{TraceObject, shown};
use super::input::Lines;
use super::{BLOCK_TOKENS_MAX, Parser, TraceError, TraceRequest};

/// Tokens of a block, unless a line has `block_tokens`.
pub(super) const BLOCK_TOKENS: u32 = 512;

/// Parses a line and those after it.
pub(super) fn parse(
    parser: &mut Parser,
    lines: &mut Lines<'_>,
    first: Option<Vec<u8>>,
) -> Result<(), TraceError> {
    let mut next = first;
    while let Some(line) = next {
        let (file, number) = (lines.file, lines.line);
        let value: Value = serde_json::from_slice(&line).map_err(|error| TraceError::Syntax {
            file: file.to_owned(),
            line: number,
            reason: error.to_string(),
        })?;
        let request = request(parser, file, number, &value)?;
        parser.requests.push(request);
        next = lines.next_line()?;
    }
    Ok(())
}

pub(super) fn request(
    parser: &mut Parser,
    file: &str,
    line: usize,
    value: &Value,
) -> Result<TraceRequest, TraceError> {
    let object = TraceObject { file, line, prefix: "", value };
    if !value.is_object() {
        return Err(object.error("", "a JSON object", shown(value)));
    }
    let mut block_tokens = BLOCK_TOKENS;
    if object.optional("block_tokens").is_some() {
        block_tokens = object.integer("block_tokens", 1, BLOCK_TOKENS_MAX)?;
    }
    parser.check_block_tokens(file, block_tokens)?;
    let at = object.time("timestamp", parser.time_unit.per_second())?;
    let input_tokens = object.integer("input_length", 0, u32::MAX)?;
    let output_tokens = object.integer("output_length", 0, u32::MAX)?;
    let blocks = object.blocks(parser, false)?;
    let partial_tail =
        object.has_partial_tail("input_length", input_tokens, block_tokens, blocks.len())?;
    Ok(TraceRequest {
        at,
        blocks,
        input_tokens,
        output_tokens,
        partial_tail,
        session: None,
        stop: None,
    })
}
