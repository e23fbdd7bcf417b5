//! What is asked wrongly is refused with what, where, and what to do.

use crate::{conversation_trace, run, stderr};

/// Runs a command line that cannot work; its message.
fn refused(args: &[&str]) -> String {
    let output = run(args);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
    said
}

fn refused_replay(options: &[&str]) -> String {
    let directory = tempfile::TempDir::new().unwrap();
    let trace = conversation_trace(directory.path()).display().to_string();
    refused(&[&["replay", &trace, "--limit", "5"], options].concat())
}

#[test]
fn bad_options_say_what_would_be_right() {
    for (options, hint) in [
        (&["--dram", "lots"][..], "512MiB"),
        (&["--dram", "0"], "at least one byte"),
        (&["--policy", "clock"], "prefix-cost"),
        (&["--model", "gpt-2"], "llama3.1-8b"),
        (&["--model", "llama3.1-8b", "--block-bytes", "4KiB"], "cannot be used with"),
        (&["--pipeline", "Dram|Tape"], "Tape"),
        (&["--pipeline", "Dram|Files"], "--files DIR"),
        (&["--pipeline", "Dram", "--files", "x"], "Dram|Files"),
        (&["--speed", "-1"], "real time"),
        (&["--warm-up", "120%"], "10%"),
        (&["--threads", "0"], "1..=256"),
        (&["--dram", "4KiB", "--block-bytes", "1MiB"], "raise --dram"),
        (&["--fresh"], "--files"),
    ] {
        let said = refused_replay(options);
        assert!(said.contains(hint), "{options:?} should name {hint:?}: {said}");
    }
}

#[test]
fn a_directory_without_blocks_is_refused() {
    let directory = tempfile::TempDir::new().unwrap();
    let path = directory.path().display().to_string();
    assert!(refused(&["inspect", &path]).contains("--files"));
    assert!(refused(&["inspect", "/no/such/directory"]).contains("/no/such/directory"));
}

#[test]
fn a_trace_that_is_none_is_named() {
    let said = refused(&["replay", "no/such/trace.jsonl"]);
    assert!(said.contains("no/such/trace.jsonl"), "{said}");
    let directory = tempfile::TempDir::new().unwrap();
    let path = directory.path().join("broken.jsonl");
    std::fs::write(&path, "{\"timestamp\": 0, \"hash_ids\": \"none\"}\n").unwrap();
    let said = refused(&["replay", &path.display().to_string()]);
    assert!(said.contains("broken.jsonl") && said.contains(":1"), "{said}");
}

#[test]
fn a_file_that_cannot_be_written_is_named() {
    let directory = tempfile::TempDir::new().unwrap();
    let trace = conversation_trace(directory.path()).display().to_string();
    let output =
        run(&["replay", &trace, "--limit", "5", "--metadata-only", "--json", "/proc/no/out.json"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("/proc/no/out.json"), "{}", stderr(&output));
}

#[test]
fn completions_know_the_options() {
    for shell in ["bash", "zsh", "fish"] {
        let output = run(&["completions", shell]);
        assert_eq!(output.status.code(), Some(0));
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(script.contains("metadata-only"), "{shell}");
    }
}

#[test]
fn help_is_an_answer_not_an_error() {
    assert_eq!(run(&["--help"]).status.code(), Some(0));
    assert_eq!(run(&["replay", "--help"]).status.code(), Some(0));
    assert_eq!(run(&["--version"]).status.code(), Some(0));
    assert_eq!(run(&[]).status.code(), Some(2));
    assert_eq!(run(&["repaly"]).status.code(), Some(2));
}
