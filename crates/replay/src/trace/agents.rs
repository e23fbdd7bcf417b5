//! Sessions of coding agents: a JSON object for each, requests in order, sub-agents nested.
//!
//! `t` is in seconds from the start of the session; inside a sub-agent, from the start of the
//! sub-agent. Block ids of a sub-agent are those of its session. A sub-agent counts as a separate
//! session, because its context ends with it.

use std::time::Duration;

use cascade_store::eviction::StopReason;

use super::field::{IdScope, TraceObject, shown};
use super::parser::{Parser, RowOutcome};
use super::{BLOCK_TOKENS_MAX, SESSION_STARTS_WITHIN, TraceError, TraceFormat, TraceRequest};

/// Limit of the nesting of sub-agents.
const DEPTH_MAX: u32 = 8;

/// The properties that all requests of a session share.
#[derive(Debug, Clone, Copy)]
struct SessionScope {
    block_tokens: u32,
    ids: IdScope,
}

pub(super) fn row(
    parser: &mut Parser,
    _format: TraceFormat,
    object: TraceObject<'_>,
) -> Result<RowOutcome, TraceError> {
    let block_tokens = object.integer("block_size", 1, BLOCK_TOKENS_MAX)?;
    parser.check_block_tokens(object.file, block_tokens)?;
    let ids = match object.text("hash_id_scope", "local")? {
        "local" => IdScope::Session,
        "global" => IdScope::Everywhere,
        other => {
            let expected = "\"local\" or \"global\"";
            return Err(object.error("hash_id_scope", expected, format!("{other:?}")));
        }
    };
    parser.begin_scope();
    let begin = parser.requests.len();
    requests(parser, SessionScope { block_tokens, ids }, object, Duration::ZERO, 0)?;
    let name = object.text("id", object.file)?;
    parser.relative_times.push((begin..parser.requests.len(), session_start(name)));
    Ok(RowOutcome::Read)
}

fn requests(
    parser: &mut Parser,
    scope: SessionScope,
    parent: TraceObject<'_>,
    begin: Duration,
    depth: u32,
) -> Result<(), TraceError> {
    let number = parser.new_session();
    for (index, value) in parent.list("requests", "a list of requests")?.iter().enumerate() {
        let prefix = format!("{}requests[{index}].", parent.prefix);
        let object = TraceObject { prefix: &prefix, value, ..parent };
        if !value.is_object() {
            return Err(object.error("", "a JSON object", shown(value)));
        }
        let at = begin + object.time("t", 1.0)?;
        if object.text("type", "")? != "subagent" {
            let request = request(parser, scope, object, at, number)?;
            parser.requests.push(request);
        } else if depth < DEPTH_MAX {
            requests(parser, scope, object, at, depth + 1)?;
        } else {
            let expected = format!("at most {DEPTH_MAX} levels of sub-agents");
            return Err(object.error("type", &expected, "one more".to_owned()));
        }
    }
    Ok(())
}

fn request(
    parser: &mut Parser,
    scope: SessionScope,
    object: TraceObject<'_>,
    at: Duration,
    number: u32,
) -> Result<TraceRequest, TraceError> {
    let input_tokens = object.integer("in", 0, u32::MAX)?;
    let output_tokens = object.integer("out", 0, u32::MAX)?;
    let blocks = object.blocks(parser, scope.ids)?;
    let tokens = scope.block_tokens;
    let partial_tail = object.has_partial_tail("in", input_tokens, tokens, blocks.len())?;
    let stop = match object.text("stop", "")? {
        "tool_use" => Some(StopReason::ToolUse),
        "end_turn" | "stop_sequence" => Some(StopReason::EndTurn),
        "max_tokens" => Some(StopReason::Length),
        // The format does not list all reasons, so an unknown one counts as not stated.
        _ => None,
    };
    let session = Some(number);
    Ok(TraceRequest { at, blocks, input_tokens, output_tokens, partial_tail, session, stop })
}

/// A time below [`SESSION_STARTS_WITHIN`] that depends only on the name (FNV-1a, then mixed).
fn session_start(name: &str) -> Duration {
    let fnv = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let mixed = (fnv ^ (fnv >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    let mixed = mixed ^ (mixed >> 32);
    let within_ms = u64::try_from(SESSION_STARTS_WITHIN.as_millis()).unwrap_or(u64::MAX);
    Duration::from_millis(mixed % within_ms)
}
