//! The command as users and scripts see it: exit codes, JSON, messages, the report.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

mod admin;
mod damage;
mod gpu;
mod hit_rate;
mod key_list;
mod kv_bench;
mod kv_files;
mod kv_mlperf;
mod node;
mod operator_files;
mod port;
mod reference;
mod replay;
mod resize;
mod serve;
mod sim;
mod usage;
mod vllm_config;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// Requests that the tests replay: enough for hits in every tier.
const TRACE_REQUESTS: usize = 400;

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

/// A file with the first requests of the conversation trace.
fn conversation_trace(directory: &Path) -> PathBuf {
    let whole = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../data/traces/mooncake/conversation_trace.jsonl");
    let text = std::fs::read_to_string(whole).unwrap();
    let lines: Vec<&str> = text.lines().take(TRACE_REQUESTS).collect();
    let path = directory.join("conversation.jsonl");
    std::fs::write(&path, lines.join("\n")).unwrap();
    path
}
