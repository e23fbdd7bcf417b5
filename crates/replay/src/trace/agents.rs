//! Sessions of coding agents: one JSON object per file, requests in order, sub-agents nested.
//!
//! `t` is in seconds from the start of the session; inside a sub-agent, from the start of the
//! sub-agent. Block ids of a sub-agent are those of its session. A sub-agent counts as a separate
//! session, because its context ends with it.

use std::time::Duration;

use cascade_store::eviction::StopReason;
use serde_json::Value;

use super::field::{TraceObject, shown};
use super::{
    BLOCK_TOKENS_MAX, Parser, SESSION_STARTS_WITHIN, TraceError, TraceRequest, TraceSource,
};

/// Limit of the nesting of sub-agents.
const DEPTH_MAX: u32 = 8;

/// The properties that all requests of a session share.
#[derive(Debug, Clone, Copy)]
struct SessionScope {
    block_tokens: u32,
    is_global: bool,
}

pub(super) fn parse(
    parser: &mut Parser,
    source: TraceSource<'_>,
    session: &Value,
) -> Result<(), TraceError> {
    refuse_trailing_bytes(source)?;
    let object = TraceObject { file: source.name, line: 1, prefix: "", value: session };
    let block_tokens = object.integer("block_size", 1, BLOCK_TOKENS_MAX)?;
    parser.check_block_tokens(source.name, block_tokens)?;
    let is_global = match object.text("hash_id_scope", "local")? {
        "local" => false,
        "global" => true,
        other => {
            let expected = "\"local\" or \"global\"";
            return Err(object.error("hash_id_scope", expected, format!("{other:?}")));
        }
    };
    let begin = parser.requests.len();
    let file = source.name;
    requests(parser, SessionScope { block_tokens, is_global }, object, Duration::ZERO, 0)?;
    let name = object.text("id", file)?;
    parser.relative_times.push((begin..parser.requests.len(), session_start(name)));
    Ok(())
}

/// A file has one session. More bytes after it mean that files were concatenated.
fn refuse_trailing_bytes(source: TraceSource<'_>) -> Result<(), TraceError> {
    let whole: Result<serde::de::IgnoredAny, _> = serde_json::from_slice(source.bytes);
    whole.map(|_| ()).map_err(|error| TraceError::Syntax {
        file: source.name.to_owned(),
        line: error.line(),
        reason: error.to_string(),
    })
}

fn requests(
    parser: &mut Parser,
    scope: SessionScope,
    parent: TraceObject<'_>,
    begin: Duration,
    depth: u32,
) -> Result<(), TraceError> {
    let number = parser.sessions;
    parser.sessions += 1;
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
    let blocks = object.blocks(parser, scope.is_global)?;
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
