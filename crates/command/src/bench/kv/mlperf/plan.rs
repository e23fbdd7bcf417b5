//! What a submission runs: its options, the command line of each rank, and what is refused.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use cascade_kv_bench::submission::{
    DURATION_SECONDS, Division, OPTIONS, SEED, SETTLE_SECONDS, Sequence, SubmissionOption, TRIALS,
};
use serde_json::{Map, Value};

use super::launcher::Ranks;
use crate::bench::kv::args::KvArgs;
use crate::bench::kv::mlperf_args::DivisionChoice;
use crate::{Failure, built};

/// Options that say how a submission is run, not what each rank does.
const OF_SUBMISSION: [&str; 9] = [
    "mlperf",
    "option",
    "trials",
    "ranks",
    "settle-seconds",
    "results-dir",
    "cache-dir",
    "compatible",
    "unoptimised",
];
/// Options that one process alone may have.
const OF_ONE_PROCESS: [&str; 8] = [
    "output",
    "report",
    "keep",
    "xlsx-output",
    "io-trace-log",
    "ends-with-input",
    "memory-shares",
    "disk-shares",
];

/// A submission before its start.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) division: Division,
    pub(super) options: Vec<SubmissionOption>,
    pub(super) sequence: Sequence,
    pub(super) ranks: Ranks,
    pub(super) results_dir: PathBuf,
    pub(super) cache_dir: PathBuf,
    /// Options that were given, for each rank.
    given: Vec<(String, Vec<OsString>)>,
    seed: u64,
}

impl Plan {
    /// Refuses what the division does not permit, before anything runs.
    pub(super) fn new(args: &KvArgs, ranks: Ranks) -> Result<Self, Failure> {
        let mlperf = &args.mlperf;
        let division = mlperf.mlperf.map_or(Division::Closed, DivisionChoice::division);
        check_given(division, args)?;
        let Some(results_dir) = mlperf.results_dir.clone() else {
            return Err(Failure::usage(
                "--mlperf needs a directory for the results",
                "add --results-dir DIR, on another file system than --cache-dir",
            ));
        };
        let cache_dir = args.cache_dir();
        let is_chosen =
            |it: &&SubmissionOption| mlperf.option.is_none_or(|number| number == it.number);
        let duration_seconds =
            if args.given.has("duration") { args.duration } else { DURATION_SECONDS };
        let sequence = Sequence {
            options: OPTIONS.iter().filter(is_chosen).count(),
            trials: mlperf.trials.unwrap_or(TRIALS),
            duration_seconds,
            settle_seconds: mlperf.settle_seconds.unwrap_or(SETTLE_SECONDS),
            has_own_file_system: device(&results_dir) != device(&cache_dir),
        };
        let given = args.given.0.iter().filter(|(name, _)| {
            let name = name.as_str();
            !OF_SUBMISSION.contains(&name) && name != "seed" && name != "duration"
        });
        let plan = Self {
            division,
            options: OPTIONS.iter().filter(is_chosen).copied().collect(),
            sequence,
            ranks,
            results_dir,
            cache_dir,
            given: given.cloned().collect(),
            seed: args.seed.unwrap_or(SEED),
        };
        for option in &plan.options {
            plan.check_rank(option)?;
        }
        plan.check_results()?;
        Ok(plan)
    }

    /// Creates the directories. Returns whether that of the KV is new.
    pub(super) fn create_directories(&self) -> Result<bool, Failure> {
        let create = |path: &Path| match fs::create_dir(path) {
            Ok(()) => Ok(true),
            Err(_) if path.is_dir() => Ok(false),
            Err(source) => Err(Failure::write(path, source)),
        };
        create(&self.results_dir)?;
        create(&self.cache_dir)
    }

    /// The directory of a rank's results.
    pub(super) fn rank_directory(&self, option: u8, trial: u32, rank: u32) -> PathBuf {
        let trial = format!("option_{option}/trial_{trial}/rank_{rank}");
        self.results_dir.join(trial)
    }

    /// The directory of a rank's KV.
    pub(super) fn rank_cache(&self, rank: u32) -> PathBuf {
        self.cache_dir.join(format!("rank_{rank}"))
    }

    /// The command line of a rank: what anybody could run by hand.
    pub(super) fn arguments(
        &self,
        option: &SubmissionOption,
        rank: u32,
        output: &Path,
    ) -> Vec<OsString> {
        let mut all: Vec<OsString> = vec!["bench".into()];
        if built::build().warning().is_some() {
            all.push("--unoptimised".into());
        }
        all.push("kv".into());
        all.extend(self.workload(option));
        all.extend(["--seed".into(), (self.seed + u64::from(rank)).to_string().into()]);
        all.extend(["--cache-dir".into(), self.rank_cache(rank).into()]);
        all.extend(["--output".into(), output.into(), "--ends-with-input".into()]);
        let disk = self.disk_shares(rank).to_string();
        let memory = self.ranks.of_host.to_string();
        all.extend(["--disk-shares".into(), disk.into(), "--memory-shares".into(), memory.into()]);
        all
    }

    /// The ranks of this host that store on the same file system as this one. A rank may have a
    /// file system of its own, mounted on its directory.
    fn disk_shares(&self, rank: u32) -> u32 {
        let own = device(&self.rank_cache(rank));
        if own == device(&self.cache_dir) { self.ranks.of_host } else { 1 }
    }

    /// The workload of an option, with the options that were given in the place of its own.
    fn workload(&self, option: &SubmissionOption) -> Vec<OsString> {
        let mut all: Vec<OsString> = vec!["--compatible".into()];
        for (name, value) in option.arguments(self.sequence.duration_seconds) {
            if !self.given.iter().any(|(given, _)| given == name) {
                all.extend([format!("--{name}").into(), value.into()]);
            }
        }
        for (name, values) in &self.given {
            all.push(format!("--{name}").into());
            all.extend(values.iter().cloned());
        }
        all
    }

    /// The workload of the first option by the names of the original's metadata.
    pub(super) fn parameters(&self) -> Result<Map<String, Value>, Failure> {
        let Some(option) = self.options.first() else { return Ok(Map::new()) };
        let args = KvArgs::parse(self.workload(option))?;
        let mut all = Map::new();
        let mut add = |name: &str, value: Value| all.insert(name.to_owned(), value);
        add("model", args.model.clone().into());
        add("num_users", args.num_users.into());
        add("duration", args.duration.into());
        add("gpu_mem_gb", args.gpu_mem_gb.into());
        add("cpu_mem_gb", args.cpu_mem_gb.into());
        add("max_concurrent_allocs", args.max_concurrent_allocs.into());
        add("cache_dir", self.cache_dir.display().to_string().into());
        add("generation_mode", args.generation_mode.name().into());
        add("seed", self.seed.into());
        add("trials", self.sequence.trials.into());
        add("settle_seconds", self.sequence.settle_seconds.into());
        Ok(all)
    }

    /// Refuses a command line that each rank would refuse after the wait.
    fn check_rank(&self, option: &SubmissionOption) -> Result<(), Failure> {
        KvArgs::parse(self.workload(option))?.check_all()
    }

    /// A directory with results is not written to: neither the old nor the new would be whole.
    fn check_results(&self) -> Result<(), Failure> {
        let ranks = self.ranks.here();
        let ends = self.options.iter().flat_map(|option| {
            ranks.clone().map(|rank| self.rank_directory(option.number, 0, rank))
        });
        let mut found = ends.filter(|path| path.exists());
        let summary = self.results_dir.join("summary.json");
        match found.next().or_else(|| summary.exists().then_some(summary)) {
            None => Ok(()),
            Some(path) => Err(Failure::usage(
                format!("--results-dir has results already: {}", path.display()),
                "give a new directory; without --option, all three options share one",
            )),
        }
    }
}

fn check_given(division: Division, args: &KvArgs) -> Result<(), Failure> {
    let refused = |name: &str| -> Option<(&'static str, &'static str)> {
        if OF_ONE_PROCESS.contains(&name) {
            let reason = "each rank of each trial writes its own results";
            return Some((reason, "leave it out; --results-dir has the results"));
        }
        let is_changed = !OF_SUBMISSION.contains(&name) && name != "duration";
        match division {
            Division::Closed if is_changed => {
                Some(("closed fixes the workload", "leave it out, or use --mlperf open or whatif"))
            }
            Division::Open if name == "max-concurrent-allocs" => {
                Some(("open leaves it as the option says", "leave it out, or use --mlperf whatif"))
            }
            _ => None,
        }
    };
    let first = args.given.0.iter().find_map(|(name, _)| Some((name, refused(name)?)));
    first.map_or(Ok(()), |(name, (reason, advice))| {
        Err(Failure::usage(
            format!("--mlperf {} and --{name} cannot be combined: {reason}", division.name()),
            advice,
        ))
    })
}

/// The file system of a path, or of the directory above it that exists.
fn device(path: &Path) -> Option<u64> {
    let absolute = std::path::absolute(path).ok()?;
    let found = absolute.ancestors().find_map(|path| fs::metadata(path).ok())?;
    Some(found.dev())
}
