//! Fuzzes the trace parser: it returns an error or a valid trace and never panics.
//!
//! Half of the inputs are one source, the others several sources that are merged.
#![no_main]

use cascade_replay::trace::{REQUEST_BLOCKS_MAX, TraceSource, parse};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (bool, &[u8])| {
    let (is_split, bytes) = input;
    let parts: Vec<&[u8]> =
        if is_split { bytes.split(|byte| *byte == 0).take(4).collect() } else { vec![bytes] };
    let names = ["a.jsonl", "b.json", "c.jsonl", "d.json"];
    let sources: Vec<_> =
        parts.iter().zip(names).map(|(bytes, name)| TraceSource { name, bytes }).collect();
    let Ok(trace) = parse("fuzz", &sources) else { return };
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
        parse("fuzz", &sources).expect("parsing succeeds again"),
        trace,
        "parsing is deterministic"
    );
});
