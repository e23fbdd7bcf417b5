//! The command as a person or a script meets it: exit codes, JSON, messages, the page.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

mod replay;
mod usage;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// The program under test.
fn cascade() -> Command {
    Command::new(env!("CARGO_BIN_EXE_cascade"))
}

/// Runs a command line and waits for it.
fn run(args: &[&str]) -> Output {
    cascade().args(args).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn conversation_trace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../data/traces/mooncake/conversation_trace.jsonl")
}
