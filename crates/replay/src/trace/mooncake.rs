//! Rows of Mooncake's format, which connectors record, and of Qwen's: times, lengths and ids.

use super::field::{IdScope, TraceObject};
use super::parser::{Parser, RowOutcome};
use super::{BLOCK_TOKENS_MAX, TraceError, TraceFormat, TraceRequest};

pub(super) fn row(
    parser: &mut Parser,
    format: TraceFormat,
    object: TraceObject<'_>,
) -> Result<RowOutcome, TraceError> {
    let mut block_tokens = format.block_tokens();
    if object.optional("block_tokens").is_some() {
        block_tokens = object.integer("block_tokens", 1, BLOCK_TOKENS_MAX)?;
    }
    parser.check_block_tokens(object.file, block_tokens)?;
    let at = object.time("timestamp", parser.per_second())?;
    let input_tokens = object.integer("input_length", 0, u32::MAX)?;
    let output_tokens = object.integer("output_length", 0, u32::MAX)?;
    let blocks = object.blocks(parser, IdScope::Source)?;
    let partial_tail =
        object.has_partial_tail("input_length", input_tokens, block_tokens, blocks.len())?;
    let session = match format {
        TraceFormat::QwenBailian => session(parser, object),
        _ => None,
    };
    parser.push(TraceRequest {
        at,
        blocks,
        input_tokens,
        output_tokens,
        partial_tail,
        session,
        stop: None,
    });
    Ok(RowOutcome::Read)
}

/// The session of a chat: that of its parent, or a new one if it is a root or the parent is
/// unknown.
fn session(parser: &mut Parser, object: TraceObject<'_>) -> Option<u32> {
    let chat = object.optional("chat_id")?.to_string();
    let parent = object.optional("parent_chat_id").map(ToString::to_string);
    let known = parent.and_then(|parent| parser.known_session(&parent));
    let session = known.unwrap_or_else(|| parser.new_session());
    parser.name_session(chat, session);
    Some(session)
}
