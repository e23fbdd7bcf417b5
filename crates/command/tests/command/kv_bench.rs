//! `cascade bench kv`: its result file, its refusals, and that two runs of a seed do the same.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use crate::{cascade, json, stderr};

/// A run with the least that one rank of many stores.
pub(crate) struct Run {
    directory: TempDir,
}

impl Run {
    pub(crate) fn new() -> Self {
        Self { directory: TempDir::new().unwrap() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The command with these options, and with defaults for the others.
    pub(crate) fn command(&self, options: &[&str]) -> Command {
        let defaults = [
            ["--model", "tiny-1b"],
            ["--num-users", "4"],
            ["--num-gpus", "8"],
            ["--tensor-parallel", "8"],
            ["--gpu-mem-gb", "0"],
            ["--cpu-mem-gb", "0.1"],
            ["--storage-capacity-gb", "1"],
            ["--seed", "42"],
            ["--generation-mode", "none"],
        ];
        let mut command = cascade();
        command.args(["bench", "kv", "--unoptimised"]).args(options);
        command.args(defaults.iter().filter(|it| !options.contains(&it[0])).flatten());
        command.arg("--cache-dir").arg(self.path("cache"));
        command.arg("--output").arg(self.path("out.json"));
        command
    }

    /// Runs to the end. Returns its output and the JSON.
    pub(crate) fn run(&self, options: &[&str]) -> (Output, Value) {
        let output = self.command(options).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        (output, json(&self.path("out.json")))
    }

    /// What a refusal says. Nothing has run, and nothing is left.
    pub(crate) fn refusal(&self, options: &[&str]) -> String {
        let output = self.command(options).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{options:?}: {}", stderr(&output));
        assert!(!self.path("out.json").exists() && !self.path("cache").exists(), "{options:?}");
        stderr(&output)
    }
}

/// The keys of the original's result file, as programs read them.
pub(crate) const TOP: &str = "\
    requests_completed total_tokens_generated total_storage_io_latency \
    total_generation_latency end_to_end_latencies storage_latencies generation_latencies \
    throughput_timeline prefill_latencies decode_latencies multi_turn_cache_hits \
    multi_turn_cache_misses seed summary cascade";
pub(crate) const SUMMARY: &str = "\
    total_requests total_tokens elapsed_time avg_throughput_tokens_per_sec \
    total_storage_io_time storage_throughput_tokens_per_sec requests_per_second \
    end_to_end_latency_ms storage_io_latency_ms generation_latency_ms cache_stats qos_metrics \
    prefix_cache_stats autoscaling_stats autoscaling_summary multi_turn_stats";
pub(crate) const CACHE_STATS: &str = "\
    cache_hit_rate cache_hits cache_misses gpu_entries cpu_entries \
    storage_entries gpu_memory_used_gb cpu_memory_used_gb offloads_cpu offloads_storage \
    storage_health prefill_writes decode_reads tier_gpu_kv_bytes_written_gb \
    tier_cpu_kv_bytes_read_gb tier_storage_kv_bytes_written_gb tier_storage_kv_bytes_read_gb \
    tier_gpu_read_bandwidth_gbps tier_cpu_write_bandwidth_gbps tier_storage_read_bandwidth_gbps \
    tier_storage_write_bandwidth_gbps system_prompt_hits common_phrase_hits user_cache_hits \
    multi_turn_hits total_read_bytes total_write_bytes total_read_gb total_write_gb \
    read_write_ratio read_iops write_iops storage_tokens_processed nvme_entries \
    storage_read_p50_ms storage_read_p95_ms storage_read_p99_ms storage_read_p999_ms \
    storage_read_p9999_ms storage_write_p95_ms storage_write_p9999_ms \
    storage_read_device_p95_ms storage_write_host_p95_ms nvme_read_p95_ms nvme_write_p95_ms";
pub(crate) const OURS: &str = "\
    validity window workload tiers rates bytes operations verification failures \
    latency_ms cpu kernel_io device samples timeline simulated notes store environment";

pub(crate) fn has_keys(value: &Value, keys: &str) {
    let object = value.as_object().unwrap();
    for key in keys.split_whitespace() {
        assert!(object.contains_key(key), "no {key}");
    }
}

#[test]
fn a_run_of_a_second_writes_all_keys_and_leaves_nothing() {
    let run = Run::new();
    let report = run.path("report.html");
    let (output, result) = run.run(&["--duration", "1", "--report", report.to_str().unwrap()]);
    has_keys(&result, TOP);
    has_keys(&result["summary"], SUMMARY);
    has_keys(&result["summary"]["cache_stats"], CACHE_STATS);
    has_keys(&result["cascade"], OURS);
    for name in ["end_to_end_latency_ms", "storage_io_latency_ms", "generation_latency_ms"] {
        has_keys(&result["summary"][name], "mean p50 p95 p99 p999 p9999");
    }
    for class in ["interactive", "responsive", "batch"] {
        let metrics = &result["summary"]["qos_metrics"][class];
        has_keys(metrics, "total_requests latency_ms sla");
        has_keys(&metrics["sla"], "target_p95_ms actual_p95_ms compliance met");
    }
    let health = &result["summary"]["cache_stats"]["storage_health"];
    has_keys(health, "overall_status criteria passed_count total_count");
    assert_eq!(health["total_count"], 4);
    assert_eq!(result["cascade"]["window"]["seconds"], 1.0);
    assert_eq!(result["cascade"]["verification"]["wrong_blocks"], 0);
    assert_eq!(result["cascade"]["workload"]["bytes_per_token"], 24_576);
    assert!(result["cascade"]["environment"]["argv"].as_array().unwrap().len() > 5);

    let reasons = result["cascade"]["validity"]["reasons"].as_array().unwrap();
    let codes: Vec<_> = reasons.iter().map(|reason| reason["code"].as_str().unwrap()).collect();
    assert_eq!(result["cascade"]["validity"]["is_valid"], false);
    assert!(codes.contains(&"unoptimised"), "{codes:?}");

    let text = String::from_utf8(output.stdout).unwrap();
    for part in [
        "INVALID: unoptimised build",
        "### STORAGE PERFORMANCE ASSESSMENT:",
        "Criteria Passed:",
        "### OVERALL PERFORMANCE ###",
        "### LATENCY BREAKDOWN ###",
        "### CACHE TIER DISTRIBUTION ###",
        "Storage Write P95 < 500ms",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let page = fs::read_to_string(report).unwrap();
    assert!(page.contains("<svg") && page.contains("cascade-bench-kv"));
    assert!(!run.path("cache").exists());
}

#[test]
fn two_runs_of_a_seed_do_the_same() {
    let runs = [["--max-requests", "6"]; 2].map(|options| {
        let (_, result) = Run::new().run(&options);
        let cache = &result["summary"]["cache_stats"];
        assert_eq!(result["requests_completed"], 6);
        assert_eq!(cache["cache_misses"], 0);
        [
            result["cascade"]["operations"].clone(),
            result["total_tokens_generated"].clone(),
            cache["total_read_bytes"].clone(),
            cache["total_write_bytes"].clone(),
        ]
    });
    assert_eq!(runs[0], runs[1]);
    assert!(runs[0][2].as_u64().unwrap() > 0);
}

#[test]
fn a_run_without_a_dram_tier_says_what_blocks_pass_through() {
    let (output, result) = Run::new().run(&["--max-requests", "2", "--cpu-mem-gb", "0"]);
    assert!(stderr(&output).contains("no DRAM tier"), "{}", stderr(&output));
    let tiers = &result["cascade"]["tiers"];
    assert_eq!(tiers["cpu"]["bytes"], 0);
    assert!(tiers["cpu"]["staging_bytes"].as_u64().unwrap() > 0);
    assert_eq!(result["summary"]["cache_stats"]["cpu_entries"], 0);
    let criteria = &result["summary"]["cache_stats"]["storage_health"]["criteria"];
    assert_eq!(criteria[2]["passed"], Value::Null, "{criteria}");
}

#[test]
fn documents_and_preconditioning_come_before_the_window_and_blocks_can_be_kept() {
    let run = Run::new();
    let (_, result) = run.run(&[
        "--max-requests",
        "2",
        "--enable-rag",
        "--rag-num-docs",
        "2",
        "--precondition",
        "--precondition-size-gb",
        "0.02",
        "--keep",
    ]);
    let workload = &result["cascade"]["workload"];
    assert_eq!(workload["documents"], 2);
    assert_eq!(workload["preconditioned_bytes"], 21_474_836);
    assert!(workload["blocks_stored_before"].as_u64().unwrap() > 3);
    assert!(run.path("cache/cascade-bench-kv").is_dir());
}

#[test]
fn compatible_mode_stores_files_and_says_what_it_counts() {
    let run = Run::new();
    let report = run.path("report.html");
    let (output, result) = run.run(&[
        "--compatible",
        "--max-requests",
        "6",
        "--cpu-mem-gb",
        "0",
        "--keep",
        "--report",
        report.to_str().unwrap(),
    ]);
    has_keys(&result, TOP);
    has_keys(&result["summary"], SUMMARY);
    let cache = &result["summary"]["cache_stats"];
    has_keys(cache, CACHE_STATS);
    let ours = &result["cascade"];
    has_keys(ours, OURS);
    has_keys(ours, "rates_with_tail assessment objects");
    assert_eq!(ours["mode"], "compatible");
    assert_eq!((&result["requests_completed"], &cache["storage_entries"]), (&6.into(), &6.into()));
    assert_eq!(ours["objects"]["written_bytes"]["storage"], cache["total_write_bytes"]);
    assert!(cache["storage_write_device_p95_ms"].as_f64().unwrap() > 0.0);
    // The original leaves out what has no samples. We say that it was not judged.
    assert_eq!(cache["storage_health"]["total_count"], 3);
    assert_eq!(ours["assessment"]["criteria"][2]["passed"], Value::Null);
    let files = fs::read_dir(run.path("cache/cascade-bench-kv")).unwrap();
    let bytes: u64 = files.map(|file| file.unwrap().metadata().unwrap().len()).sum();
    assert_eq!(cache["total_write_bytes"], bytes);

    let text = String::from_utf8(output.stdout).unwrap();
    let page = fs::read_to_string(report).unwrap();
    for part in ["mode: compatible", "bytes of requests that ended after the window count"] {
        assert!(text.contains(part), "{part} is not in\n{text}");
        assert!(page.contains(part), "{part} is not in the report");
    }
    for part in ["As in the original: ", "CPU RAM P95 < 150ms: not judged, no samples"] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

/// A request that began within the window is served to its end, and the divisor stays the window.
#[test]
fn compatible_mode_divides_all_bytes_by_the_window() {
    let (_, result) = Run::new().run(&["--compatible", "--duration", "1", "--cpu-mem-gb", "0"]);
    let summary = &result["summary"];
    let cache = &summary["cache_stats"];
    let number = |value: &Value| value.as_f64().unwrap();
    assert!((number(&summary["elapsed_time"]) - 1.0).abs() < 1e-9);
    for (rate, bytes) in [("read", "read"), ("write", "written")] {
        let rate = number(&cache[format!("tier_storage_{rate}_bandwidth_gbps")]);
        let bytes = number(&cache[format!("tier_storage_kv_bytes_{bytes}_gb")]);
        assert!((rate - bytes).abs() < 1e-9, "{rate} a second, {bytes}");
    }
    let window = &result["cascade"]["window"];
    assert_eq!(window["cut_requests"], 0);
}

/// No file may have more than 2 MiB, so that some entries cannot be written.
#[test]
fn a_run_with_failed_operations_is_invalid() {
    let run = Run::new();
    let command = run.command(&["--compatible", "--max-requests", "8", "--cpu-mem-gb", "0"]);
    let limits = "trap '' XFSZ; ulimit -f 2048; exec \"$@\"";
    let mut limited = Command::new("bash");
    limited.args(["-c", limits, "bash"]).arg(command.get_program()).args(command.get_args());
    let output = limited.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let result = json(&run.path("out.json"));
    let reasons = result["cascade"]["validity"]["reasons"].as_array().unwrap();
    assert!(reasons.iter().any(|reason| reason["code"] == "failed"), "{reasons:?}");
    let failures = result["cascade"]["failures"].as_object().unwrap();
    assert!(failures.keys().any(|reason| reason.contains("cannot write an entry")), "{failures:?}");
}

#[test]
fn a_terminated_run_reports_what_it_did_and_leaves_nothing() {
    let run = Run::new();
    let mut command = run.command(&["--duration", "600", "--cpu-mem-gb", "0"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for_blocks(&run.path("cache"));
    let process = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(process, rustix::process::Signal::TERM).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert_eq!(json(&run.path("out.json"))["cascade"]["is_partial"], true);
    assert!(!run.path("cache").exists());
}

#[test]
fn what_compatible_mode_cannot_do_is_refused_by_name() {
    let run = Run::new();
    for options in [
        &["--enable-autoscaling"][..],
        &["--request-rate", "5"],
        &["--disable-multi-turn", "--dataset-path", "x.json"],
        &["--disable-multi-turn", "--use-burst-trace", "--burst-trace-path", "x.csv"],
    ] {
        let refusal = run.refusal(&[&["--compatible"], options].concat());
        let name = options[0];
        assert!(
            refusal.contains(&format!("--compatible and {name} cannot be combined")),
            "{refusal}"
        );
        assert!(refusal.contains(&format!("leave out {name}")), "{refusal}");
    }
}

#[test]
fn recorded_requests_that_cannot_run_are_refused_before_anything_runs() {
    let run = Run::new();
    let trace = run.path("burst.csv");
    fs::write(&trace, "Timestamp,Request tokens,Response tokens\n1,x,1\n").unwrap();
    let trace = trace.to_str().unwrap();
    let burst = ["--use-burst-trace", "--burst-trace-path", trace];
    for (options, reason) in [
        (&["--use-burst-trace"][..], "https://github.com/HPMLL/BurstGPT"),
        (&burst[1..], "no effect without --use-burst-trace"),
        (&["--trace-speedup", "2"], "no effect without --use-burst-trace"),
        (&["--replay-cycles", "2"], "no effect without --use-burst-trace or --dataset-path"),
        (&["--max-conversations", "2"], "no effect without --dataset-path"),
        (&["--dataset-path", "none.json"], "none.json"),
        (&["--validation-trace", trace], "--validation-trace"),
        (&burst, ":2: field `Request tokens`: expected an integer"),
    ] {
        let refused = run.refusal(options);
        assert!(refused.contains(reason), "{options:?}: {refused}");
    }
    for other in [
        &["--dataset-path", "x.json"][..],
        &["--enable-rag"],
        &["--enable-autoscaling"],
        &["--decode-only"],
        &["--request-rate", "5"],
    ] {
        let refused = run.refusal(&[&burst, other].concat());
        let expected = format!("--use-burst-trace and {} contradict each other", other[0]);
        assert!(refused.contains(&expected), "{refused}");
    }
    let slow = run.refusal(&[&burst[..], &["--trace-speedup", "-1"]].concat());
    assert!(slow.contains("--trace-speedup -1 is not a factor"), "{slow}");
}

#[test]
fn a_trace_is_replayed_and_its_hit_rate_compared() {
    let run = Run::new();
    let (trace, real) = (run.path("burst.csv"), run.path("real.json"));
    fs::write(&trace, "Timestamp,Request tokens,Response tokens\n5,600,30\n9,1500,1\n10,7,0\n")
        .unwrap();
    let entry = |is_hit: bool| {
        format!(
            "{{\"cache_hit\": {is_hit}, \"read_bytes\": 2, \"write_bytes\": 1, \
             \"context_tokens\": 1, \"generation_tokens\": 1}}"
        )
    };
    fs::write(&real, format!("[{}, {}]", entry(true), entry(false))).unwrap();
    let paths = [&trace, &real].map(|path| path.to_str().unwrap());
    let (output, result) = run.run(&[
        "--use-burst-trace",
        "--burst-trace-path",
        paths[0],
        "--trace-speedup",
        "0",
        "--replay-cycles",
        "2",
        "--validation-trace",
        paths[1],
    ]);
    assert_eq!(result["requests_completed"], 4);
    let recorded = &result["cascade"]["workload"]["recorded"];
    assert_eq!((&recorded["rows_read"], &recorded["cycles"]), (&2.into(), &2.into()));
    assert_eq!(recorded["rows_skipped"]["zero response tokens (a failed request)"], 1);
    assert_eq!(result["cascade"]["workload"]["users"], 2);
    assert!(stderr(&output).contains("2 requests, all due at once"), "{}", stderr(&output));
    // Each block is read after it was written, and half of the trace's requests hit.
    assert_eq!(result["validation"]["passed"], false);
    assert_eq!(result["validation"]["avg_error_pct"], 100.0);
}

#[test]
fn what_cannot_run_is_refused_before_anything_runs() {
    let run = Run::new();
    let unbuilt = run.refusal(&["--enable-latency-tracing"]);
    assert!(unbuilt.contains("--enable-latency-tracing is not built yet"), "{unbuilt}");
    let memory = run.refusal(&["--cpu-mem-gb", "100000"]);
    assert!(memory.contains("are available"), "{memory}");
    let shared = run.refusal(&["--memory-shares", "1000000000"]);
    assert!(shared.contains("available for each of 1000000000 ranks"), "{shared}");
    let shared = run.refusal(&["--disk-shares", "1000000000"]);
    assert!(shared.contains("are free for each of 1000000000 ranks"), "{shared}");
    let table = run.refusal(&["--xlsx-output", "-"]);
    assert!(table.contains("--xlsx-output needs the name of a file"), "{table}");
    let disk = run.refusal(&["--storage-capacity-gb", "100000"]);
    assert!(disk.contains("are free"), "{disk}");
    let rate = run.refusal(&["--request-rate", "-1"]);
    assert!(rate.contains("--request-rate -1"), "{rate}");
    let share = run.refusal(&["--target-saturation", "1.5"]);
    assert!(share.contains("--target-saturation 1.5"), "{share}");
    let both = run.refusal(&["--prefill-only", "--decode-only"]);
    assert!(both.contains("cannot be used with"), "{both}");
    let ranks = run.refusal(&["--num-gpus", "4"]);
    assert!(ranks.contains("--tensor-parallel 8"), "{ranks}");
    let tier = run.refusal(&["--cpu-mem-gb", "0.001"]);
    assert!(tier.contains("four blocks"), "{tier}");

    let unknown = cascade().args(["bench", "kv", "--unoptimised", "--model", "gpt-2"]).output();
    let unknown = stderr(&unknown.unwrap());
    assert!(unknown.contains("gpt-2") && unknown.contains("llama3.1-8b"), "{unknown}");
    let missing = run.path("missing/below");
    let output = cascade()
        .args(["bench", "kv", "--unoptimised", "--gpu-mem-gb", "0", "--cpu-mem-gb", "0.1"])
        .arg("--cache-dir")
        .arg(missing)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("create the directory above it"), "{}", stderr(&output));
}

#[test]
fn a_model_of_a_file_is_stored_and_a_wrong_file_is_refused() {
    let run = Run::new();
    let path = run.path("models.yaml");
    let models = "model_configs:\n  odd: {num_layers: 7, kv_heads: 5, kv_dim_per_head: 61, \
                  dtype: int8}\n  tiny-1b: {num_layers: 2, kv_heads: 3}\n";
    fs::write(&path, models).unwrap();
    let file = ["--model-config", path.to_str().unwrap()];
    let refused = run.refusal(&file);
    assert!(refused.contains("`model_configs.tiny-1b.hidden_dim`: missing"), "{refused}");
    let missing = run.refusal(&["--model-config", "none.yaml"]);
    assert!(missing.contains("--model-config cannot be read: none.yaml"), "{missing}");
    let refused = run.refusal(&[&file[..], &["--model", "odd"]].concat());
    assert!(refused.contains("--tensor-parallel 8: 4270 bytes a token cannot"), "{refused}");

    let odd = ["--model", "odd", "--tensor-parallel", "1", "--max-requests", "2"];
    let (_, result) = run.run(&[&file[..], &odd].concat());
    let workload = &result["cascade"]["workload"];
    assert_eq!((&workload["model"], &workload["bytes_per_token"]), (&"odd".into(), &4270.into()));
    assert_eq!(workload["block_bytes"], 512 * 4270);
    assert_eq!(result["cascade"]["verification"]["wrong_blocks"], 0);
}

#[test]
fn a_configuration_file_changes_the_workload_and_what_it_cannot_is_refused() {
    let run = Run::new();
    let path = run.path("config.yaml");
    let config = ["--config", path.to_str().unwrap()];
    for (text, reason) in [
        ("rag: {top_k_chunks: 7}\n", "field `rag.top_k_chunks`: 5 is built in, and 7 cannot"),
        ("decode: {size: 7}\n", "field `decode.size`: there is no such setting"),
        ("validation_limits: {max_users: 3}\n", "--num-users 4 is more than the limit of"),
    ] {
        fs::write(&path, text).unwrap();
        let refused = run.refusal(&config);
        assert!(refused.contains(reason), "{refused}");
    }
    let text = "decode: {batch_size: 8}\nconversation: {max_turns_per_conv: 3}\n\
                generation_timing: {none: 0.0005}\n\
                user_templates:\n  chatbot: {generation_range: [40, 50]}\n  \
                coding: {generation_range: [40, 50]}\n  \
                document: {generation_range: [40, 50]}\n\
                qos_profiles: {batch: {target_latency_p95_ms: 77}}\n\
                model_configs: {tiny-1b: {num_layers: 8, kv_heads: 8, kv_dim_per_head: 128}}\n";
    fs::write(&path, text).unwrap();
    for mode in [&[][..], &["--compatible"]] {
        let run = Run::new();
        let (output, result) = run.run(&[&config[..], &["--max-requests", "6"], mode].concat());
        let workload = &result["cascade"]["workload"];
        assert_eq!(
            (&workload["tokens_per_decode_read"], &workload["turns_max"]),
            (&8.into(), &3.into())
        );
        assert_eq!(workload["seconds_per_token"], 0.0005);
        assert_eq!(workload["bytes_per_token"], 32_768);
        assert_eq!(result["summary"]["qos_metrics"]["batch"]["sla"]["target_p95_ms"], 77);
        let tokens = result["total_tokens_generated"].as_u64().unwrap();
        assert!((6 * 10..=6 * 50).contains(&tokens), "{tokens}");
        assert!(stderr(&output).contains("note: settings of "), "{}", stderr(&output));
    }
    // The option has more to say than the file.
    let model = run.path("model.json");
    let text = "{\"num_hidden_layers\": 4, \"num_attention_heads\": 8, \"head_dim\": 128}";
    fs::write(&model, text).unwrap();
    let option = ["--model-config", model.to_str().unwrap(), "--max-requests", "1"];
    let (_, result) = run.run(&[&config[..], &option, &["--compatible"]].concat());
    assert_eq!(result["cascade"]["workload"]["bytes_per_token"], 16_384);
}

/// The figures until then are reported, and the error says what happened and what to do.
#[test]
fn a_directory_that_is_removed_during_the_run_is_reported_with_what_was_measured() {
    for options in [&["--duration", "4"][..], &["--compatible", "--duration", "4"]] {
        let run = Run::new();
        let mut command = run.command(&[options, &["--cpu-mem-gb", "0"]].concat());
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_for_blocks(&run.path("cache"));
        // New files may appear while it is removed.
        while run.path("cache").exists() {
            drop(fs::remove_dir_all(run.path("cache")));
        }
        let output = child.wait_with_output().unwrap();
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{options:?}: {text}");
        if !run.path("out.json").exists() {
            // It was removed before the window.
            assert!(text.contains("check that the disk of --cache-dir"), "{options:?}: {text}");
            continue;
        }
        assert!(text.contains("was removed during the run"), "{options:?}: {text}");
        assert!(text.contains("leave the directory alone"), "{options:?}: {text}");
        let validity = &json(&run.path("out.json"))["cascade"]["validity"];
        let reasons = validity["reasons"].as_array().unwrap();
        assert!(reasons.iter().any(|reason| reason["code"] == "failed"), "{reasons:?}");
    }
}

/// No file may have more than 2 MiB, so that the store cannot keep what a run needs.
#[test]
fn a_disk_without_room_before_the_window_is_an_error_with_a_remedy() {
    let run = Run::new();
    let command = run.command(&["--max-requests", "8", "--cpu-mem-gb", "0"]);
    let limits = "trap '' XFSZ; ulimit -f 2048; exec \"$@\"";
    let mut limited = Command::new("bash");
    limited.args(["-c", limits, "bash"]).arg(command.get_program()).args(command.get_args());
    let output = limited.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let text = stderr(&output);
    assert!(text.contains("check that the disk of --cache-dir has free space"), "{text}");
    assert!(!run.path("cache").exists());
}

/// Waits until a run has blocks in its directory.
fn wait_for_blocks(cache: &Path) {
    for _ in 0..1000 {
        let blocks = fs::read_dir(cache.join("cascade-bench-kv"));
        if blocks.is_ok_and(|mut entries| entries.next().is_some()) {
            return;
        }
        std::thread::park_timeout(Duration::from_millis(20));
    }
    panic!("no blocks in {}", cache.display());
}

#[test]
fn an_interrupted_run_reports_and_cleans_up_and_a_second_in_its_directory_is_refused() {
    interrupt(&[]);
    // Before the window.
    interrupt(&["--precondition", "--precondition-size-gb", "200"]);
    interrupt(&["--compatible", "--cpu-mem-gb", "0"]);
}

fn interrupt(options: &[&str]) {
    let run = Run::new();
    let mut child = run
        .command(&[&["--duration", "600"], options].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait_for_blocks(&run.path("cache"));
    let second = run.command(&[]).output().unwrap();
    assert_eq!(second.status.code(), Some(2));
    assert!(stderr(&second).contains("another benchmark runs in"), "{}", stderr(&second));

    let pid = rustix::process::Pid::from_child(&child);
    // As `timeout --signal=INT` does: twice, which was taken for a second Control-C.
    for _ in 0..2 {
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    }
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let result = json(&run.path("out.json"));
    assert_eq!(result["cascade"]["is_partial"], true);
    assert!(!run.path("cache").exists());
}
