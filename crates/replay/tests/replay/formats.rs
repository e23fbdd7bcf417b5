//! Each published format is recognised by its content and read as it is meant.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::path::Path;
use std::time::Duration;

use cascade_replay::trace::{
    ReadOptions, SkipReason, TimeUnit, Trace, TraceError, TraceFormat, TraceSource, parse,
};

fn read_with(text: &str, options: ReadOptions) -> Result<Trace, TraceError> {
    parse("trace", &[TraceSource { name: "FILE", bytes: text.as_bytes() }], options)
}

fn read(text: &str) -> Trace {
    read_with(text, ReadOptions::default()).unwrap()
}

fn as_format(text: &str, format: TraceFormat) -> Result<Trace, TraceError> {
    read_with(text, ReadOptions { format: Some(format), ..ReadOptions::default() })
}

fn seconds(trace: &Trace) -> Vec<f64> {
    trace.requests.iter().map(|request| request.at.as_secs_f64()).collect()
}

fn skipped(trace: &Trace) -> Vec<(SkipReason, u64)> {
    trace.import.rows_skipped.iter().map(|(reason, count)| (*reason, *count)).collect()
}

/// No block is in two requests, and each number is used.
fn assert_nothing_is_shared(trace: &Trace) {
    assert_eq!(trace.block_count(), trace.unique_blocks);
}

#[test]
fn a_sample_of_azure_is_read_with_its_dates() {
    let sample = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/traces/azure-conv.csv");
    let trace = Trace::read(&sample).unwrap();
    assert_eq!(trace.import.formats, [TraceFormat::Azure]);
    assert_eq!((trace.import.rows_read, trace.requests.len()), (36, 36));
    assert_eq!(skipped(&trace), []);
    assert_eq!(trace.import.times.unwrap().name(), "dates");
    assert_eq!(trace.requests[0].at, Duration::ZERO);
    // 18:15:46.68059 and 18:15:50.995169.
    assert_eq!(trace.requests[1].at, Duration::from_micros(4_314_579));
    let first = &trace.requests[0];
    assert_eq!((first.input_tokens, first.output_tokens), (374, 44));
    assert_eq!((first.blocks.len(), first.partial_tail), (6, true));
    assert_eq!(trace.requests[35].output_tokens, 183);
    assert_nothing_is_shared(&trace);
    assert!(trace.import.sharing().contains("names no blocks: no request shares any"));
}

#[test]
fn azure_of_2024_has_zones() {
    let trace = read(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-12 00:00:00.5+00:00,64,0\n\
         2024-05-12 02:00:01.5+02:00,0,7\n",
    );
    assert_eq!(seconds(&trace), [0.0, 1.0]);
    assert_eq!(trace.requests[0].blocks.len(), 1);
    assert!(trace.requests[1].blocks.is_empty());
}

const BURST: &str = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n\
    5,ChatGPT,472,18,490,Conversation log\n45.0,ChatGPT,1.0e3,230,1317,API log\n\
    118,GPT-4,417,0,417,Conversation log\n";

#[test]
fn burstgpt_has_seconds_and_failed_requests_are_skipped() {
    let trace = read(BURST);
    assert_eq!(trace.import.formats, [TraceFormat::BurstGpt]);
    assert_eq!(seconds(&trace), [0.0, 40.0]);
    assert_eq!(trace.requests[1].input_tokens, 1000);
    assert_eq!(trace.import.rows_read, 2);
    assert_eq!(skipped(&trace), [(SkipReason::NoResponse, 1)]);
    assert_eq!(trace.import.times.unwrap().text(), "times in seconds (by the format)");
    assert_nothing_is_shared(&trace);
    let options = ReadOptions { time_unit: Some(TimeUnit::Microseconds), ..Default::default() };
    let fast = read_with(BURST, options).unwrap();
    assert_eq!(fast.requests[1].at, Duration::from_micros(40));
    assert_eq!(fast.import.times.unwrap().text(), "times in microseconds (--time-unit)");
}

#[test]
fn burstgpt_may_have_other_columns_in_another_order() {
    let text = "Session ID,response_tokens,Elapsed time,REQUEST TOKENS,Timestamp\n\
        1722ac82-0a46-4bf0,446,43,906,19440110.0\nd5983bf9,29,2,36,19440161.0\n\
        1722ac82-0a46-4bf0,5,1,1500,19440200.0\n,3,1,70,19440201.0\n";
    let trace = read(text);
    assert_eq!(trace.import.formats, [TraceFormat::BurstGpt]);
    assert_eq!(seconds(&trace), [0.0, 51.0, 90.0, 91.0]);
    let sessions: Vec<_> = trace.requests.iter().map(|request| request.session).collect();
    assert_eq!(sessions, [Some(0), Some(1), Some(0), None]);
    let lengths: Vec<_> =
        trace.requests.iter().map(|it| (it.input_tokens, it.output_tokens)).collect();
    assert_eq!(lengths, [(906, 446), (36, 29), (1500, 5), (70, 3)]);
    assert_nothing_is_shared(&trace);
}

#[test]
fn qwen_has_blocks_of_16_tokens_seconds_and_chats() {
    let line = |chat: i32, parent: i32, at: &str, tokens: u32, ids: &str| {
        format!(
            "{{\"chat_id\": {chat}, \"parent_chat_id\": {parent}, \"timestamp\": {at}, \
             \"input_length\": {tokens}, \"output_length\": 3, \"type\": \"text\", \"turn\": 1, \
             \"hash_ids\": [{ids}]}}\n"
        )
    };
    let text = [
        line(159, -1, "61.114", 40, "1089, 1090, 1091"),
        line(160, -1, "61.5", 16, "1089"),
        line(161, 159, "62.25", 48, "1089, 1090, 7"),
        line(162, 161, "63", 16, "1089"),
        line(163, 99, "64", 16, "9"),
    ]
    .concat();
    let trace = read(&text);
    assert_eq!(trace.import.formats, [TraceFormat::QwenBailian]);
    assert_eq!(trace.block_tokens, 16);
    assert_eq!(seconds(&trace), [61.114, 61.5, 62.25, 63.0, 64.0]);
    assert_eq!(trace.requests[0].blocks, [0, 1, 2]);
    assert!(trace.requests[0].partial_tail && !trace.requests[2].partial_tail);
    assert_eq!(trace.requests[2].blocks, [0, 1, 3]);
    let sessions: Vec<_> = trace.requests.iter().map(|it| it.session.unwrap()).collect();
    assert_eq!(sessions, [0, 1, 0, 0, 2]);
    assert_eq!(trace.time_note(), None, "its unit is known");
}

fn session(id: &str, scope: &str, ids: &str) -> String {
    format!(
        "{{\"id\": \"{id}\", \"block_size\": 64, \"hash_id_scope\": \"{scope}\", \"requests\": \
         [{{\"t\": 0.5, \"in\": 128, \"out\": 1, \"hash_ids\": {ids}}}]}}\n"
    )
}

#[test]
fn local_ids_count_within_their_session_whatever_their_form() {
    let sessions = |scope: &str| {
        let one = |id: &str, ids: &str| session(id, scope, ids);
        [one("a", "[1, \"ff\"]"), one("b", "[\"1\", \"ff\"]")].concat()
    };
    let local = read(&sessions("local"));
    assert_eq!(local.import.formats, [TraceFormat::Agents]);
    assert_eq!((local.block_tokens, local.unique_blocks), (64, 4));
    assert_eq!(local.import.rows_read, 2);
    let global = read(&sessions("global"));
    assert_eq!(global.unique_blocks, 2);
    let array = format!("[{}]", sessions("local").trim().replace('\n', ",\n"));
    assert_eq!(read(&array), local);
}

fn conversation(turns: &[(&str, usize)]) -> String {
    let turn = |(from, length): &(&str, usize)| {
        format!("{{\"from\": \"{from}\", \"value\": \"{}\"}}", "é".repeat(*length))
    };
    let turns = turns.iter().map(turn).collect::<Vec<_>>().join(",");
    format!("{{\"id\": \"x\", \"conversations\": [{turns}]}}")
}

#[test]
fn turns_of_a_conversation_share_their_prefix_and_conversations_nothing() {
    let turns = [("system", 4), ("human", 252), ("gpt", 256), ("human", 300), ("gpt", 3)];
    let text = format!(
        "[{}, {{\"id\": \"none\"}},\n {}, {}]",
        conversation(&turns),
        conversation(&turns),
        conversation(&[("human", 9)]),
    );
    let trace = read(&text);
    assert_eq!(trace.import.formats, [TraceFormat::ShareGpt]);
    let lengths: Vec<_> =
        trace.requests.iter().map(|it| (it.input_tokens, it.output_tokens)).collect();
    // (4 + 252) / 4, then those, 256 / 4 and 300 / 4.
    assert_eq!(lengths, [(64, 64), (203, 1), (64, 64), (203, 1)]);
    assert_eq!(trace.requests[0].blocks, [0]);
    assert_eq!(trace.requests[1].blocks, [0, 1, 2, 3]);
    assert_eq!(trace.requests[2].blocks, [4]);
    assert!(trace.requests[1].partial_tail);
    assert_eq!(trace.requests[1].session, Some(0));
    assert_eq!(trace.requests[2].session, Some(1));
    assert_eq!(trace.import.rows_read, 2);
    assert_eq!(skipped(&trace), [(SkipReason::NoConversations, 1), (SkipReason::NoTurns, 1)]);
    assert_eq!(seconds(&trace), [0.0; 4]);
    assert_eq!(trace.import.times.unwrap().name(), "none");
}

/// A block that was not full becomes another block when the conversation goes on.
#[test]
fn a_partial_block_of_a_conversation_is_in_one_request() {
    let trace = read(&conversation(&[("human", 40), ("gpt", 40), ("human", 400), ("gpt", 40)]));
    assert_eq!(trace.requests[0].blocks, [0]);
    assert_eq!(trace.requests[1].blocks, [1, 2]);
}

#[test]
fn conversations_may_come_line_by_line_and_be_limited() {
    let one = conversation(&[("human", 40), ("gpt", 40)]);
    let text = format!("{one}\n{one}\n{one}\nnot JSON");
    let options = ReadOptions { rows_max: Some(2), ..ReadOptions::default() };
    let trace = read_with(&text, options).unwrap();
    assert_eq!((trace.import.rows_read, trace.requests.len()), (2, 2));
}

#[test]
fn a_file_of_another_format_than_the_given_one_is_refused() {
    let json = as_format(BURST, TraceFormat::ShareGpt).unwrap_err().to_string();
    assert!(json.contains("FILE is CSV") && json.contains("sharegpt is JSON"), "{json}");
    let azure = as_format(BURST, TraceFormat::Azure).unwrap_err().to_string();
    assert!(azure.starts_with("FILE:1: field `ContextTokens`: expected a column"), "{azure}");
    let line = session("a", "local", "[1, 2]");
    let qwen = as_format(&line, TraceFormat::QwenBailian).unwrap_err().to_string();
    assert!(qwen.starts_with("FILE:1: field `timestamp`: expected a time"), "{qwen}");
    assert!(as_format(BURST, TraceFormat::BurstGpt).is_ok());
    let unknown = read_with("{\"prompt\": 1}\n", ReadOptions::default()).unwrap_err().to_string();
    assert!(unknown.starts_with("FILE is JSON with the fields prompt; expected"), "{unknown}");
    assert!(unknown.contains("conversations (sharegpt)"), "{unknown}");
}

#[test]
fn formats_with_other_blocks_do_not_mix() {
    let sources = [("a.csv", BURST.to_owned()), ("b", session("a", "local", "[1, 2]"))];
    let sources =
        sources.each_ref().map(|(name, text)| TraceSource { name, bytes: text.as_bytes() });
    let both = parse("both", &sources, ReadOptions::default()).unwrap();
    assert_eq!(both.import.format_names(), "burstgpt, agents");
    let mooncake =
        "{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": []}";
    let mooncake = TraceSource { name: "c", bytes: mooncake.as_bytes() };
    let error = parse("all", &[sources[0], mooncake], ReadOptions::default()).unwrap_err();
    assert!(error.to_string().contains("c has blocks of 512 tokens"), "{error}");
}
