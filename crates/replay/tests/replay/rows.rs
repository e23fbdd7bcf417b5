//! Rows as users' files have them: each file ends in data, or in an error with file, line, field
//! and the form expected.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use cascade_replay::trace::{
    ReadOptions, SkipReason, Trace, TraceError, TraceFormat, TraceSource, parse,
};
use proptest::prelude::*;

fn read(text: &str) -> Result<Trace, TraceError> {
    let source = TraceSource { name: "FILE", bytes: text.as_bytes() };
    parse("trace", &[source], ReadOptions::default())
}

fn refusal(text: &str) -> String {
    read(text).unwrap_err().to_string()
}

fn mooncake(at: &str, ids: &str) -> String {
    let count = ids.matches(',').count() + 1;
    format!(
        "{{\"timestamp\": {at}, \"input_length\": {}, \"output_length\": 1, \"hash_ids\": \
         [{ids}]}}",
        count * 512
    )
}

fn burst(rows: &str) -> String {
    format!("Timestamp,Model,Request tokens,Response tokens\n{rows}")
}

fn cut_rows(trace: &Trace) -> u64 {
    trace.import.rows_skipped.get(&SkipReason::CutOff).copied().unwrap_or(0)
}

#[test]
fn ids_of_64_bits_are_exact_and_decimal_text_is_the_same_id() {
    let numbers = mooncake("0", "9007199254740992, 9007199254740993, 18446744073709551615");
    let texts = mooncake("1", r#""9007199254740992", "9007199254740993", "18446744073709551615""#);
    let trace = read(&format!("{numbers}\n{texts}\n")).unwrap();
    assert_eq!(trace.requests[0].blocks, [0, 1, 2]);
    assert_eq!(trace.requests[1].blocks, [0, 1, 2]);
    let above = refusal(&mooncake("0", "18446744073709551616"));
    assert!(
        above.starts_with(
            "FILE:1: field `hash_ids[0]`: expected an integer from 0 to 2^64 - 1, or 1 to 64 hex \
             digits, found"
        ),
        "{above}"
    );
    for wrong in ["-1", "1.5", "null", "\"1.5\"", "\"\"", "true"] {
        let text = refusal(&mooncake("0", wrong));
        assert!(text.contains(&format!("digits, found {wrong}")), "{text}");
    }
}

#[test]
fn decimal_text_is_local_to_its_file_as_an_integer_is() {
    let [one, other] = ["\"7\"", "\"07\""].map(|ids| mooncake("0", ids));
    let text = format!("{one}\n{other}\n");
    let sources = [("a", &text), ("b", &text)];
    let sources = sources.map(|(name, text)| TraceSource { name, bytes: text.as_bytes() });
    let trace = parse("both", &sources, ReadOptions::default()).unwrap();
    let blocks: Vec<_> = trace.requests.iter().map(|request| request.blocks[0]).collect();
    assert_eq!(blocks, [0, 1, 2, 1], "a leading zero makes it a key");
}

#[test]
fn times_that_are_missing_null_or_wrong_are_errors() {
    let line = mooncake("5", "1");
    for (wrong, found) in [
        (line.replace("\"timestamp\": 5, ", ""), "nothing"),
        (line.replacen('5', "null", 1), "nothing"),
        (line.replacen('5', "\"noon\"", 1), "\"noon\""),
        (line.replacen('5', "-0.5", 1), "-0.5"),
    ] {
        let text = refusal(&format!("{line}\n{wrong}\n"));
        let expected = "FILE:2: field `timestamp`: expected a time that is not negative, found ";
        assert_eq!(text, format!("{expected}{found}"));
    }
    let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,1\n";
    for (row, found) in
        [(",1,1", "nothing"), ("17,1,1", "17"), ("2023-11-16,1,1", "\"2023-11-16\"")]
    {
        let expected = "FILE:3: field `TIMESTAMP`: expected a date and time such as 2023-11-16 \
                        18:15:46.68, found ";
        assert_eq!(refusal(&format!("{azure}{row}\n")), format!("{expected}{found}"));
    }
}

#[test]
fn decreasing_times_are_sorted_and_counted() {
    let lines = ["9", "3", "3", "12", "4"].map(|at| mooncake(at, at) + "\n").concat();
    let trace = read(&lines).unwrap();
    let at: Vec<_> = trace.requests.iter().map(|it| it.at.as_millis()).collect();
    assert_eq!(at, [3, 3, 4, 9, 12]);
    assert_eq!(trace.import.rows_out_of_order, 2);
    let sorted = read(&burst("1,m,1,1\n1,m,1,1\n2,m,1,1\n")).unwrap();
    assert_eq!(sorted.import.rows_out_of_order, 0);
}

#[test]
fn an_array_is_read_as_lines_are() {
    let rows = ["1", "2", "\"a]b\""].map(|id| mooncake("0", id).replace("a]b", "ab"));
    let lines = rows.join("\n");
    let expected = read(&lines).unwrap();
    let with_text = rows.map(|row| row.replace('{', "{\"note\": \"],\\\"}{[\", "));
    for array in [
        format!("[{}]", with_text.join(",")),
        format!("\u{feff}\r\n [\n  {}\r\n ]\r\n", with_text.join(" ,\r\n\r\n  ")),
        format!("[{}]", with_text.join(",").replace("\": ", "\":\n")),
    ] {
        assert_eq!(read(&array).unwrap(), expected, "{array}");
    }
}

#[test]
fn a_damaged_array_is_an_error_with_its_line() {
    let [one, two] = ["1", "2"].map(|id| mooncake("0", id));
    let wrong = two.replace("\"output_length\": 1", "\"output_length\": -1");
    let text = refusal(&format!("[\n{one},\n\n{wrong}\n]"));
    assert!(text.starts_with("FILE:4: field `output_length`: expected an integer"), "{text}");
    let text = refusal(&format!("[\n{one},\n{},\n{one}]", two.replace("1,", "1\n x,")));
    assert!(text.starts_with("FILE:4: not JSON ("), "{text}");
    for (array, line) in [
        (format!("[{one},,{two}]"), 1),
        (format!("[{one},\n]"), 2),
        (format!("[{one}]\n\n{two}"), 3),
        (format!("[{one}\n{two}]"), 2),
        ("[".to_owned(), 1),
    ] {
        let text = refusal(&array);
        assert!(text.starts_with(&format!("FILE:{line}: not JSON (")), "{array}: {text}");
    }
    assert_eq!(refusal("[ ]\n"), "FILE has no requests");
    let text = refusal("[[1], 2]");
    assert!(text.contains("expected a JSON object, found [1]"), "{text}");
}

#[test]
fn a_cut_last_row_after_complete_ones_is_skipped_and_counted() {
    let [one, two] = ["1", "2"].map(|id| mooncake("0", id));
    let cut = &two[..two.len() - 4];
    let csv = burst("1,m,100,2\n2,m,1");
    let quoted = "timestamp,input_length,output_length,hash_ids\n0,512,1,\"[1]\"\n1,1024,1,\"[1, ";
    for text in [
        format!("{one}\n{cut}"),
        format!("[{one}, {cut}"),
        format!("[{one},\n"),
        csv,
        quoted.to_owned(),
    ] {
        let trace = read(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!((trace.requests.len(), trace.import.rows_read), (1, 1), "{text}");
        assert_eq!(cut_rows(&trace), 1, "{text}");
        assert_eq!(trace.unique_blocks, trace.block_count(), "{text}");
    }
    // Nothing is missing but the last line break, or the end of the array.
    for text in [format!("{one}\n{two}"), format!("[{one}, {two}"), burst("1,m,1,2\n2,m,1,2")] {
        let trace = read(&text).unwrap();
        assert_eq!((trace.requests.len(), cut_rows(&trace)), (2, 0), "{text}");
    }
}

#[test]
fn a_cut_row_elsewhere_is_an_error() {
    let [one, two] = ["1", "2"].map(|id| mooncake("0", id));
    let cut = &two[..two.len() - 4];
    for (text, line) in [
        (cut.to_owned(), 1),
        (format!("{one}\n{cut}\n{one}\n"), 2),
        (format!("{cut}\n{one}\n"), 1),
        (format!("{one}\n{cut}\n"), 2),
        (format!("[{cut}"), 1),
        (format!("{one}\n{two} {two}"), 2),
        (format!("{one}\nnot JSON"), 2),
    ] {
        let error = refusal(&text);
        let is_named = error.starts_with(&format!("FILE:{line}: not JSON ("));
        assert!(is_named || text.starts_with(cut) && error.contains("not JSON"), "{text}: {error}");
    }
    let short = refusal(&burst("1,m,1,2\n2,m,1\n3,m,1,2\n"));
    assert_eq!(short, "FILE:3: not a row of CSV (3 cells for 4 columns)");
    let only = refusal(&burst("2,m,1"));
    assert_eq!(only, "FILE:2: not a row of CSV (3 cells for 4 columns)");
    let broken = refusal(&burst("1,\"a\r\nb\",1,2\r\n\r\n2,\"a\r\nb\",1\r\n3,m,1,2\r\n"));
    assert_eq!(broken, "FILE:5: not a row of CSV (3 cells for 4 columns)");
    let ended = refusal(&burst("1,m,1,2\n2,m,1\n"));
    assert_eq!(ended, "FILE:3: not a row of CSV (3 cells for 4 columns)");
}

#[test]
fn a_column_that_is_missing_is_named() {
    let text = refusal("Timestamp,Model,Request tokens,Total tokens\n5,m,1,2\n");
    assert_eq!(
        text,
        "FILE:1: field `Response tokens`: expected a column of this name, as burstgpt has it, \
         found the fields Timestamp, Model, Request tokens, Total tokens"
    );
    let blank_before = refusal("\n\nTIMESTAMP,ContextTokens\n5,1\n");
    assert!(blank_before.starts_with("FILE:3: field `GeneratedTokens`"), "{blank_before}");
}

#[test]
fn lengths_are_whole_numbers_in_any_notation() {
    let trace = read(&burst("0.5,m,1.0e5,2.0\n\n7e0,m,\"64\", 3 \n")).unwrap();
    let lengths: Vec<_> =
        trace.requests.iter().map(|it| (it.input_tokens, it.output_tokens)).collect();
    assert_eq!(lengths, [(100_000, 2), (64, 3)]);
    for (cell, found) in [("1.5", "1.5"), ("-1", "-1"), ("", "nothing"), ("many", "\"many\"")] {
        let text = refusal(&burst(&format!("1,m,1,2\n2,m,1,{cell}\n")));
        let expected = "FILE:3: field `Response tokens`: expected an integer from 0 to 4294967295, \
                        found ";
        assert_eq!(text, format!("{expected}{found}"));
    }
    let large = refusal(&burst("2,m,4000000000,1\n"));
    assert!(large.contains("`Request tokens`: expected an integer from 0 to 67108864"), "{large}");
}

/// Some bytes of CSV can stand for any number of blocks.
#[test]
fn made_blocks_are_bounded() {
    let text = refusal(&burst(&"1,m,67108864,1\n".repeat(65)));
    assert_eq!(
        text,
        "FILE: the number of its blocks of 64 tokens is 68157440; the limit is 67108864"
    );
}

#[test]
fn a_file_without_requests_is_an_error_that_says_why() {
    for empty in ["", "\n \r\n", "\u{feff}", "Timestamp,Request tokens,Response tokens\n"] {
        assert_eq!(refusal(empty), "FILE has no requests", "{empty:?}");
    }
    assert_eq!(
        refusal(&burst("1,m,1,0\n2,m,1,0\n")),
        "FILE has no requests: skipped rows: 2 zero response tokens (a failed request)"
    );
    let options = ReadOptions { format: Some(TraceFormat::ShareGpt), ..ReadOptions::default() };
    let source = TraceSource { name: "FILE", bytes: b"[{\"id\": \"a\"}]" };
    let error = parse("trace", &[source], options).unwrap_err().to_string();
    assert_eq!(error, "FILE has no requests: skipped rows: 1 without `conversations`");
}

#[test]
fn a_wrong_turn_of_a_conversation_is_named() {
    let text = refusal(
        "[{\"conversations\": [{\"from\": \"human\", \"value\": \"x\"}, {\"from\": \"gpt\"}]}]",
    );
    let expected = "FILE:1: field `conversations[1].value`: expected a string, found nothing";
    assert_eq!(text, expected);
    let text = refusal("[\n{\"conversations\": 7}]");
    assert_eq!(text, "FILE:2: field `conversations`: expected a list of turns, found 7");
    let text = refusal("[\n{\"conversations\": [null]}]");
    assert!(text.contains("field `conversations[0].`: expected a JSON object"), "{text}");
}

#[test]
fn text_that_is_not_utf_8_is_an_error_with_its_line() {
    let mut bytes = burst("1,m,1,2\n2,").into_bytes();
    bytes.extend(b"\xff,1,2\n");
    let source = TraceSource { name: "FILE", bytes: &bytes };
    let error = parse("trace", &[source], ReadOptions::default()).unwrap_err().to_string();
    assert!(error.starts_with("FILE:3: not a row of CSV ("), "{error}");
}

/// The start of a file in each format and framing.
fn bases() -> Vec<String> {
    let line = mooncake("1", "1, \"ff\", 18446744073709551615");
    let agents = "{\"block_size\": 64, \"requests\": [{\"t\": 1, \"in\": 64, \"out\": 1, \
                  \"hash_ids\": [1]}, {\"t\": 2, \"type\": \"subagent\", \"requests\": []}]}";
    let turn = "{\"from\": \"human\", \"value\": \"0123456789\"}, {\"from\": \"gpt\", \"value\": \
                \"x\"}";
    vec![
        format!("{line}\n{line}\n"),
        format!("[{line},\r\n {line}]\n"),
        line.replace("\"timestamp\"", "\"parent_chat_id\": -1, \"chat_id\": 3, \"timestamp\""),
        "hash_ids,timestamp,input_length,output_length\n\"[1, 2]\",5,1024,1\n".to_owned(),
        burst("1,m,1.0e2,2\n0,m,70,0\r\n9,\"m\n\",7,1"),
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-12 00:00:00.5+00:00,64,1\n".to_owned(),
        format!("{agents}\n{agents}\n"),
        format!("[{{\"conversations\": [{turn}, {turn}]}}, {{}}, {{\"conversations\": [{turn}]}}]"),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Files with wrong bytes are accepted or refused, and an accepted trace is consistent.
    #[test]
    fn wrong_bytes_never_panic_in_any_format(
        base in 0_usize..8,
        format in 0_usize..7,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        end in any::<prop::sample::Index>(),
        is_cut in any::<bool>(),
    ) {
        let mut bytes = bases().swap_remove(base).into_bytes();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if is_cut {
            bytes.truncate(end.index(bytes.len()));
        }
        let format = TraceFormat::ALL.get(format).copied();
        let options = ReadOptions { format, ..ReadOptions::default() };
        let source = TraceSource { name: "noise", bytes: &bytes };
        if let Ok(trace) = parse("noise", &[source, source], options) {
            prop_assert!(!trace.requests.is_empty());
            prop_assert!(trace.requests.is_sorted_by_key(|request| request.at));
            let mut blocks: Vec<u64> =
                trace.requests.iter().flat_map(|it| it.blocks.iter().copied()).collect();
            blocks.sort_unstable();
            blocks.dedup();
            prop_assert!(blocks.into_iter().eq(0..trace.unique_blocks));
            prop_assert!(trace.import.rows_read > 0);
        }
    }
}
