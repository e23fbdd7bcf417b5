//! `--xlsx-output`: the results as a spreadsheet, or as CSV.

use std::path::{Path, PathBuf};
use std::thread;

use cascade_kv_bench::export::sheets;
use cascade_kv_bench::result::KvResult;
use cascade_kv_bench::spreadsheet::{csv, xlsx};
use cascade_kv_bench::submission::files::run_datetime;
use cascade_runtime::{Clock, SystemClock};
use serde_json::{Value, json};

use super::args::{KvArgs, ProfileChoice};
use crate::{Failure, write_file};

/// Refuses standard output, before anything runs.
pub(super) fn check(args: &KvArgs) -> Result<(), Failure> {
    if args.xlsx_output.as_deref().is_some_and(|path| path.as_os_str() == "-") {
        return Err(Failure::usage(
            "--xlsx-output needs the name of a file",
            "give a name that ends in .xlsx or .csv",
        ));
    }
    Ok(())
}

/// Writes the file. A name without an ending gets `.csv`, as in the original. Returns its path.
pub(super) fn write(
    args: &KvArgs,
    path: &Path,
    result: &KvResult,
    json: &Value,
) -> Result<PathBuf, Failure> {
    let sheets = sheets(&parameters(args, result), json);
    let ends_with = |ending: &str| path.to_string_lossy().ends_with(ending);
    if ends_with(".xlsx") {
        write_file(path, &xlsx(&sheets))?;
        return Ok(path.to_owned());
    }
    let mut name = path.as_os_str().to_owned();
    if !ends_with(".csv") {
        name.push(".csv");
    }
    let rows = sheets.first().map_or_else(String::new, |summary| csv(&summary.rows));
    let path = PathBuf::from(name);
    write_file(&path, rows.as_bytes())?;
    Ok(path)
}

/// The parameters of the run by the original's names.
fn parameters(args: &KvArgs, result: &KvResult) -> Vec<(&'static str, Value)> {
    let threads = match args.precondition_threads {
        0 => thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    };
    let profile = match args.performance_profile {
        ProfileChoice::Latency => "latency",
        ProfileChoice::Throughput => "throughput",
    };
    let text = |path: &Option<PathBuf>, missing: &str| -> Value {
        path.as_ref().map_or(missing.into(), |path| path.display().to_string().into())
    };
    vec![
        ("Timestamp", now().into()),
        ("Model", args.model.as_str().into()),
        ("Num Users", args.num_users.into()),
        ("Duration (s)", args.duration.into()),
        ("GPU Memory per Card (GiB)", args.gpu_mem_gb.into()),
        ("Num GPUs", args.num_gpus.into()),
        ("Tensor Parallel", args.tensor_parallel.into()),
        ("Total GPU Memory (GiB)", (args.gpu_mem_gb * f64::from(args.num_gpus)).into()),
        ("CPU Memory (GiB)", args.cpu_mem_gb.into()),
        ("Generation Mode", args.generation_mode.name().into()),
        ("Performance Profile", profile.into()),
        ("Multi-turn", (!args.disable_multi_turn).into()),
        ("Prefix Caching", (!args.disable_prefix_caching).into()),
        ("RAG Enabled", args.enable_rag.into()),
        ("Autoscaling", args.enable_autoscaling.into()),
        ("Seed", result.workload.seed.into()),
        ("Max Concurrent Allocs", args.max_concurrent_allocs.into()),
        ("Request Rate", args.request_rate.into()),
        ("Max Requests", args.max_requests.into()),
        ("Dataset Path", text(&args.traces.dataset_path, "N/A")),
        ("Cache Dir", text(&args.cache_dir, "temp")),
        ("Storage Capacity (GiB)", args.storage_capacity_gb.into()),
        ("Precondition", args.precondition.into()),
        ("Precondition Size (GiB)", args.precondition_size_gb.into()),
        ("Precondition Threads", json!(threads)),
        ("Trace Speedup", args.traces.trace_speedup.unwrap_or(1.0).into()),
        ("Replay Cycles", args.traces.replay_cycles.unwrap_or(0).into()),
    ]
}

/// The time in UTC, as `2026-01-02 03:04:05`.
fn now() -> String {
    let digits = run_datetime(SystemClock.unix_ms() / 1000);
    let part = |from: usize, to: usize| digits.get(from..to).unwrap_or_default();
    format!(
        "{}-{}-{} {}:{}:{}",
        part(0, 4),
        part(4, 6),
        part(6, 8),
        part(9, 11),
        part(11, 13),
        part(13, 15)
    )
}
