//! Published traces are parsed completely, and damage is an error with its position.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use cascade_replay::trace::{ReadOptions, Trace, TraceError, TraceSource, parse};
use cascade_store::eviction::StopReason;
use proptest::prelude::*;

fn bundled(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/traces").join(name)
}

fn one(text: &str) -> Result<Trace, TraceError> {
    let source = TraceSource { name: "test.jsonl", bytes: text.as_bytes() };
    parse("test", &[source], ReadOptions::default())
}

fn error_of(text: &str) -> String {
    one(text).unwrap_err().to_string()
}

const LINE: &str =
    r#"{"timestamp": 27, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}"#;

#[test]
fn the_conversation_trace_has_the_published_counts() {
    let trace = Trace::read(&bundled("mooncake/conversation_trace.jsonl")).unwrap();
    assert_eq!(trace.requests.len(), 12_031);
    assert_eq!(trace.block_count(), 288_500);
    assert_eq!(trace.unique_blocks, 182_790);
    assert_eq!(trace.block_tokens, 512);
    let partial = trace.requests.iter().filter(|request| request.partial_tail).count();
    assert_eq!(partial, 12_009);
}

#[test]
fn every_agent_session_and_sub_agent_is_one_session() {
    let trace = Trace::read(&bundled("agents")).unwrap();
    assert_eq!(trace.block_tokens, 64);
    assert_eq!(trace.requests.len(), 533);
    assert!(trace.requests.is_sorted_by_key(|request| request.at));
    let sessions: std::collections::BTreeSet<_> =
        trace.requests.iter().map(|request| request.session.unwrap()).collect();
    assert_eq!(sessions.len(), 12 + 2);
    assert!(trace.requests.iter().all(|request| !request.partial_tail));
}

#[test]
fn times_of_a_sub_agent_count_from_its_start_in_the_session() {
    let text = r#"{"id": "a", "block_size": 2, "hash_id_scope": "local", "requests": [
        {"t": 1.5, "type": "n", "in": 4, "out": 1, "hash_ids": [1, 2], "stop": "tool_use"},
        {"t": 10, "type": "subagent", "requests": [
            {"t": 0.25, "type": "n", "in": 5, "out": 1, "hash_ids": [1, 3], "stop": "end_turn"}]}
    ]}"#;
    let trace = one(text).unwrap();
    assert_eq!(trace.requests[0].at, Duration::from_millis(1500));
    assert_eq!(trace.requests[1].at, Duration::from_millis(10_250));
    assert_eq!(trace.requests[1].blocks, [0, 2]);
    assert_eq!(trace.requests[0].stop, Some(StopReason::ToolUse));
    assert_ne!(trace.requests[0].session, trace.requests[1].session);
}

#[test]
fn a_session_keeps_its_start_when_others_are_added() {
    let session = |id: &str| {
        format!(
            r#"{{"id": "{id}", "block_size": 2,
                "requests": [{{"t": 0, "in": 2, "out": 1, "hash_ids": [1]}}]}}"#
        )
    };
    let texts = ["a", "b", "c"].map(session);
    let sources: Vec<_> =
        texts.iter().map(|text| TraceSource { name: "s", bytes: text.as_bytes() }).collect();
    let two = parse("two", &sources[..2], ReadOptions::default()).unwrap();
    let three = parse("three", &sources, ReadOptions::default()).unwrap();
    let at = |trace: &Trace, block| {
        trace.requests.iter().find(|request| request.blocks == [block]).unwrap().at
    };
    assert_eq!((at(&two, 0), at(&two, 1)), (at(&three, 0), at(&three, 1)));
    assert_eq!(one(&texts[0]).unwrap().requests[0].at, Duration::ZERO);
}

#[test]
fn hexadecimal_ids_are_global_and_integer_ids_are_local_to_a_file() {
    let hex = r#"{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": ["00fF"]}"#;
    let integer = r#"{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [255]}"#;
    let upper = hex.replace("fF", "FF");
    let sources = [hex, integer, integer, hex, &upper]
        .map(|text| TraceSource { name: "x", bytes: text.as_bytes() });
    let trace = parse("x", &sources, ReadOptions::default()).unwrap();
    let blocks: Vec<_> = trace.requests.iter().map(|request| request.blocks[0]).collect();
    assert_eq!(blocks, [0, 1, 2, 0, 0]);
}

/// The format of connectors: absolute times, hexadecimal keys, a block size in each line.
#[test]
fn absolute_times_count_from_the_first_request() {
    let line = |ms: u64, ids: &str, tokens: u32| {
        format!(
            "{{\"timestamp\": {ms}, \"input_length\": {tokens}, \"output_length\": 2, \
             \"hash_ids\": [{ids}], \"block_tokens\": 128}}\n"
        )
    };
    let (first, second) = ("\"00112233445566778899aabbccddeeff\"", "\"ff\"");
    let both = format!("{first}, {second}");
    let older = line(1_790_000_001_500, first, 130) + &line(1_790_000_001_000, &both, 256);
    let newer = line(1_790_000_003_000, second, 128);
    let trace = parse(
        "recorded",
        &[older.as_str(), newer.as_str()]
            .map(|text| TraceSource { name: "recorded", bytes: text.as_bytes() }),
        ReadOptions::default(),
    )
    .unwrap();
    let at: Vec<_> = trace.requests.iter().map(|request| request.at.as_millis()).collect();
    assert_eq!(at, [0, 500, 2000]);
    assert_eq!((trace.block_tokens, trace.unique_blocks), (128, 2));
    let relative = one(&LINE.replace("27", "900000000000")).unwrap();
    assert_eq!(relative.requests[0].at, Duration::from_secs(900_000_000));
}

#[test]
fn an_error_names_file_line_and_field() {
    let after = |damaged: &str| error_of(&format!("{LINE}\n{damaged}\n"));
    assert!(after(&LINE[..40]).starts_with("test.jsonl:2: not JSON"));
    let missing = after(&LINE.replace("output_length", "output"));
    assert!(
        missing.contains("test.jsonl:2: field `output_length`: expected an integer"),
        "{missing}"
    );
    let negative = after(&LINE.replace("27", "-1"));
    assert!(negative.contains("`timestamp`: expected a time that is not negative, found -1"));
    let text = after(&LINE.replace("8,", "\"x\","));
    assert!(text.contains("`hash_ids[1]`"), "{text}");
    let short = after(&LINE.replace(", 9]", "]").replace("1100", "2000"));
    assert!(short.contains("3 block ids or one more for input_length = 2000"), "{short}");
    assert!(after("[]").contains("expected a JSON object, found []"));
    assert!(error_of("\n \n").contains("has no requests"));
    let concatenated = format!("{{\"block_size\": 2, \"requests\": []}}{LINE}");
    assert!(error_of(&concatenated).contains("not JSON (trailing characters"));
    let nested = r#"{"block_size": 2, "requests": [
        {"t": 0, "type": "subagent", "requests": [{"t": 0, "in": -3}]}]}"#;
    assert!(error_of(nested).contains("`requests[0].requests[0].in`"), "{}", error_of(nested));
}

#[test]
fn a_directory_without_traces_is_an_error() {
    let error = Trace::read(&bundled("..").join("../docs")).unwrap_err();
    assert!(error.to_string().contains("has no requests"), "{error}");
    assert!(matches!(Trace::read(&bundled("missing.jsonl")), Err(TraceError::Read { .. })));
}

proptest! {
    /// The parser accepts or refuses any bytes, and an accepted trace is consistent.
    #[test]
    fn random_bytes_never_panic(
        prefix in "[\\PC\n]{0,60}",
        at in 0_usize..90,
        byte in any::<u8>(),
    ) {
        let mut bytes = format!("{LINE}\n{prefix}").into_bytes();
        let at = at.min(bytes.len() - 1);
        bytes[at] = byte;
        let source = TraceSource { name: "noise", bytes: &bytes };
        if let Ok(trace) = parse("noise", &[source], ReadOptions::default()) {
            for request in &trace.requests {
                prop_assert!(request.blocks.iter().all(|block| *block < trace.unique_blocks));
                prop_assert!(request.blocks.len() * 512 < request.input_tokens as usize + 512);
            }
        }
    }
}
