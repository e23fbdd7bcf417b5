//! Rows of Azure and BurstGPT: an arrival and two lengths. Each request has blocks of its own,
//! because nothing says that it shares any.

use super::field::TraceObject;
use super::parser::{Parser, RowOutcome};
use super::{SkipReason, TraceError, TraceFormat, TraceRequest};

pub(super) fn row(
    parser: &mut Parser,
    format: TraceFormat,
    object: TraceObject<'_>,
) -> Result<RowOutcome, TraceError> {
    let block_tokens = format.block_tokens();
    parser.check_block_tokens(object.file, block_tokens)?;
    let (at, input, output) = if format == TraceFormat::Azure {
        (object.date("TIMESTAMP")?, "ContextTokens", "GeneratedTokens")
    } else {
        let at = object.time("Timestamp", parser.per_second())?;
        (at, "Request tokens", "Response tokens")
    };
    let input_tokens = object.made_block_tokens(input, block_tokens)?;
    let output_tokens = object.integer(output, 0, u32::MAX)?;
    let has_failed = format == TraceFormat::BurstGpt && output_tokens == 0;
    if has_failed && !parser.options.keeps_failed {
        return Ok(RowOutcome::Skipped(SkipReason::NoResponse));
    }
    let session = object.optional("Session ID").map(ToString::to_string);
    let session = session.map(|name| parser.named_session(name));
    let count = input_tokens.div_ceil(block_tokens);
    parser.count_made_blocks(object.file, u64::from(count))?;
    let blocks = (0..count).map(|_| parser.new_block()).collect();
    parser.push(TraceRequest {
        at,
        blocks,
        input_tokens,
        output_tokens,
        partial_tail: !input_tokens.is_multiple_of(block_tokens),
        session,
        stop: None,
    });
    Ok(RowOutcome::Read)
}
