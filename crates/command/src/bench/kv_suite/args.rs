//! The options of `cascade bench kv-suite`: letters and defaults of the original's wrapper.

use std::path::{Path, PathBuf};

use cascade_kv_bench::GIB;
use cascade_kv_bench::suite::plan::{Lengths, SuiteOptions};
use cascade_kv_bench::suite::{Length, SuiteWorkload, parse_list};
use clap::Args;

use crate::Failure;

/// The model, unless it is given.
const MODEL: &str = "llama3.1-8b";
/// The seed, unless it is given.
const SEED: u64 = 42;
/// Documents of --enable-rag, unless their number is given.
const DOCUMENTS: u32 = 10;
/// Sizes of memory that make sense, in GiB.
const MEMORY_GIB: std::ops::RangeInclusive<f64> = 0.25..=131_072.0;
/// Where the KV goes, unless it is given: the first that is there.
const DISKS: [&str; 2] = ["/mnt/nvme", "/mnt/ssd"];

/// Several workloads of `bench kv` one after another, and one comparison.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade bench kv-suite --cache-dir /mnt/nvme --report suite.html
      All eleven workloads: about 45 minutes, and what they store before their windows.
  cascade bench kv-suite -w storage-only -c /mnt/nvme
      Only the disk.
  cascade bench kv-suite -m llama3.1-70b-instruct -t 90 -u 30 -U 100 -c /mnt/nvme \\
      -w cpu-storage,storage-saturation,production
      A large model, with other lengths and numbers of users.
  cascade bench kv-suite --compatible -w storage-only,cpu-storage -c /mnt/nvme
      As the original benchmark stores and counts.

Workloads:
  gpu-only            simulated GPU memory, and 4 GiB of DRAM
  cpu-only            half of the memory as DRAM
  storage-only        4 GiB of DRAM, so that most KV is read from the disk
  gpu-cpu             simulated GPU memory, and half of the memory as DRAM
  cpu-storage         high load on an eighth of the memory as DRAM
  gpu-cpu-storage     the same with simulated GPU memory
  storage-saturation  high load on 4 GiB of DRAM
  production          half of the memory as DRAM, with --gpu-mem-gb a simulated GPU, too
  autoscale           users are added while latencies keep their limits
  capacity-autoscale  users are added while the rate grows: llama3.1-70b-instruct, no generation
  mlperf_submission   the three workloads of an MLPerf submission, one trial each, --compatible

Names may be written with _ or -. Each workload is a run of `cascade bench kv`, whose help explains
what a run does. Cascade's store writes each block through to files, in gpu-only and cpu-only, too:
the table shows which tier the bytes were read from. GPU memory is simulated in memory of this host,
and so is token generation, except in capacity-autoscale and mlperf_submission.

A workload that fails does not stop the others. Exit code 0: all workloads left results that can be
trusted; 1: one failed, or is INVALID; 130: interrupted, and what was measured is reported.")]
pub(crate) struct KvSuiteArgs {
    /// Workloads to run, with commas between them [default: all].
    #[arg(short = 'w', long, value_name = "LIST", help_heading = "Workloads")]
    workloads: Option<String>,
    /// Model whose KV is stored; capacity-autoscale and `mlperf_submission` have their own
    /// ones [default: llama3.1-8b].
    #[arg(short = 'm', long, value_name = "MODEL", help_heading = "Workloads")]
    #[arg(conflicts_with = "model_name")]
    model: Option<String>,
    /// The same as --model, as in the original.
    #[arg(value_name = "MODEL")]
    model_name: Option<String>,
    /// Ranks that share the KV of a token; each block has the part of one. GPU memory and DRAM are
    /// those of this rank [default: 1].
    #[arg(long, value_name = "N", help_heading = "Workloads")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=4096))]
    tensor_parallel: Option<u32>,
    /// Users of gpu-only, cpu-only, storage-only, gpu-cpu and production [default: 50].
    #[arg(short = 'u', long, value_name = "N", help_heading = "Workloads")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=100_000))]
    users: Option<u32>,
    /// Users of cpu-storage, gpu-cpu-storage and storage-saturation [default: 10 for each GiB of
    /// memory, 50 to 300, at least --users].
    #[arg(short = 'U', long, value_name = "N", help_heading = "Workloads")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=100_000))]
    high_users: Option<u32>,
    /// Store documents; a tenth of the requests read parts of them.
    #[arg(short = 'R', long, help_heading = "Workloads")]
    enable_rag: bool,
    /// Number of documents of --enable-rag [default: 10].
    #[arg(short = 'D', long, value_name = "N", help_heading = "Workloads")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rag_num_docs: Option<u32>,
    /// Store whole requests as files and count as the original benchmark does.
    #[arg(long, help_heading = "Workloads")]
    compatible: bool,
    /// Take settings from FILE, as `cascade bench kv --config` does.
    #[arg(long, value_name = "FILE", help_heading = "Workloads")]
    pub(super) config: Option<PathBuf>,
    /// Seed of all workloads [default: 42].
    #[arg(long, value_name = "N", help_heading = "Workloads")]
    seed: Option<u64>,

    /// Length of each of the first six workloads [default: 120].
    #[arg(short = 't', long, value_name = "SECONDS", help_heading = "Lengths")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    tier_seconds: Option<u64>,
    /// Length of storage-saturation [default: 180].
    #[arg(short = 's', long, value_name = "SECONDS", help_heading = "Lengths")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    saturation_seconds: Option<u64>,
    /// Length of production [default: 180].
    #[arg(short = 'r', long, value_name = "SECONDS", help_heading = "Lengths")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    production_seconds: Option<u64>,
    /// Length of autoscale, and the longest one of capacity-autoscale [default: 300].
    #[arg(short = 'a', long, value_name = "SECONDS", help_heading = "Lengths")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    autoscale_seconds: Option<u64>,
    /// Length of each of the three runs of `mlperf_submission` [default: 300].
    #[arg(long, value_name = "SECONDS", help_heading = "Lengths")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    submission_seconds: Option<u64>,

    /// Directory on the disk to measure [default: /mnt/nvme or /mnt/ssd if it is there, else one in
    /// the directory of temporary files].
    #[arg(short = 'c', long, value_name = "DIR", help_heading = "Machine")]
    cache_dir: Option<PathBuf>,
    /// GiB of memory that the tiers are sized by [default: what is available].
    #[arg(long, value_name = "GIB", help_heading = "Machine", allow_negative_numbers = true)]
    memory_gb: Option<f64>,
    /// GiB of the simulated GPU; production and autoscale have one, too, if it is given
    /// [default: a quarter of the memory, at most 16].
    #[arg(long, value_name = "GIB", help_heading = "Machine", allow_negative_numbers = true)]
    gpu_mem_gb: Option<f64>,

    /// Directory of the result files, new or without them [default: `kv_suite_` and the time].
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub(super) results_dir: Option<PathBuf>,
    /// Write the comparison as JSON to FILE; - is standard output, and the tables go to standard
    /// error [default: comparison.json in the directory of the result files].
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(super) output: Option<PathBuf>,
    /// Write the comparison as one self-contained HTML file.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(super) report: Option<PathBuf>,
}

impl KvSuiteArgs {
    pub(crate) fn json(&self) -> Option<&Path> {
        self.output.as_deref()
    }

    /// The workloads to run.
    pub(super) fn chosen(&self) -> Result<Vec<SuiteWorkload>, Failure> {
        Ok(parse_list(self.workloads.as_deref().unwrap_or("all"))?)
    }

    pub(super) fn cache_dir(&self) -> PathBuf {
        let disk = || DISKS.iter().map(PathBuf::from).find(|disk| disk.is_dir());
        let temporary = || std::env::temp_dir().join("cascade-bench-kv");
        self.cache_dir.clone().or_else(disk).unwrap_or_else(temporary)
    }

    /// What the runs depend on. `available` are the bytes of memory that are.
    pub(super) fn options(&self, available: Option<u64>) -> Result<SuiteOptions, Failure> {
        let memory_gib = match (self.memory_gb, available) {
            (Some(gib), _) => gib,
            (None, Some(bytes)) => bytes as f64 / GIB,
            (None, None) => {
                return Err(Failure::usage(
                    "the size of the memory is unknown",
                    "add --memory-gb, which the tiers are sized by",
                ));
            }
        };
        if !MEMORY_GIB.contains(&memory_gib) {
            return Err(Failure::usage(
                format!("--memory-gb {memory_gib} is no size to divide into tiers"),
                format!("give a number of GiB from {} to {}", MEMORY_GIB.start(), MEMORY_GIB.end()),
            ));
        }
        let lengths = Lengths::default();
        Ok(SuiteOptions {
            model: self.given_model().unwrap_or(MODEL).to_owned(),
            ranks: self.tensor_parallel.unwrap_or(1),
            memory_gib,
            gpu_gib: self.gpu_mem_gb,
            users: self.users,
            many_users: self.high_users,
            documents: self.enable_rag.then_some(self.rag_num_docs.unwrap_or(DOCUMENTS)),
            lengths: Lengths {
                tier: self.tier_seconds.unwrap_or(lengths.tier),
                saturation: self.saturation_seconds.unwrap_or(lengths.saturation),
                production: self.production_seconds.unwrap_or(lengths.production),
                autoscale: self.autoscale_seconds.unwrap_or(lengths.autoscale),
                submission: self.submission_seconds.unwrap_or(lengths.submission),
            },
            is_compatible: self.compatible,
            seed: self.seed.unwrap_or(SEED),
        })
    }

    fn given_model(&self) -> Option<&str> {
        self.model.as_deref().or(self.model_name.as_deref())
    }

    /// Refuses options that have no effect on the chosen workloads, or contradict each other.
    pub(super) fn check(&self, chosen: &[SuiteWorkload]) -> Result<(), Failure> {
        self.check_effects(chosen)?;
        let has =
            |is_such: fn(SuiteWorkload) -> bool| chosen.iter().copied().find(|it| is_such(*it));
        if let Some(gib) = self.gpu_mem_gb.filter(|gib| !(0.0..=*MEMORY_GIB.end()).contains(gib)) {
            return Err(Failure::usage(
                format!("--gpu-mem-gb {gib} is not a size"),
                format!("give a number of GiB from 0 to {}", MEMORY_GIB.end()),
            ));
        }
        if let (Some(0.0), Some(workload)) = (self.gpu_mem_gb, has(SuiteWorkload::needs_gpu)) {
            return Err(Failure::usage(
                format!("--gpu-mem-gb 0 leaves {} without its tier", workload.name()),
                "leave the workload out of --workloads, or leave out --gpu-mem-gb",
            ));
        }
        if let (Some(users), Some(high)) = (self.users, self.high_users)
            && high < users
        {
            return Err(Failure::usage(
                format!("--high-users {high} is less than --users {users}"),
                "raise --high-users (-U), or lower --users (-u)",
            ));
        }
        if !self.compatible {
            return Ok(());
        }
        match has(SuiteWorkload::is_scaled) {
            None => Ok(()),
            Some(workload) => Err(Failure::usage(
                format!(
                    "--compatible and workload {} cannot be combined: the original counts other \
                     users and starts none",
                    workload.name()
                ),
                "name workloads without autoscaling with --workloads (-w), or leave out \
                 --compatible",
            )),
        }
    }

    /// Refuses options that change none of the workloads.
    fn check_effects(&self, chosen: &[SuiteWorkload]) -> Result<(), Failure> {
        use SuiteWorkload as It;
        if self.rag_num_docs.is_some() && !self.enable_rag {
            return Err(Failure::usage(
                "--rag-num-docs (-D) has no effect without --enable-rag (-R)",
                "add --enable-rag, or leave out --rag-num-docs",
            ));
        }
        let has = |is_such: &dyn Fn(It) -> bool| chosen.iter().any(|it| is_such(*it));
        let lasts = |length: Length| has(&|it| it.length() == length);
        let has_free = has(&It::is_free);
        let effects = [
            (self.given_model().is_some(), has_free, "--model (-m)"),
            (self.tensor_parallel.is_some(), has_free, "--tensor-parallel"),
            (self.enable_rag, has_free, "--enable-rag (-R)"),
            (self.users.is_some(), has(&It::has_usual_users), "--users (-u)"),
            (self.high_users.is_some(), has(&It::has_many_users), "--high-users (-U)"),
            (self.tier_seconds.is_some(), lasts(Length::Tier), "--tier-seconds (-t)"),
            (
                self.saturation_seconds.is_some(),
                lasts(Length::Saturation),
                "--saturation-seconds (-s)",
            ),
            (
                self.production_seconds.is_some(),
                lasts(Length::Production),
                "--production-seconds (-r)",
            ),
            (
                self.autoscale_seconds.is_some(),
                lasts(Length::Autoscale),
                "--autoscale-seconds (-a)",
            ),
            (self.submission_seconds.is_some(), lasts(Length::Submission), "--submission-seconds"),
            (self.memory_gb.is_some(), has(&|it| it != It::Submission), "--memory-gb"),
            (self.gpu_mem_gb.is_some(), has(&It::takes_gpu), "--gpu-mem-gb"),
        ];
        match effects.into_iter().find(|(is_given, has_effect, _)| *is_given && !has_effect) {
            None => Ok(()),
            Some((_, _, name)) => {
                let names: Vec<&str> = chosen.iter().map(|it| it.name()).collect();
                Err(Failure::usage(
                    format!("{name} has no effect on {}", names.join(", ")),
                    "leave it out, or name more workloads with --workloads (-w)",
                ))
            }
        }
    }
}
