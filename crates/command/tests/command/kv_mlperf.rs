//! `cascade bench kv --mlperf`: its folders and files, its refusals, and ranks that fail.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::{cascade, json, process_of_benchmark, stderr, wait_until};

/// A submission with the least that one rank of many stores.
struct Submission {
    directory: TempDir,
}

impl Submission {
    fn new() -> Self {
        Self { directory: TempDir::new().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn command(&self, options: &[&str]) -> Command {
        let mut command = cascade();
        command.args(["bench", "kv", "--unoptimised"]).args(options);
        command.arg("--cache-dir").arg(self.path("cache"));
        // What starts the tests may be a job of a cluster itself.
        for name in ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"] {
            command.env_remove(name);
        }
        command
    }

    /// A rehearsal with a small model.
    fn rehearsal(&self, options: &[&str]) -> Command {
        let small = "--mlperf whatif --option 1 --trials 1 --settle-seconds 0 --model tiny-1b \
            --num-users 2 --num-gpus 8 --tensor-parallel 8 --storage-capacity-gb 1";
        let small: Vec<&str> = small.split_whitespace().collect();
        let mut command = self.command(&[&small, options].concat());
        command.arg("--results-dir").arg(self.path("results"));
        command
    }

    fn refusal(&self, mut command: Command) -> String {
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(!self.path("cache").exists());
        stderr(&output)
    }

    fn rank(&self, rank: u32) -> PathBuf {
        self.path("results").join(format!("option_1/trial_0/rank_{rank}"))
    }

    /// Starts a long run of two ranks, and waits until both have stored something.
    fn start(&self) -> Child {
        let mut command = self.rehearsal(&["--duration", "600", "--ranks", "2"]);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        for rank in ["cache/rank_0", "cache/rank_1"] {
            let blocks = self.path(rank).join("cascade-bench-kv");
            let has_some = || fs::read_dir(&blocks).is_ok_and(|mut it| it.next().is_some());
            wait_until(&has_some, "no blocks of a rank");
        }
        child
    }
}

/// The files in a directory whose names begin and end so.
fn files(directory: &Path, begin: &str, end: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap());
    let entries = entries.filter(|entry| {
        let name = entry.file_name().into_string().unwrap();
        name.starts_with(begin) && name.ends_with(end)
    });
    entries.map(|entry| entry.path()).collect()
}

fn result_of(directory: &Path) -> Value {
    let found = files(directory, "kvcache_results_", ".json");
    assert_eq!(found.len(), 1, "{found:?}");
    json(&found[0])
}

#[test]
fn a_submission_writes_the_folders_and_files_of_the_original() {
    let run = Submission::new();
    let output = run.rehearsal(&["--duration", "1", "--ranks", "2"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let results = run.path("results");
    let ranks = [0, 1].map(|rank| result_of(&run.rank(rank)));
    assert_eq!((&ranks[0]["seed"], &ranks[1]["seed"]), (&42.into(), &43.into()));
    let rate = |it: &Value| {
        it["summary"]["cache_stats"]["tier_storage_read_bandwidth_gbps"].as_f64().unwrap()
    };
    let summary = json(&results.join("summary.json"));
    let option = &summary["options"]["1"];
    let sum = option["aggregated_read_bandwidth_gbps"].as_f64().unwrap();
    assert!((sum - rate(&ranks[0]) - rate(&ranks[1])).abs() < 1e-9);
    assert!(option["aggregated_p95_latency_ms"].is_f64());
    assert_eq!((&option["rank_count"], &option["trial_count"]), (&2.into(), &1.into()));
    assert_eq!((&summary["total_ranks"], &summary["host_count"]), (&2.into(), &1.into()));
    assert_eq!(summary["partial_failure"], false);
    assert_eq!(summary["cascade"]["is_valid_closed_submission"], false);
    let later = json(&files(&results, "kvcache_run_summary_", ".json")[0]);
    assert!(later["options"]["1"]["aggregated_device_write_p95_ms"].is_f64());
    let metadata = json(&files(&results, "kv_cache_", "_metadata.json")[0]);
    assert_eq!(metadata["parameters"]["num_users"], 2);
    let text = String::from_utf8_lossy(&output.stdout);
    for part in ["NOT A VALID CLOSED SUBMISSION", "within window", "the division is whatif"] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    assert!(!run.path("cache").exists());

    let again = run.refusal(run.rehearsal(&["--duration", "1"]));
    assert!(again.contains("has results already"), "{again}");
}

#[test]
fn what_a_division_does_not_permit_is_refused_by_name() {
    let run = Submission::new();
    let closed = ["--mlperf", "closed", "--results-dir", "unused"];
    for (options, name) in [
        (&["--model", "tiny-1b"][..], "--mlperf closed and --model"),
        (&["--seed", "1"], "--mlperf closed and --seed"),
        (&["--disable-multi-turn"], "--mlperf closed and --disable-multi-turn"),
        (&["--output", "x.json"], "--mlperf closed and --output"),
    ] {
        let refusal = run.refusal(run.command(&[&closed[..], options].concat()));
        assert!(refusal.contains(name), "{refusal}");
    }
    let open = ["--mlperf", "open", "--results-dir", "unused", "--max-concurrent-allocs", "1"];
    let refusal = run.refusal(run.command(&open));
    assert!(refusal.contains("--mlperf open and --max-concurrent-allocs"), "{refusal}");
    let refusal = run.refusal(run.command(&["--mlperf", "closed"]));
    assert!(refusal.contains("add --results-dir"), "{refusal}");
    let refusal = run.refusal(run.command(&["--trials", "2"]));
    assert!(refusal.contains("--mlperf"), "{refusal}");
    let refusal = run.refusal(run.rehearsal(&["--enable-autoscaling"]));
    assert!(refusal.contains("--compatible and --enable-autoscaling"), "{refusal}");
}

#[test]
fn a_killed_rank_is_missing_and_the_others_report_when_the_run_is_stopped() {
    let run = Submission::new();
    let mut child = run.start();
    kill_process(process_of_benchmark(&run.path("cache/rank_1")), Signal::KILL).unwrap();
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let summary = json(&run.path("results/summary.json"));
    assert_eq!(summary["partial_failure"], true);
    let option = &summary["options"]["1"];
    let missing = option["missing_files"].as_array().unwrap();
    assert_eq!(missing.len(), 1, "{missing:?}");
    assert!(missing[0].as_str().unwrap().ends_with("rank_1"));
    let failures = summary["trial_failures"]["1"].to_string();
    assert!(failures.contains("rank 1: killed"), "{failures}");
    assert_eq!(result_of(&run.rank(0))["cascade"]["is_partial"], true);
    assert!(!run.path("cache").exists());
}

/// Schedulers of clusters end a job with SIGTERM, and give it some seconds.
#[test]
fn a_terminated_submission_writes_its_summary_and_leaves_no_kv() {
    let run = Submission::new();
    let mut child = run.start();
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let summary = json(&run.path("results/summary.json"));
    assert_eq!(summary["partial_failure"], true);
    let failures = summary["trial_failures"]["1"].to_string();
    for rank in 0..2 {
        assert!(failures.contains(&format!("rank {rank}: stopped before its end")), "{failures}");
        assert_eq!(result_of(&run.rank(rank))["cascade"]["is_partial"], true);
    }
    assert!(!run.path("cache").exists());
}

/// Each rank would otherwise take nine tenths of what is free.
#[test]
fn ranks_of_a_host_divide_its_free_space_and_memory() {
    let run = Submission::new();
    let space = rustix::fs::statvfs(run.directory.path()).unwrap();
    let free = space.f_bavail * space.f_frsize;
    let options = "--mlperf whatif --option 1 --trials 1 --settle-seconds 0 --model tiny-1b \
        --num-users 2 --num-gpus 8 --tensor-parallel 8 --duration 1 --ranks 4";
    let options: Vec<&str> = options.split_whitespace().collect();
    let mut command = run.command(&options);
    let output = command.arg("--results-dir").arg(run.path("results")).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let sizes = (0..4).map(|rank| {
        let ours = &result_of(&run.rank(rank))["cascade"];
        let words: Vec<_> = ours["environment"]["argv"].as_array().unwrap().clone();
        let at = words.iter().position(|word| word == "--memory-shares").unwrap();
        assert_eq!(words[at + 1], "4");
        ours["tiers"]["storage"]["bytes"].as_u64().unwrap()
    });
    let all: u64 = sizes.sum();
    // Other processes may fill the disk meanwhile, and may give back as much as it has.
    assert!(all > 0 && all < free * 2, "{all} of {free}");
}

#[test]
fn ranks_end_with_the_process_that_started_them() {
    let run = Submission::new();
    let mut child = run.start();
    child.kill().unwrap();
    child.wait().unwrap();
    let are_gone = || (0..2).all(|rank| !run.path("cache").join(format!("rank_{rank}")).exists());
    wait_until(&are_gone, "a rank goes on without its parent");
}

#[test]
fn ranks_of_a_launcher_meet_and_the_first_one_writes_the_summary() {
    let run = Submission::new();
    let ranks = ["0", "1"].map(|rank| {
        let mut command = run.rehearsal(&["--duration", "1"]);
        command.env("PMI_RANK", rank).env("PMI_SIZE", "2").env("MPI_LOCALNRANKS", "2");
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    });
    for rank in ranks {
        let output = rank.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    }
    let summary = json(&run.path("results/summary.json"));
    assert_eq!((&summary["total_ranks"], &summary["npernode"]), (&2.into(), &2.into()));
    assert_eq!(summary["options"]["1"]["missing_files"].as_array().unwrap().len(), 0);
}

/// The commands of the original's first README: five scenarios and two submissions.
#[test]
fn the_commands_of_the_original_parse_word_for_word() {
    for line in [
        "--model llama3.1-8b --num-users 50 --duration 180 --gpu-mem-gb 0 --cpu-mem-gb 4 \
         --generation-mode realistic --cache-dir /mnt/nvme --seed 42 --output results.json",
        "--model llama3.1-8b --num-users 100 --duration 300 --gpu-mem-gb 16 --cpu-mem-gb 32 \
         --generation-mode realistic --cache-dir /mnt/nvme --seed 42 --output results.json",
        "--model llama3.1-8b --num-users 20 --duration 300 --gpu-mem-gb 16 --cpu-mem-gb 32 \
         --enable-autoscaling --autoscaler-mode qos --generation-mode realistic \
         --cache-dir /mnt/nvme --seed 42 --output results.json",
        "--model llama3.1-70b-instruct --num-users 10 --duration 180 --gpu-mem-gb 0 \
         --cpu-mem-gb 4 --enable-autoscaling --autoscaler-mode capacity --generation-mode none \
         --cache-dir /mnt/nvme --seed 42 --output results.json",
        "--model llama3.1-8b --num-users 30 --duration 300 --gpu-mem-gb 16 --cpu-mem-gb 32 \
         --enable-rag --rag-num-docs 20 --generation-mode realistic --cache-dir /mnt/nvme \
         --seed 42 --output results.json",
        "--model llama3.1-8b --num-users 150 --duration 600 --gpu-mem-gb 0 --cpu-mem-gb 4 \
         --generation-mode realistic --performance-profile throughput --cache-dir /mnt/nvme \
         --seed 42 --output mlperf_v3_submission_8b.json",
        "--model llama3.1-70b-instruct --num-users 40 --duration 600 --gpu-mem-gb 0 \
         --cpu-mem-gb 4 --generation-mode realistic --performance-profile throughput \
         --cache-dir /mnt/nvme --seed 42 --output mlperf_v3_submission_70b.json",
    ] {
        let words = ["cascade", "bench", "kv"].into_iter().chain(line.split_whitespace());
        let parsed = cascade_command::definition().try_get_matches_from(words);
        assert!(parsed.is_ok(), "{line}: {:?}", parsed.err());
    }
}
