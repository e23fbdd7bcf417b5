//! `cascade bench kv-suite`: its comparison, its refusals, and workloads that fail.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::{cascade, json, process_of_benchmark, run, stderr, wait_until};

/// A suite with the smallest model.
struct Suite {
    directory: TempDir,
}

impl Suite {
    fn new() -> Self {
        Self { directory: TempDir::new().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn command(&self, options: &[&str]) -> Command {
        let mut command = cascade();
        command.args(["bench", "kv-suite", "--unoptimised", "--memory-gb", "0.5"]).args(options);
        command.arg("--cache-dir").arg(self.path("cache"));
        command.arg("--results-dir").arg(self.path("results"));
        command
    }

    fn refusal(&self, options: &[&str]) -> String {
        let output = self.command(options).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{options:?}: {}", stderr(&output));
        assert!(!self.path("results").exists() && !self.path("cache").exists(), "{options:?}");
        stderr(&output)
    }

    /// Starts it, and waits until the long workload has stored something.
    fn start(&self, options: &[&str]) -> Child {
        let mut command = self.command(options);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let log = self.path("results/results_stress_storage_saturation.log");
        let blocks = self.path("cache/cascade-bench-kv");
        let has_some = || {
            log.exists() && fs::read_dir(&blocks).is_ok_and(|mut blocks| blocks.next().is_some())
        };
        wait_until(&has_some, "the workload stores nothing");
        child
    }

    fn states(&self) -> Vec<String> {
        let comparison = json(&self.path("results/comparison.json"));
        let runs = comparison["runs"].as_array().unwrap().iter();
        let state = |run: &Value| format!("{}: {}", run["name"], run["state"]).replace('"', "");
        runs.map(state).collect()
    }
}

#[test]
fn workloads_run_one_after_another_and_are_compared() {
    let suite = Suite::new();
    let report = suite.path("suite.html");
    let report_path = report.to_str().unwrap();
    let options = "-m tiny-1b --tensor-parallel 8 -u 2 -t 2 -w storage,gpu_only --report";
    let config = suite.path("config.yaml");
    fs::write(&config, "decode: {batch_size: 16}\n").unwrap();
    let files = [report_path, "--config", config.to_str().unwrap()];
    let options: Vec<&str> = options.split_whitespace().chain(files).collect();
    let output = suite.command(&options).output().unwrap();
    let (text, notices) = (String::from_utf8_lossy(&output.stdout), stderr(&output));
    assert_eq!(output.status.code(), Some(0), "{notices}");
    for part in [
        "2 workloads: about 4 seconds",
        "[1 of 2] gpu-only: KV in simulated GPU memory",
        "[2 of 2] storage-only: KV on the disk",
        "done after",
    ] {
        assert!(notices.contains(part), "{part} is not in\n{notices}");
    }
    for part in [
        "2 runs: 2 done.",
        "### RATES ###",
        "0.125 simulated",
        "### LATENCIES ###",
        "all: INVALID: unoptimised build",
        "gpu-only: simulated: GPU tier",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let comparison = json(&suite.path("results/comparison.json"));
    assert_eq!(suite.states(), ["gpu-only: done", "storage-only: done"]);
    let (gpu, storage) = (&comparison["runs"][0], &comparison["runs"][1]);
    assert_eq!((&gpu["gpu"]["gib"], &storage["gpu"]["gib"]), (&0.125.into(), &0.0.into()));
    let result = json(&suite.path("results/results_tier_storage_only.json"));
    assert_eq!(storage["figures"]["requests_completed"], result["requests_completed"]);
    assert_eq!(result["seed"], 42);
    assert_eq!(result["cascade"]["workload"]["tokens_per_decode_read"], 16);
    assert!(storage["command"].as_str().unwrap().starts_with("cascade bench --unoptimised kv "));
    assert!(fs::read_to_string(&report).unwrap().contains("<td>storage-only</td>"));
    assert!(!suite.path("cache").exists());

    let again = suite.command(&options).output().unwrap();
    assert_eq!(again.status.code(), Some(2));
    assert!(stderr(&again).contains("has results already"), "{}", stderr(&again));
}

#[test]
fn a_workload_that_fails_does_not_stop_the_others() {
    let suite = Suite::new();
    let options = "-m tiny-1b --tensor-parallel 8 -u 2 -U 2 -s 600 -r 2 \
                   -w storage-saturation,production";
    let mut child = suite.start(&options.split_whitespace().collect::<Vec<_>>());
    kill_process(process_of_benchmark(&suite.path("cache")), Signal::KILL).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1));
    assert_eq!(suite.states(), ["storage-saturation: failed", "production: done"]);
    let comparison = json(&suite.path("results/comparison.json"));
    let failure = comparison["runs"][0]["failure"].as_str().unwrap();
    assert!(failure.starts_with("killed: signal: 9"), "{failure}");
    assert_eq!(comparison["runs"][0]["figures"], Value::Null);
    assert!(!suite.path("cache").exists());
}

#[test]
fn an_interrupted_suite_compares_what_was_measured_and_leaves_nothing() {
    let suite = Suite::new();
    let options = "-m tiny-1b --tensor-parallel 8 -u 2 -U 2 -t 2 -s 600 \
                   -w cpu-only,storage-saturation,production";
    let mut child = suite.start(&options.split_whitespace().collect::<Vec<_>>());
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let expected = ["cpu-only: done", "storage-saturation: interrupted", "production: not run"];
    assert_eq!(suite.states(), expected);
    let comparison = json(&suite.path("results/comparison.json"));
    assert_eq!(comparison["is_interrupted"], true);
    assert!(!suite.path("cache").exists());
}

#[test]
fn a_suite_that_is_killed_ends_its_workload() {
    let suite = Suite::new();
    let options = "-m tiny-1b --tensor-parallel 8 -U 2 -s 600 -w storage-saturation";
    let mut child = suite.start(&options.split_whitespace().collect::<Vec<_>>());
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until(&|| !suite.path("cache").exists(), "the workload goes on without its parent");
}

#[test]
fn what_cannot_run_is_refused_before_anything_runs() {
    let suite = Suite::new();
    for (options, reason) in [
        ("-w tpu-only", "there is no workload \"tpu-only\""),
        ("-w production -t 5", "--tier-seconds (-t) has no effect on production"),
        ("-w cpu-only -U 5", "--high-users (-U) has no effect on cpu-only"),
        ("-w autoscale -u 5", "--users (-u) has no effect on autoscale"),
        ("-w capacity -m tiny-1b", "--model (-m) has no effect on capacity-autoscale"),
        ("-w storage-only --gpu-mem-gb 1", "--gpu-mem-gb has no effect on storage-only"),
        ("-w cpu-only -D 5", "--rag-num-docs (-D) has no effect without --enable-rag"),
        ("-u 50 -U 20", "--high-users 20 is less than --users 50"),
        ("--config none.yaml", "--config cannot be read: none.yaml"),
        ("-m gpt-2", "unknown model \"gpt-2\""),
        ("-m tiny-1b mistral-7b", "cannot be used with"),
        ("--gpu-mem-gb 0 -w gpu-only", "--gpu-mem-gb 0 leaves gpu-only without its tier"),
        ("--gpu-mem-gb -1", "--gpu-mem-gb -1 is not a size"),
        ("-w gpu-cpu --gpu-mem-gb 100000", "workload gpu-cpu needs 100000.5 GiB of memory"),
        ("--compatible", "--compatible and workload autoscale cannot be combined"),
        ("-t 0", "0 is not in 1..=86400"),
    ] {
        let refusal = suite.refusal(&options.split_whitespace().collect::<Vec<_>>());
        assert!(refusal.contains(reason), "{options}: {refusal}");
    }
    let output = cascade()
        .args(["bench", "kv-suite", "--unoptimised", "-w", "storage", "--memory-gb", "1e9"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("--memory-gb 1000000000 is no size"), "{}", stderr(&output));
}

/// The command lines of the original's documents, with the name of this command.
#[test]
fn the_commands_of_the_wrapper_parse_and_the_help_names_each_workload() {
    for line in [
        "",
        "-w storage-only",
        "-w production,autoscale",
        "-w mlperf_submission",
        "-m llama3.1-70b-instruct -t 90 -u 30 -U 100 -w cpu-storage,storage-saturation,production",
        "-t 90 -r 240 -s 10 -a 60 -R -D 20 -c /mnt/nvme",
        "llama3.1-70b-instruct",
    ] {
        let words = ["cascade", "bench", "kv-suite"].into_iter().chain(line.split_whitespace());
        let parsed = cascade_command::definition().try_get_matches_from(words);
        assert!(parsed.is_ok(), "{line}: {:?}", parsed.err());
    }
    let help = run(&["bench", "kv-suite", "--help"]);
    assert_eq!(help.status.code(), Some(0));
    let help = String::from_utf8_lossy(&help.stdout);
    for name in "gpu-only cpu-only storage-only gpu-cpu cpu-storage gpu-cpu-storage \
                 storage-saturation production autoscale capacity-autoscale mlperf_submission \
                 --workloads --results-dir"
        .split_whitespace()
    {
        assert!(help.contains(name), "{name} is not in\n{help}");
    }
}
