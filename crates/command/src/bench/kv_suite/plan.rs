//! What a suite runs and where: refuses what cannot run, before anything runs.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

use cascade_block::ByteSize;
use cascade_kv_bench::GIB;
use cascade_kv_bench::directory::BenchDirectory;
use cascade_kv_bench::submission::files::run_datetime;
use cascade_kv_bench::suite::SuiteWorkload;
use cascade_kv_bench::suite::plan::{SuiteOptions, SuiteRun};
use cascade_runtime::{Clock, SystemClock};

use super::KvSuiteArgs;
use crate::bench::kv;
use crate::{Failure, built};

/// Memory of a run beside its tiers.
const OTHER_GIB: f64 = 0.25;

/// A suite before its start.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) options: SuiteOptions,
    pub(super) runs: Vec<SuiteRun>,
    pub(super) cache_dir: PathBuf,
    pub(super) results_dir: PathBuf,
    workloads: Vec<SuiteWorkload>,
    /// The file of settings of all runs.
    config: Option<PathBuf>,
    /// Whether the directory of the KV is not there yet.
    cache_is_new: bool,
}

impl Plan {
    pub(super) fn new(args: &KvSuiteArgs) -> Result<Self, Failure> {
        let workloads = args.chosen()?;
        args.check(&workloads)?;
        let available = cascade_memory::available_bytes(&|path| fs::read_to_string(path));
        let options = args.options(available)?;
        let results_dir = args.results_dir.clone().unwrap_or_else(|| {
            let now = run_datetime(SystemClock.unix_ms() / 1000);
            PathBuf::from(format!("kv_suite_{now}"))
        });
        let runs = options.runs(&workloads);
        let cache_dir = args.cache_dir();
        let cache_is_new = !cache_dir.exists();
        let config = args.config.clone();
        let plan = Self { options, runs, cache_dir, results_dir, workloads, config, cache_is_new };
        for run in &plan.runs {
            check_run(run, plan.workload_of(run), available)?;
        }
        plan.check_directories()?;
        Ok(plan)
    }

    /// Refuses directories that are used already: neither old nor new results would be whole.
    fn check_directories(&self) -> Result<(), Failure> {
        let mut files = self.runs.iter().map(|run| self.result_file(run));
        if let Some(found) = files.find(|file| file.exists()) {
            return Err(Failure::usage(
                format!("--results-dir has results already: {}", found.display()),
                "give a new directory",
            ));
        }
        // Each run takes the directory itself; one that cannot is refused now.
        BenchDirectory::claim(&self.cache_dir, false)?;
        Ok(())
    }

    /// Removes what a run that was killed has left.
    pub(super) fn clean_up(&self) {
        // What cannot be removed is removed by the next run in this directory.
        drop(BenchDirectory::claim(&self.cache_dir, false));
        if self.cache_is_new {
            // Only if it is empty: others may have put files into it meanwhile.
            drop(fs::remove_dir(&self.cache_dir));
        }
    }

    pub(super) fn create_results(&self) -> Result<(), Failure> {
        let created = fs::create_dir_all(&self.results_dir);
        created.map_err(|source| Failure::write(&self.results_dir, source))
    }

    /// How many workloads, and how many runs they are.
    pub(super) fn counts(&self) -> String {
        let count = |count: usize, name: &str| match count {
            1 => format!("1 {name}"),
            count => format!("{count} {name}s"),
        };
        let workloads = count(self.workloads.len(), "workload");
        if self.workloads.len() == self.runs.len() {
            return workloads;
        }
        format!("{workloads} with {}", count(self.runs.len(), "run"))
    }

    /// Where a run is in the suite: `[3 of 11]`.
    pub(super) fn position(&self, at: usize) -> String {
        let workload = self.runs[at].workload;
        let number = self.workloads.iter().position(|it| *it == workload).unwrap_or(0) + 1;
        format!("[{number} of {}]", self.workloads.len())
    }

    /// Seconds of the windows from this run on.
    pub(super) fn seconds_from(&self, at: usize) -> u64 {
        self.runs[at..].iter().map(|run| run.seconds).sum()
    }

    pub(super) fn result_file(&self, run: &SuiteRun) -> PathBuf {
        self.results_dir.join(run.file)
    }

    /// The output of a run.
    pub(super) fn log(&self, run: &SuiteRun) -> PathBuf {
        self.result_file(run).with_extension("log")
    }

    /// The command line of a run, as anybody could run it by hand.
    pub(super) fn arguments(&self, run: &SuiteRun) -> Vec<OsString> {
        let mut all: Vec<OsString> = vec!["bench".into()];
        if built::build().warning().is_some() {
            all.push("--unoptimised".into());
        }
        all.push("kv".into());
        all.extend(self.workload_of(run));
        all.extend(["--cache-dir".into(), self.cache_dir.clone().into()]);
        all.extend(["--output".into(), self.result_file(run).into(), "--ends-with-input".into()]);
        all
    }

    /// The options of a run without its directories.
    fn workload_of(&self, run: &SuiteRun) -> Vec<OsString> {
        let mut all: Vec<OsString> = run.arguments.iter().map(OsString::from).collect();
        if let Some(path) = &self.config {
            all.extend(["--config".into(), path.clone().into()]);
        }
        all
    }

    /// The same as text, to be run by hand.
    pub(super) fn command(&self, run: &SuiteRun) -> String {
        let arguments = self.arguments(run);
        let shown = arguments.iter().filter(|it| *it != "--ends-with-input");
        let words = shown.map(|it| it.to_string_lossy().into_owned());
        ["cascade".to_owned()].into_iter().chain(words).collect::<Vec<_>>().join(" ")
    }
}

/// Refuses a run that would refuse its options at its start.
fn check_run(
    run: &SuiteRun,
    options: Vec<OsString>,
    available: Option<u64>,
) -> Result<(), Failure> {
    kv::check(options).map_err(|failure| match failure {
        Failure::Usage { what, advice } => {
            Failure::usage(format!("workload {}: {what}", run.name), advice)
        }
        other => other,
    })?;
    let needed = run.gpu_gib + run.cpu_gib + OTHER_GIB;
    match available {
        Some(available) if needed * GIB > available as f64 => Err(Failure::usage(
            format!(
                "workload {} needs {needed} GiB of memory ({} for a simulated GPU, {} of \
                 DRAM); {} are available",
                run.name,
                run.gpu_gib,
                run.cpu_gib,
                ByteSize(available).rounded(),
            ),
            "lower --memory-gb or --gpu-mem-gb, or leave the workload out of --workloads",
        )),
        _ => Ok(()),
    }
}
