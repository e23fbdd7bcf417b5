//! The options of `cascade bench kv`: names and defaults are those of the original.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cascade_kv_bench::autoscaler::{AutoscalerMode, AutoscalerOptions};
use cascade_kv_bench::config_file::ConfigFile;
use cascade_kv_bench::criteria::PerformanceProfile;
use cascade_kv_bench::model::KvModel;
use cascade_kv_bench::model_config::ModelConfig;
use cascade_kv_bench::plan::Phases;
use cascade_kv_bench::retrieval::Documents;
use clap::{Arg, ArgAction, Args, Command, FromArgMatches, ValueEnum};

use crate::Failure;
use crate::bench::kv::mlperf_args::{GivenOptions, MlperfArgs};
use crate::bench::kv::trace_args::TraceArgs;
use crate::bench::kv::unbuilt::UnbuiltOptions;

/// Most GiB of a tier; above are typing errors.
const GB_MAX: f64 = 131_072.0;

/// Time between two decisions of autoscaling.
const SCALE_INTERVAL: Duration = Duration::from_secs(10);

/// A simulated crowd of users whose KV is stored and read again.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of the command line")]
#[command(after_help = "\
Examples:
  cascade bench kv --model llama3.1-8b --num-users 50 --duration 120 --gpu-mem-gb 0 \\
      --cpu-mem-gb 4 --generation-mode none --cache-dir /mnt/nvme --seed 42 --output results.json
      Storage behind little DRAM: how fast does this disk store and load KV?
  cascade bench kv --gpu-mem-gb 0 --cpu-mem-gb 0 --generation-mode none --cache-dir /mnt/nvme \\
      --seed 42 --report report.html
      Storage alone, with plots.
  cascade bench kv --compatible --model llama3.1-8b --num-users 200 --duration 300 \\
      --gpu-mem-gb 0 --cpu-mem-gb 0 --max-concurrent-allocs 16 --generation-mode none --seed 42 \\
      --cache-dir /mnt/nvme
      As the original benchmark stores and counts, to put beside its published results.
  cascade bench kv --max-requests 200 --duration 3600 --gpu-mem-gb 0 --cpu-mem-gb 4 --seed 42 \\
      --cache-dir /mnt/nvme
      The same 200 requests in each run: digests of two runs are equal.
  cascade bench kv --use-burst-trace --burst-trace-path BurstGPT_1.csv --trace-speedup 60 \\
      --gpu-mem-gb 0 --cpu-mem-gb 4 --cache-dir /mnt/nvme
      The arrivals and lengths of a real service, an hour of them in a minute.
  cascade bench kv --mlperf closed --cache-dir /mnt/nvme --results-dir results --ranks 4
      The three closed options of MLPerf Storage with four processes: about 75 minutes.

A user asks, waits for the answer, thinks, and asks again. A request writes the KV of its new tokens
as blocks of 2 to 4 MiB, through to files (prefill), and reads its whole context once per 32 tokens
that it generates (decode). Later turns of a conversation load the blocks of earlier ones; a fifth
of the conversations share a system prompt. Each byte is unique and compared when it is read. Rates
are of bytes that moved within the window; what ends later is reported as its tail.
docs/benchmark.md explains each figure.

--compatible does what the original benchmark does: each turn is one file, tiers in memory move
their least recently used entries down, nothing moves up, system prompts are counted and not stored,
users do not wait for answers, and bytes of requests that end after the window count.

--gpu-mem-gb simulates the memory of a GPU in memory of this host. Token generation is simulated,
too: time passes, nothing is computed. A run that cannot be trusted is marked INVALID with the
reason (exit code 1). Exit code 130: interrupted; the figures until then are reported.")]
pub(crate) struct KvArgs {
    /// Before all others, which take their values out of what was parsed.
    #[command(flatten)]
    pub(super) given: GivenOptions,
    /// Store whole requests as files and count as the original benchmark does, so that figures can
    /// be put beside its published results. Measures the disk, not Cascade's store.
    #[arg(long, help_heading = "Workload")]
    pub(super) compatible: bool,
    /// Model whose KV is stored: tiny-1b, mistral-7b, llama2-7b, llama3.1-8b,
    /// llama3.1-70b-instruct, deepseek-v3, qwen3-32b, gpt-oss-120b, gpt-oss-20b.
    #[arg(long, value_name = "MODEL", default_value = "llama3.1-8b", help_heading = "Workload")]
    pub(super) model: String,
    /// Take the geometry of the model from FILE: config.json of Hugging Face, or YAML with
    /// `model_configs`, among which --model chooses.
    #[arg(long, value_name = "FILE", help_heading = "Workload")]
    pub(super) model_config: Option<PathBuf>,
    /// Take settings of users, classes, conversations and autoscaling from FILE: the original's
    /// config.yaml. A setting that cannot be changed is refused by name. An option wins over it.
    #[arg(long, value_name = "FILE", help_heading = "Workload")]
    pub(super) config: Option<PathBuf>,
    /// Simulated users.
    #[arg(long, value_name = "N", default_value_t = 100, help_heading = "Workload")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(super) num_users: u32,
    /// Length of the window.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, help_heading = "Workload")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(super) duration: u64,
    /// Simulated time to generate a token: none, fast (2 ms) or realistic (30 ms).
    #[arg(long, value_enum, value_name = "MODE", default_value_t = GenerationMode::Realistic)]
    #[arg(help_heading = "Workload")]
    pub(super) generation_mode: GenerationMode,
    /// Seed of all requests and bytes [default: a random one, which the results name].
    #[arg(long, value_name = "N", help_heading = "Workload")]
    pub(super) seed: Option<u64>,
    /// End after this number of requests, which a seed determines; 0: no limit.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Workload")]
    pub(super) max_requests: u64,
    /// Requests that arrive a second, whatever the store does: latencies count from the intended
    /// start. 0: a user asks again after its answer.
    #[arg(long, value_name = "X", default_value_t = 0.0, help_heading = "Workload")]
    #[arg(allow_negative_numbers = true)]
    pub(super) request_rate: f64,
    /// Make each request a conversation of its own.
    #[arg(long, help_heading = "Workload")]
    pub(super) disable_multi_turn: bool,
    /// Share no system prompts.
    #[arg(long, help_heading = "Workload")]
    pub(super) disable_prefix_caching: bool,
    /// Store documents before the window; a tenth of the requests read five chunks of 512 tokens.
    #[arg(long, help_heading = "Workload")]
    pub(super) enable_rag: bool,
    /// Number of documents of --enable-rag.
    #[arg(long, value_name = "N", default_value_t = 10, help_heading = "Workload")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(super) rag_num_docs: u32,
    /// Load earlier turns and write the new one; do not generate.
    #[arg(long, help_heading = "Workload", conflicts_with = "decode_only")]
    pub(super) prefill_only: bool,
    /// Only read, from a context for each user that is stored before the window.
    #[arg(long, help_heading = "Workload")]
    pub(super) decode_only: bool,

    /// Add users and take them away, to find how many the storage carries.
    #[arg(long, help_heading = "Autoscaling", conflicts_with_all = ["max_requests", "decode_only"])]
    pub(super) enable_autoscaling: bool,
    /// What to find: the users at which latencies reach a share of their limits (qos), or the
    /// highest throughput, at which the run ends (capacity).
    #[arg(long, value_enum, value_name = "MODE", default_value_t = ScalerChoice::Qos)]
    #[arg(help_heading = "Autoscaling")]
    pub(super) autoscaler_mode: ScalerChoice,
    /// The share of the latency limits (P95 of a call: read 100 ms, write 50 ms) to reach.
    #[arg(long, value_name = "X", default_value_t = 0.8, help_heading = "Autoscaling")]
    #[arg(allow_negative_numbers = true)]
    pub(super) target_saturation: f64,

    /// GiB of a simulated tier for each GPU, in memory of this host; 0: none.
    #[arg(long, value_name = "GIB", default_value_t = 16.0, help_heading = "Tiers")]
    #[arg(allow_negative_numbers = true)]
    pub(super) gpu_mem_gb: f64,
    /// GPUs of the tensor-parallel group; the simulated tier has this many times --gpu-mem-gb.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Tiers")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(super) num_gpus: u32,
    /// Ranks that share the KV of a token; each block has the part of one rank. At most --num-gpus.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Tiers")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(super) tensor_parallel: u32,
    /// GiB of the DRAM tier; 0: none, only a small pool that blocks pass through.
    #[arg(long, value_name = "GIB", default_value_t = 32.0, help_heading = "Tiers")]
    #[arg(allow_negative_numbers = true)]
    pub(super) cpu_mem_gb: f64,
    /// Directory on the disk to measure [default: one in the directory of temporary files].
    #[arg(long, value_name = "DIR", help_heading = "Tiers")]
    pub(super) cache_dir: Option<PathBuf>,
    /// GiB of the file tier; 0: nine tenths of what is free.
    #[arg(long, value_name = "GIB", default_value_t = 0.0, help_heading = "Tiers")]
    #[arg(allow_negative_numbers = true)]
    pub(super) storage_capacity_gb: f64,
    /// Write to the file tier before the window and remove it again, so that a disk has no fresh
    /// space left.
    #[arg(long, help_heading = "Tiers")]
    pub(super) precondition: bool,
    /// GiB that --precondition writes; 0: twice --storage-capacity-gb.
    #[arg(long, value_name = "GIB", default_value_t = 0.0, help_heading = "Tiers")]
    #[arg(allow_negative_numbers = true)]
    pub(super) precondition_size_gb: f64,
    /// Threads of --precondition; 0: one for each processor.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Tiers")]
    pub(super) precondition_threads: usize,
    /// Prefills that may write at once; 0: no limit.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Tiers")]
    pub(super) max_concurrent_allocs: usize,

    /// Criteria: latency judges latencies and hit rate, throughput only that bytes were moved.
    #[arg(long, value_enum, value_name = "PROFILE", default_value_t = ProfileChoice::Latency)]
    #[arg(help_heading = "Output")]
    pub(super) performance_profile: ProfileChoice,
    /// Write the results as JSON to FILE; - is standard output [default: `benchmark_results_`, the
    /// time and `.json`].
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(super) output: Option<PathBuf>,
    /// Write the results with plots as one self-contained HTML file.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(super) report: Option<PathBuf>,
    /// Write the results as a spreadsheet with the original's sheets to FILE: XLSX, or CSV if the
    /// name does not end in `.xlsx`.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(super) xlsx_output: Option<PathBuf>,
    /// With --compatible: store nothing, and write each operation that the tiers would do to FILE,
    /// as CSV with the columns Timestamp, Operation, `Object_Size_Bytes`, Tier, Key and Phase. A
    /// name that ends in `.zst` is compressed.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(super) io_trace_log: Option<PathBuf>,
    /// Leave the blocks in the directory.
    #[arg(long, help_heading = "Output")]
    pub(super) keep: bool,
    /// Do not compare bytes. The run is INVALID; it shows what comparing costs.
    #[arg(long, help_heading = "Output")]
    pub(super) no_verify: bool,

    #[command(flatten)]
    pub(super) traces: TraceArgs,

    #[command(flatten)]
    pub(super) mlperf: MlperfArgs,

    #[command(flatten)]
    pub(super) unbuilt: UnbuiltOptions,
}

/// `--generation-mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum GenerationMode {
    None,
    Fast,
    Realistic,
}

/// `--performance-profile`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum ProfileChoice {
    Latency,
    Throughput,
}

/// `--autoscaler-mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum ScalerChoice {
    Qos,
    Capacity,
}

impl GenerationMode {
    /// The time for a generated token.
    pub(super) fn token_time(self, config: &ConfigFile) -> Duration {
        let [none, fast, realistic] = config.token_times;
        match self {
            Self::None => none,
            Self::Fast => fast,
            Self::Realistic => realistic,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Fast => "fast",
            Self::Realistic => "realistic",
        }
    }
}

impl ProfileChoice {
    pub(super) fn profile(self) -> PerformanceProfile {
        match self {
            Self::Latency => PerformanceProfile::Latency,
            Self::Throughput => PerformanceProfile::Throughput,
        }
    }
}

impl KvArgs {
    /// Reads the options that a process of this program is to get.
    pub(super) fn parse(options: Vec<OsString>) -> Result<Self, Failure> {
        let unoptimised = Arg::new("unoptimised").long("unoptimised").action(ArgAction::SetTrue);
        let command = Command::new("kv").no_binary_name(true).arg(unoptimised);
        let parsed = Self::augment_args(command).try_get_matches_from(options);
        let parsed = parsed.and_then(|matches| Self::from_arg_matches(&matches));
        parsed.map_err(|error| Failure::other("run the benchmark with these options", error))
    }

    pub(crate) fn json(&self) -> Option<&Path> {
        self.output.as_deref()
    }

    pub(super) fn cache_dir(&self) -> PathBuf {
        let default = || std::env::temp_dir().join("cascade-bench-kv");
        self.cache_dir.clone().unwrap_or_else(default)
    }

    pub(super) fn autoscaling(&self, config: &ConfigFile) -> Option<AutoscalerOptions> {
        self.enable_autoscaling.then_some(AutoscalerOptions {
            mode: match self.autoscaler_mode {
                ScalerChoice::Qos => AutoscalerMode::Qos,
                ScalerChoice::Capacity => AutoscalerMode::Capacity,
            },
            target_saturation: self.target_saturation,
            interval: SCALE_INTERVAL,
            settings: config.scaling,
        })
    }

    pub(super) fn documents(&self) -> Documents {
        Documents { count: if self.enable_rag { self.rag_num_docs } else { 0 } }
    }

    pub(super) fn phases(&self) -> Phases {
        match (self.prefill_only, self.decode_only) {
            (true, _) => Phases::PrefillOnly,
            (_, true) => Phases::DecodeOnly,
            _ => Phases::Both,
        }
    }

    /// The settings of --config, or those that are built in. Refuses options beyond its limits.
    pub(super) fn settings(&self) -> Result<ConfigFile, Failure> {
        let Some(path) = &self.config else { return Ok(ConfigFile::default()) };
        let config = ConfigFile::read(path, &self.model)?;
        let memory = (self.gpu_mem_gb * f64::from(self.num_gpus), self.cpu_mem_gb);
        config.limits.check(self.num_users, self.duration, memory)?;
        Ok(config)
    }

    pub(super) fn model(&self, config: &ConfigFile) -> Result<KvModel, Failure> {
        let found = match (&self.model_config, &config.model) {
            (None, None) => return Ok(KvModel::new(&self.model, self.tensor_parallel)?),
            (None, Some(found)) => found.clone(),
            (Some(path), _) => {
                let name = self.given.has("model").then_some(&*self.model);
                ModelConfig::read(path, name)?
            }
        };
        Ok(KvModel::of_geometry(&found.name, &found.geometry, self.tensor_parallel)?)
    }

    /// Refuses what a run would refuse at its start, as far as the options and their files tell.
    pub(super) fn check_all(&self) -> Result<(), Failure> {
        self.check()?;
        self.model(&self.settings()?).map(drop)
    }

    /// Refuses options that are not built, make no sense, or contradict each other.
    pub(super) fn check(&self) -> Result<(), Failure> {
        self.unbuilt.check()?;
        let generated = [
            ("--enable-rag", self.enable_rag),
            ("--enable-autoscaling", self.enable_autoscaling),
            ("--decode-only", self.decode_only),
            ("--request-rate", self.request_rate > 0.0),
        ];
        let given = generated.into_iter().filter_map(|(name, is_given)| is_given.then_some(name));
        self.traces.check(&given.collect::<Vec<_>>())?;
        let sizes = [
            ("--gpu-mem-gb", self.gpu_mem_gb),
            ("--cpu-mem-gb", self.cpu_mem_gb),
            ("--storage-capacity-gb", self.storage_capacity_gb),
            ("--precondition-size-gb", self.precondition_size_gb),
        ];
        for (name, gib) in sizes {
            if !(0.0..=GB_MAX).contains(&gib) {
                return Err(Failure::usage(
                    format!("{name} {gib} is not a size"),
                    format!("give a number of GiB from 0 to {GB_MAX}"),
                ));
            }
        }
        if self.precondition && self.precondition_size_gb + self.storage_capacity_gb <= 0.0 {
            return Err(Failure::usage(
                "--precondition needs a size",
                "add --precondition-size-gb, or --storage-capacity-gb, of which it writes twice as \
                 much",
            ));
        }
        if !(0.0..=1e6).contains(&self.request_rate) {
            return Err(Failure::usage(
                format!("--request-rate {} is not a rate", self.request_rate),
                "give requests a second from 0 to 1000000; 0: users ask again after their answer",
            ));
        }
        if !(0.0..=1.0).contains(&self.target_saturation) {
            return Err(Failure::usage(
                format!("--target-saturation {} is not a share", self.target_saturation),
                "give a number from 0 to 1",
            ));
        }
        if self.enable_autoscaling && self.request_rate > 0.0 {
            return Err(Failure::usage(
                "--enable-autoscaling and --request-rate contradict each other: with a rate, more \
                 users do not ask more",
                "leave one of them out",
            ));
        }
        self.check_compatible()?;
        if self.tensor_parallel > self.num_gpus {
            return Err(Failure::usage(
                format!(
                    "--tensor-parallel {} needs as many GPUs, and --num-gpus is {}",
                    self.tensor_parallel, self.num_gpus
                ),
                "raise --num-gpus, or lower --tensor-parallel",
            ));
        }
        Ok(())
    }

    /// Refuses options that the original has and that change nothing there, or are not built here.
    fn check_compatible(&self) -> Result<(), Failure> {
        let refused = [
            (
                self.enable_autoscaling,
                "--enable-autoscaling",
                "the original counts other users and starts none",
            ),
            (
                self.request_rate > 0.0,
                "--request-rate",
                "users and recorded requests have their own times",
            ),
            (
                self.traces.has_recorded() && self.disable_multi_turn,
                "--disable-multi-turn",
                "no recorded request of the original reads earlier turns",
            ),
        ];
        let given = refused.into_iter().find(|(is_given, ..)| self.compatible && *is_given);
        given.map_or(Ok(()), |(_, name, reason)| {
            Err(Failure::usage(
                format!("--compatible and {name} cannot be combined: {reason}"),
                format!("leave out {name}, or leave out --compatible to measure Cascade's store"),
            ))
        })
    }
}
