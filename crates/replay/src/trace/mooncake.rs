//! Mooncake's JSONL format: one request per line, blocks of 512 tokens.

use serde_json::Value;

use super::field::{TraceObject, shown};
use super::{BLOCK_TOKENS_MAX, Parser, TraceError, TraceRequest, TraceSource};

/// Tokens of a block, unless a line has `block_tokens`.
pub(super) const BLOCK_TOKENS: u32 = 512;

pub(super) fn parse(parser: &mut Parser, source: TraceSource<'_>) -> Result<(), TraceError> {
    let before = parser.requests.len();
    for (index, line) in source.bytes.split(|byte| *byte == b'\n').enumerate() {
        if line.trim_ascii().is_empty() {
            continue;
        }
        let (file, line_number) = (source.name, index + 1);
        let value: Value = serde_json::from_slice(line).map_err(|error| TraceError::Syntax {
            file: file.to_owned(),
            line: line_number,
            reason: error.to_string(),
        })?;
        let request = request(parser, file, line_number, &value)?;
        parser.requests.push(request);
    }
    if parser.requests.len() == before {
        return Err(TraceError::Empty { file: source.name.to_owned() });
    }
    Ok(())
}

fn request(
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
    let at = object.time("timestamp", 1000.0)?;
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
