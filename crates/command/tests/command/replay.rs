//! `cascade replay` on a real trace.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use cascade_replay::payload;
use cascade_replay::trace::Trace;
use cascade_replay::workload::Workload;
use cascade_store::{CallOptions, FilesConfig, Put, PutOutcome, Store, StoreConfig};
use serde_json::Value;
use tempfile::TempDir;

use crate::{cascade, conversation_trace, json, stderr};

/// A replay of the first requests of the conversation trace.
struct Replay {
    directory: TempDir,
}

impl Replay {
    fn new() -> Self {
        Self { directory: TempDir::new().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Runs with more options. Returns the exit code and the JSON.
    fn run(&self, options: &[&str]) -> (i32, Value) {
        let out = self.path("out.json");
        let trace = conversation_trace(self.directory.path());
        let output = cascade()
            .arg("replay")
            .arg(trace)
            .args(["--block-bytes", "4KiB", "--json"])
            .arg(&out)
            .args(options)
            .output()
            .unwrap();
        let code = output.status.code().unwrap();
        assert!(out.exists(), "exit code {code}: {}", stderr(&output));
        (code, json(&out))
    }

    fn files(&self) -> String {
        self.path("files").display().to_string()
    }
}

fn count(result: &Value, name: &str) -> u64 {
    result[name].as_u64().unwrap_or_else(|| panic!("{name} is {}", result[name]))
}

#[test]
fn the_json_has_the_documented_fields_and_consistent_values() {
    let (code, result) = Replay::new().run(&["--dram", "64MiB"]);
    assert_eq!(code, 0);
    assert_eq!(count(&result, "requests"), 400);
    assert_eq!(count(&result, "wrong_blocks"), 0);
    assert_eq!(count(&result, "dram_bytes"), 64 << 20);
    assert_eq!(count(&result, "files_bytes"), 0);
    assert_eq!(result["policy"], "prefix-cost");
    let by_tier = result["hits_by_tier"].as_object().unwrap();
    let sum: u64 = by_tier.values().map(|hits| hits.as_u64().unwrap()).sum();
    assert_eq!(sum, count(&result, "blocks_hit"));
    assert_eq!(count(&result, "bytes_read"), sum * 4096);
    let requested = result["blocks_requested"].as_f64().unwrap();
    let rate = result["blocks_hit"].as_f64().unwrap() / requested;
    assert!((result["hit_rate"].as_f64().unwrap() - rate).abs() < 1e-12);
    assert!(result["seconds"].as_f64().unwrap() > 0.0);
    assert!(count(&result, "bytes_written") > 0);
    assert!(result["environment"]["argv"].as_array().unwrap().len() > 5);
}

#[test]
fn a_cache_that_fits_all_blocks_hits_as_an_unbounded_cache() {
    let (code, result) = Replay::new().run(&["--dram", "256MiB", "--admit-partial"]);
    assert_eq!(code, 0);
    assert!(count(&result, "blocks_hit") > 0);
    assert_eq!(result["hit_rate"], result["ceilings"]["endless"]);
}

#[test]
fn concurrent_workers_get_no_wrong_byte() {
    let options = ["--dram", "8MiB", "--threads", "4", "--digest", "blake3"];
    let (code, result) = Replay::new().run(&options);
    assert_eq!((code, count(&result, "wrong_blocks")), (0, 0));
    assert_eq!(count(&result, "requests"), 400);
}

#[test]
fn a_warm_up_is_not_counted() {
    let replay = Replay::new();
    let (_, cold) = replay.run(&["--dram", "256MiB"]);
    let (_, warm) = replay.run(&["--dram", "256MiB", "--warm-up", "50%"]);
    assert_eq!(count(&warm, "requests"), 200);
    assert!(count(&warm, "blocks_requested") < count(&cold, "blocks_requested"));
    assert!(warm["hit_rate"].as_f64() > cold["hit_rate"].as_f64());
}

#[test]
fn the_file_tier_serves_evicted_blocks_and_survives_a_restart() {
    let replay = Replay::new();
    let files = replay.files();
    let options = ["--dram", "8MiB", "--files", &files, "--files-capacity", "1GiB"];
    let (code, first) = replay.run(&options);
    assert_eq!((code, count(&first, "wrong_blocks")), (0, 0));
    assert!(count(&first["hits_by_tier"], "files") > 0, "{}", first["hits_by_tier"]);
    let (code, second) = replay.run(&options);
    assert_eq!((code, count(&second, "wrong_blocks")), (0, 0));
    assert!(count(&second["run"], "started_with_blocks") > 0);
    assert!(count(&second, "blocks_hit") > count(&first, "blocks_hit"));
    let (_, fresh) = replay.run(&[&options[..], &["--fresh"]].concat());
    assert_eq!(count(&fresh["run"], "started_with_blocks"), 0);
    assert_eq!(count(&fresh, "blocks_hit"), count(&first, "blocks_hit"));
}

/// The kernel had written 14 % and read 50 % more than the summary said.
#[test]
fn the_summary_has_payload_and_what_the_kernel_counted() {
    let replay = Replay::new();
    let files = replay.files();
    let options = ["--dram", "8MiB", "--files", &files, "--files-capacity", "1GiB"];
    let (_, result) = replay.run(&options);
    let kernel = &result["kernel_io"];
    if Path::new("/proc/self/io").exists() {
        assert!(kernel["read_bytes"].is_u64() && kernel["written_bytes"].is_u64(), "{kernel}");
    }
    let trace = conversation_trace(replay.directory.path());
    let output = cascade().arg("replay").arg(trace).args(options).output().unwrap();
    let summary = String::from_utf8(output.stdout).unwrap();
    for row in ["payload read", "payload put", "payload written to files"] {
        assert!(summary.contains(row), "{summary}");
    }
    assert_eq!(summary.contains("written to disks, by the kernel"), kernel.is_object());
    let (_, memory_only) = replay.run(&["--dram", "64MiB"]);
    assert!(memory_only["kernel_io"].is_null());
}

#[test]
fn times_that_look_like_another_unit_are_noted_unless_the_unit_is_given() {
    let replay = Replay::new();
    let trace = replay.path("seconds.jsonl");
    let line = |second: u64| {
        format!(
            "{{\"timestamp\": {second}, \"input_length\": 512, \"output_length\": 1, \
                 \"hash_ids\": [{second}]}}\n"
        )
    };
    fs::write(&trace, (0..10).map(line).collect::<String>()).unwrap();
    let run = |options: &[&str]| {
        let mut command = cascade();
        command.arg("replay").arg(&trace).args(["--metadata-only", "--json", "-"]).args(options);
        let output = command.output().unwrap();
        (stderr(&output), serde_json::from_slice::<Value>(&output.stdout).unwrap())
    };
    let (notices, result) = run(&[]);
    assert!(notices.contains("note: timestamps were read as milliseconds"), "{notices}");
    assert!(result["trace"]["time_note"].as_str().unwrap().contains("--time-unit s"));
    let (notices, result) = run(&["--time-unit", "s"]);
    assert!(!notices.contains("milliseconds"), "{notices}");
    assert_eq!(result["trace"]["seconds"], 9.0);
    assert!(result["trace"]["time_note"].is_null());
}

#[test]
fn a_trace_without_blocks_is_replayed_and_the_output_says_so() {
    let replay = Replay::new();
    let trace = replay.path("burst.csv");
    let rows = "5,472,18\n4,1.0e3,230\n118,417,0\n1";
    fs::write(&trace, format!("Timestamp,Request tokens,Response tokens\n{rows}")).unwrap();
    let run = |options: &[&str]| {
        let mut command = cascade();
        command.arg("replay").arg(&trace).args(options).output().unwrap()
    };
    let result = run(&["--dram", "64MiB", "--block-bytes", "4KiB", "--json", "-"]);
    let result: Value = serde_json::from_slice(&result.stdout).unwrap();
    let facts = &result["trace"];
    assert_eq!((&facts["format"], &facts["times"]), (&"burstgpt".into(), &"seconds".into()));
    assert_eq!((&facts["rows_read"], &facts["block_tokens"]), (&2.into(), &64.into()));
    let skipped = &facts["rows_skipped"];
    assert_eq!(skipped["zero response tokens (a failed request)"], 1);
    assert_eq!(skipped["cut off at the end of the file"], 1);
    assert_eq!(facts["rows_out_of_order"], 1);
    assert_eq!((&result["hit_rate"], &result["ceilings"]["endless"]), (&0.0.into(), &0.0.into()));
    assert_eq!(count(&result, "wrong_blocks"), 0);
    let summary = String::from_utf8(run(&["--metadata-only"]).stdout).unwrap();
    for line in [
        "trace: burstgpt, 2 rows read, 64 tokens of a prompt per block; times in seconds (by the",
        "skipped rows: 1 cut off at the end of the file",
        "1 rows were earlier than the row before; sorted by time",
        "the trace names no blocks: no request shares any",
        "The hit rate is 0.0 %, which is ideal: no request shares a block with an earlier one.",
    ] {
        assert!(summary.contains(line), "{summary}");
    }
    let other = run(&["--format", "azure"]);
    assert_eq!(other.status.code(), Some(2), "{}", stderr(&other));
    assert!(stderr(&other).contains(":1: field `ContextTokens`: expected a column"));
}

#[test]
fn damaged_files_are_misses_not_wrong_bytes() {
    let replay = Replay::new();
    let files = replay.files();
    let options = ["--dram", "8MiB", "--files", &files, "--files-capacity", "1GiB"];
    let (_, first) = replay.run(&options);
    let (_, intact) = replay.run(&options);
    damage(&replay.path("files"));
    let (code, damaged) = replay.run(&options);
    assert_eq!((code, count(&damaged, "wrong_blocks")), (0, 0));
    assert!(count(&damaged, "blocks_hit") < count(&intact, "blocks_hit"));
    assert!(count(&first, "blocks_hit") > 0);
}

#[test]
fn a_wrong_byte_is_reported_with_its_key_and_exit_code_1() {
    let replay = Replay::new();
    let trace = conversation_trace(replay.directory.path());
    let workload = Workload::new(&Trace::read(&trace).unwrap(), 4096);
    let [key, other] = [0, 1].map(|at| workload.requests[0].keys[at]);
    let mut bytes = vec![0; 4096];
    payload::fill(&other, &mut bytes);
    let store = Store::open(StoreConfig {
        pipeline: "Dram|Files".to_owned(),
        files: Some(FilesConfig {
            segment_bytes: 1 << 26,
            ..FilesConfig::new(replay.path("files"))
        }),
        ..StoreConfig::default()
    });
    let store = store.unwrap();
    let outcomes = store.put(&[Put::new(key, &bytes)], CallOptions::default());
    assert!(matches!(outcomes[0], PutOutcome::Stored), "{outcomes:?}");
    store.close().unwrap();
    let files = replay.files();
    let (code, result) = replay.run(&["--files", &files, "--segment-size", "64MiB"]);
    assert_eq!(code, 1);
    assert!(count(&result, "wrong_blocks") >= 1);
    let described = result["wrong_examples"][0].as_str().unwrap();
    assert!(described.contains(&key.to_string()), "{described}");
}

/// Flips a byte in every 64 KiB of every large file.
fn damage(directory: &Path) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            damage(&path);
            continue;
        }
        let mut bytes = fs::read(&path).unwrap();
        let places = (0..bytes.len()).skip(100_000).step_by(65_536);
        places.for_each(|at| bytes[at] ^= 0xff);
        fs::write(&path, bytes).unwrap();
    }
}

#[test]
fn inspect_reports_an_intact_and_a_damaged_directory() {
    let replay = Replay::new();
    let files = replay.files();
    let options = ["--dram", "8MiB", "--files", &files, "--files-capacity", "1GiB"];
    replay.run(&options);
    let inspect = || {
        let output = crate::run(&["inspect", &files, "--verify", "--json"]);
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        (output.status.code().unwrap(), report)
    };
    let (code, intact) = inspect();
    assert_eq!((code, &intact["is_clean"]), (0, &Value::Bool(true)), "{}", intact["problems"]);
    assert!(count(&intact, "live_blocks") > 0);
    damage(&replay.path("files"));
    let (code, damaged) = inspect();
    assert_eq!((code, &damaged["is_clean"]), (1, &Value::Bool(false)));
    assert!(count(&damaged, "damaged_blocks") > 0, "{damaged}");
}

#[test]
fn a_replay_of_keys_only_hits_as_one_with_payload() {
    let replay = Replay::new();
    let (code, keys) = replay.run(&["--metadata-only", "--dram-blocks", "500", "--policy", "lru"]);
    assert_eq!(code, 0);
    assert_eq!(count(&keys, "bytes_read"), 0);
    let (_, bytes) = replay.run(&["--dram", "64MiB", "--dram-blocks", "500", "--policy", "lru"]);
    let [keys, bytes] = [keys, bytes].map(|result| count(&result, "blocks_hit"));
    assert!(keys.abs_diff(bytes) * 100 <= keys, "{keys} and {bytes} differ by more than 1 %");
}

#[test]
fn the_report_loads_nothing_from_the_network() {
    let replay = Replay::new();
    let page = replay.path("page.html").display().to_string();
    let (code, _) = replay.run(&["--dram", "64MiB", "--report", &page]);
    assert_eq!(code, 0);
    let html = fs::read_to_string(page).unwrap();
    assert!(html.matches("<svg").count() >= 4, "a plot is missing");
    assert!(html.contains("<text"), "labels must be text elements");
    assert!(html.contains("<div class=\"scroll\"><table>"), "a phone cuts the table");
    let without_namespace = html.replace("http://www.w3.org/2000/svg", "");
    for reference in ["http://", "https://", "src=", "@import", "url("] {
        assert!(!without_namespace.contains(reference), "the page loads something: {reference}");
    }
    let data = html.split("id=\"cascade-replay\">").nth(1).unwrap();
    let data: Value = serde_json::from_str(data.split("</script>").next().unwrap()).unwrap();
    assert_eq!(count(&data, "requests"), 400);
}

#[test]
fn an_interrupted_replay_reports_its_partial_result() {
    let replay = Replay::new();
    let out = replay.path("out.json");
    // In real time, the whole replay would take minutes.
    let mut child = cascade()
        .arg("replay")
        .arg(conversation_trace(replay.directory.path()))
        .args(["--speed", "1", "--block-bytes", "4KiB", "--dram", "64MiB", "--json"])
        .arg(&out)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut notices = BufReader::new(child.stderr.take().unwrap()).lines();
    while !notices.next().unwrap().unwrap().starts_with("replaying") {}
    let process = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(process, rustix::process::Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(json(&out)["run"]["was_stopped"], true);
}

#[test]
fn a_model_of_a_file_gives_the_size_of_a_block() {
    let replay = Replay::new();
    let (model, out) = (replay.path("config.json"), replay.path("out.json"));
    let text = "{\"model_type\": \"odd\", \"num_hidden_layers\": 7, \"num_attention_heads\": 5, \
                \"head_dim\": 61, \"dtype\": \"fp8\"}";
    fs::write(&model, text).unwrap();
    let mut command = cascade();
    command.arg("replay").arg(conversation_trace(replay.directory.path()));
    command.args(["--limit", "3", "--dram", "256MiB"]).arg("--model-config").arg(&model);
    let output = command.arg("--json").arg(&out).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let payload = &json(&out)["payload"];
    assert_eq!((&payload["model"], count(payload, "block_bytes")), (&"odd".into(), 512 * 4270));
}
