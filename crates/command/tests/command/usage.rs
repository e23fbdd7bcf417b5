//! Errors in the command line are refused with what is wrong, where, and what to do.

use crate::{conversation_trace, run, stderr};

/// The error message of a command line with a usage error.
fn refused(args: &[&str]) -> String {
    let output = run(args);
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
    message
}

fn refused_replay(options: &[&str]) -> String {
    let directory = tempfile::TempDir::new().unwrap();
    let trace = conversation_trace(directory.path()).display().to_string();
    refused(&[&["replay", &trace, "--limit", "5"], options].concat())
}

#[test]
fn an_invalid_option_is_refused_with_a_valid_value() {
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
        let message = refused_replay(options);
        assert!(message.contains(hint), "{options:?} should name {hint:?}: {message}");
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
fn an_error_in_a_trace_names_the_file_and_the_line() {
    let message = refused(&["replay", "no/such/trace.jsonl"]);
    assert!(message.contains("no/such/trace.jsonl"), "{message}");
    let directory = tempfile::TempDir::new().unwrap();
    let path = directory.path().join("broken.jsonl");
    std::fs::write(&path, "{\"timestamp\": 0, \"hash_ids\": \"none\"}\n").unwrap();
    let message = refused(&["replay", &path.display().to_string()]);
    assert!(message.contains("broken.jsonl") && message.contains(":1"), "{message}");
}

#[test]
fn an_error_names_a_file_that_cannot_be_written() {
    let directory = tempfile::TempDir::new().unwrap();
    let trace = conversation_trace(directory.path()).display().to_string();
    let output =
        run(&["replay", &trace, "--limit", "5", "--metadata-only", "--json", "/proc/no/out.json"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("/proc/no/out.json"), "{}", stderr(&output));
}

/// `get zzzz` exited with 1, and `put abc` with 2.
#[test]
fn what_is_no_key_is_a_usage_error_of_every_command() {
    let zeros = "0".repeat(65);
    for wrong in ["zzzz", "abc", "0123456g", &zeros] {
        for command in [
            &["get", wrong][..],
            &["get", wrong, "--json"],
            &["put", wrong, "/dev/null"],
            &["delete", wrong],
            &["delete", "0123456789abcdef", wrong],
            &["explain", wrong],
        ] {
            refused(command);
        }
    }
    assert!(refused(&["get", "zzzz"]).contains("\"zzzz\" is not a key"));
}

#[test]
fn completion_scripts_contain_the_options() {
    for shell in ["bash", "zsh", "fish"] {
        let output = run(&["completions", shell]);
        assert_eq!(output.status.code(), Some(0));
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(script.contains("metadata-only"), "{shell}");
    }
}

#[test]
fn help_and_version_exit_with_0_and_usage_errors_with_2() {
    assert_eq!(run(&["--help"]).status.code(), Some(0));
    assert_eq!(run(&["replay", "--help"]).status.code(), Some(0));
    assert_eq!(run(&["--version"]).status.code(), Some(0));
    assert_eq!(run(&[]).status.code(), Some(2));
    assert_eq!(run(&["repaly"]).status.code(), Some(2));
}
