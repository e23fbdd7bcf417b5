//! Fuzzes the trace parser: it returns an error or a valid trace and never panics.
//!
//! Half of the inputs are one source, the others several sources that are merged. The content
//! decides the format, or a byte of the input does. A source may begin with the columns of a
//! format, which a fuzzer would seldom find.
#![no_main]

use cascade_replay::trace::{REQUEST_BLOCKS_MAX, ReadOptions, TraceFormat, TraceSource, parse};
use libfuzzer_sys::fuzz_target;

/// What the content may begin with.
const HEADS: [&str; 5] = [
    "",
    "timestamp,input_length,output_length,hash_ids\n",
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,",
    "Timestamp,Session ID,Request tokens,Response tokens\n",
    "[{\"conversations\": [{\"from\": \"human\", \"value\": \"",
];

fuzz_target!(|input: (bool, u8, &[u8])| {
    let (is_split, choice, rest) = input;
    let choice = usize::from(choice);
    let options = ReadOptions {
        // None of them for one value more than there are formats.
        format: TraceFormat::ALL.get(choice % (TraceFormat::ALL.len() + 1)).copied(),
        ..ReadOptions::default()
    };
    let head = HEADS[choice / (TraceFormat::ALL.len() + 1) % HEADS.len()];
    let bytes = [head.as_bytes(), rest].concat();
    let bytes = bytes.as_slice();
    let parts: Vec<&[u8]> =
        if is_split { bytes.split(|byte| *byte == 0).take(4).collect() } else { vec![bytes] };
    let names = ["a.jsonl", "b.json", "c.jsonl", "d.json"];
    let sources: Vec<_> =
        parts.iter().zip(names).map(|(bytes, name)| TraceSource { name, bytes }).collect();
    let Ok(trace) = parse("fuzz", &sources, options) else { return };
    assert!(!trace.requests.is_empty(), "a trace without requests is an error");
    assert!(trace.requests.is_sorted_by_key(|request| request.at));
    let mut seen = 0;
    for request in &trace.requests {
        assert!(request.blocks.len() <= REQUEST_BLOCKS_MAX);
        for &block in &request.blocks {
            assert!(block < trace.unique_blocks, "block {block}");
            seen += 1;
        }
    }
    assert!(trace.unique_blocks <= seen, "every block is in a request");
    assert_eq!(
        parse("fuzz", &sources, options).expect("parsing succeeds again"),
        trace,
        "parsing is deterministic"
    );
});
