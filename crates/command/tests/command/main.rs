//! The command as users and scripts see it: exit codes, JSON, messages, the report.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

mod admin;
mod cluster;
mod damage;
mod gpu;
mod hit_rate;
mod key_list;
mod kv_bench;
mod kv_files;
mod kv_mlperf;
mod kv_suite;
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

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use rustix::process::Pid;
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
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn wait_until(is_true: &dyn Fn() -> bool, failure: &str) {
    for _ in 0..3000 {
        if is_true() {
            return;
        }
        std::thread::park_timeout(Duration::from_millis(20));
    }
    panic!("{failure}");
}

/// The process that a benchmark has started on this directory.
fn process_of_benchmark(cache: &Path) -> Pid {
    let cache = cache.to_str().unwrap();
    let numbers = fs::read_dir("/proc").unwrap().filter_map(|entry| {
        entry.unwrap().file_name().to_str().and_then(|name| name.parse::<i32>().ok())
    });
    let is_it = |number: &i32| {
        let text = fs::read(format!("/proc/{number}/cmdline")).unwrap_or_default();
        let has = |word: &str| text.split(|byte| *byte == 0).any(|it| it == word.as_bytes());
        has(cache) && has("--ends-with-input")
    };
    Pid::from_raw(numbers.into_iter().find(is_it).unwrap()).unwrap()
}

/// A file with the first requests of the conversation trace.
fn conversation_trace(directory: &Path) -> PathBuf {
    let whole = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../data/traces/mooncake/conversation_trace.jsonl");
    let text = fs::read_to_string(whole).unwrap();
    let lines: Vec<&str> = text.lines().take(TRACE_REQUESTS).collect();
    let path = directory.join("conversation.jsonl");
    fs::write(&path, lines.join("\n")).unwrap();
    path
}
