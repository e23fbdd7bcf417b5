//! The options of `cascade replay`.

use std::path::PathBuf;

use cascade_block::{DigestAlgorithm, DigestMode};
use cascade_replay::trace::{TimeUnit, TraceFormat};
use cascade_store::{FilesConfig, IoEngine, PolicyKind, StoreConfig, WritePolicy};
use clap::{Args, ValueEnum};

use crate::{Count, Failure, WarmUp, parse_bytes};

/// The trace, the store and the outputs of a replay.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  cascade replay conversation_trace.jsonl --dram 256MiB
      One DRAM tier. Blocks are scaled down to 64 KiB; the summary prints the factor.
  cascade replay conversation_trace.jsonl --dram 300MiB --files /var/tmp/c --files-capacity 2GiB \\
      --block-bytes 16KiB --json out.json --report out.html
      Two tiers, results as JSON and an HTML report with plots.
  cascade replay conversation_trace.jsonl --metadata-only --dram-blocks 9140 --policy lru
      The hit rate of a policy at a capacity in blocks, without payload. Takes about a second.
  cascade replay BurstGPT_1.csv --limit 10000 --metadata-only
      Arrivals and lengths only: the output says that no request shares a block.
  cascade replay sessions/*.json --model llama3.1-8b --limit 500 --dram 8GiB
      Blocks of the size that this model has.

A block counts as a hit only if all blocks before it in its request are hits, because an inference
engine can use nothing else. Every byte that the store returns is compared with what was stored. If
one is wrong, the exit code is 1.")]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the command line")]
pub struct ReplayArgs {
    /// Trace files or directories, as JSON lines, a JSON array or CSV; also compressed with gzip or
    /// zstd. docs/traces.md has the formats.
    #[arg(required = true, value_name = "TRACE")]
    pub traces: Vec<PathBuf>,
    /// Format of the trace; auto: by the fields of each file.
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = FormatChoice::Auto)]
    pub format: FormatChoice,

    /// Tiers from fast to slow [default: Dram|Files with --files, else Dram].
    #[arg(long, value_name = "STAGES", help_heading = "Store")]
    pub pipeline: Option<String>,
    /// Size of the DRAM tier.
    #[arg(long, value_name = "SIZE", default_value = "512MiB", value_parser = parse_bytes)]
    #[arg(help_heading = "Store")]
    pub dram: u64,
    /// Limit of the number of blocks in DRAM.
    #[arg(long, value_name = "N", help_heading = "Store")]
    pub dram_blocks: Option<Count>,
    /// Directory of the file tier. Blocks of earlier runs in it can be hits; see --fresh.
    #[arg(long, value_name = "DIR", help_heading = "Store")]
    pub files: Option<PathBuf>,
    /// Capacity of the file tier.
    #[arg(long, value_name = "SIZE", default_value = "4GiB", value_parser = parse_bytes)]
    #[arg(help_heading = "Store")]
    pub files_capacity: u64,
    /// Size of one segment file [default: a sixteenth of --files-capacity, 1MiB to 256MiB].
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, help_heading = "Store")]
    pub segment_size: Option<u64>,
    /// Remove all blocks from the directory first.
    #[arg(long, requires = "files", help_heading = "Store")]
    pub fresh: bool,
    /// Eviction policy of DRAM.
    #[arg(long, value_enum, default_value_t = PolicyChoice::PrefixCost, help_heading = "Store")]
    pub policy: PolicyChoice,
    /// Write-back or write-through to the file tier.
    #[arg(long, value_enum, default_value_t = WriteChoice::Back, help_heading = "Store")]
    pub write: WriteChoice,
    /// Deduplicate blocks by a digest of their bytes.
    #[arg(long, value_enum, default_value_t = DigestChoice::Off, help_heading = "Store")]
    pub digest: DigestChoice,
    /// Also store the last block of a request when it is not full.
    #[arg(long, help_heading = "Store")]
    pub admit_partial: bool,
    /// I/O engine of the file tier.
    #[arg(long, value_enum, default_value_t = EngineChoice::Auto, help_heading = "Store")]
    pub io_engine: EngineChoice,
    /// Use the page cache for files instead of direct I/O.
    #[arg(long, help_heading = "Store")]
    pub buffered: bool,
    /// Sync a block to stable storage before it counts as stored.
    #[arg(long, help_heading = "Store")]
    pub durable: bool,

    /// Size of a block. Payload is scaled down to it; the summary prints the factor.
    #[arg(long, value_name = "SIZE", default_value = "64KiB", value_parser = parse_bytes)]
    #[arg(help_heading = "Workload", conflicts_with_all = ["model", "model_config"])]
    pub block_bytes: u64,
    /// Use the block size of this model (llama3.1-8b, qwen3-32b, ...).
    #[arg(long, value_name = "NAME", help_heading = "Workload")]
    pub model: Option<String>,
    /// Use the block size of the model that FILE describes: config.json of Hugging Face, or YAML
    /// with `model_configs`, among which --model chooses.
    #[arg(long, value_name = "FILE", help_heading = "Workload")]
    pub model_config: Option<PathBuf>,
    /// Speed: 0 is as fast as possible, 1 is real time, 60 is one minute per second.
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    #[arg(help_heading = "Workload")]
    pub speed: f64,
    /// Worker threads; they take requests in order of arrival.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Workload")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: u16,
    /// Requests that fill the cache before counting begins: a number (500) or a share (10%).
    #[arg(long, value_name = "N|P%", default_value = "0", value_parser = WarmUp::parse)]
    #[arg(help_heading = "Workload")]
    pub warm_up: WarmUp,
    /// Unit of timestamps that are numbers [default: that of the format; for mooncake ms, with a
    /// note if they look like another].
    #[arg(long, value_enum, value_name = "UNIT", help_heading = "Workload")]
    pub time_unit: Option<TimeUnitChoice>,
    /// Replay only the first N requests of the trace.
    #[arg(long, value_name = "N", help_heading = "Workload")]
    pub limit: Option<Count>,
    /// Replay keys only, without payload: prints hit rates in about a second, no times.
    #[arg(long, help_heading = "Workload", conflicts_with_all = ["files", "digest", "threads"])]
    pub metadata_only: bool,

    /// Write the results as JSON to FILE; - is standard output.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub json: Option<PathBuf>,
    /// Write the results with plots as one self-contained HTML file.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub report: Option<PathBuf>,
}

/// `--policy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PolicyChoice {
    Lru,
    S3fifo,
    Arc,
    Waterfall,
    PrefixCost,
}

/// `--format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FormatChoice {
    Auto,
    /// Times in ms, lengths, ids of blocks of 512 tokens; also recorded by connectors.
    Mooncake,
    /// Times in s, lengths, ids of blocks of 16 tokens, chats.
    QwenBailian,
    /// Dates and lengths.
    Azure,
    /// Times in s and lengths.
    Burstgpt,
    /// Sessions of coding agents with ids of blocks, such as cc-traces.
    #[value(alias = "cc-traces")]
    Agents,
    /// Conversations as text.
    Sharegpt,
}

/// `--time-unit`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TimeUnitChoice {
    S,
    Ms,
    Us,
}

/// `--write`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WriteChoice {
    /// A put returns when the block is in memory; it is written to files later.
    Back,
    /// A put returns when every tier has the block.
    Through,
}

/// `--digest`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DigestChoice {
    Off,
    Blake3,
    Sha256,
}

/// `--io-engine`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EngineChoice {
    /// uring if the kernel allows it, else psync.
    Auto,
    /// `io_uring`; fails if the kernel does not allow it.
    Uring,
    /// preadv and pwritev.
    Psync,
}

impl FormatChoice {
    /// The format of the trace; none if the content decides.
    pub fn format(self) -> Option<TraceFormat> {
        Some(match self {
            Self::Auto => return None,
            Self::Mooncake => TraceFormat::Mooncake,
            Self::QwenBailian => TraceFormat::QwenBailian,
            Self::Azure => TraceFormat::Azure,
            Self::Burstgpt => TraceFormat::BurstGpt,
            Self::Agents => TraceFormat::Agents,
            Self::Sharegpt => TraceFormat::ShareGpt,
        })
    }
}

impl TimeUnitChoice {
    /// The unit of the trace.
    pub fn unit(self) -> TimeUnit {
        match self {
            Self::S => TimeUnit::Seconds,
            Self::Ms => TimeUnit::Milliseconds,
            Self::Us => TimeUnit::Microseconds,
        }
    }
}

impl PolicyChoice {
    /// The policy of the store.
    pub fn kind(self) -> PolicyKind {
        match self {
            Self::Lru => PolicyKind::Lru,
            Self::S3fifo => PolicyKind::S3Fifo,
            Self::Arc => PolicyKind::Arc,
            Self::Waterfall => PolicyKind::Waterfall,
            Self::PrefixCost => PolicyKind::PrefixCost,
        }
    }

    /// The policy's name on the command line.
    pub fn name(self) -> String {
        let value = self.to_possible_value().expect("no variant is hidden");
        value.get_name().to_owned()
    }
}

impl ReplayArgs {
    /// The value of `--pipeline`, or its default.
    pub fn pipeline(&self) -> &str {
        let default = if self.files.is_some() { "Dram|Files" } else { "Dram" };
        self.pipeline.as_deref().unwrap_or(default)
    }

    /// Refuses options that contradict each other.
    pub fn check(&self) -> Result<(), Failure> {
        if !self.speed.is_finite() || self.speed < 0.0 {
            return Err(Failure::usage(
                format!("--speed {} is not a speed", self.speed),
                "give a number from 0 up: 0 is as fast as possible, 1 is real time, 60 is one \
                 minute per second",
            ));
        }
        let names_files = self.pipeline().split('|').any(|stage| stage.trim() == "Files");
        match (names_files && !self.metadata_only, &self.files) {
            (true, None) => Err(Failure::usage(
                format!("--pipeline {:?} has a file tier without a directory", self.pipeline()),
                "add --files DIR with a directory that only this replay uses",
            )),
            (false, Some(directory)) => Err(Failure::usage(
                format!(
                    "--files {} is set, but --pipeline {:?} has no stage Files",
                    directory.display(),
                    self.pipeline()
                ),
                "remove one of them, or use --pipeline 'Dram|Files'",
            )),
            _ => Ok(()),
        }
    }

    /// The store that these options describe.
    pub fn store_config(&self) -> StoreConfig {
        let files = self.files.as_ref().map(|directory| {
            let mut files = FilesConfig::new(directory);
            files.capacity_bytes = self.files_capacity;
            // Space is reclaimed segment by segment: with 16 of them, one reclaim drops at most a
            // sixteenth of the tier.
            let default = (self.files_capacity / 16).next_power_of_two().clamp(1 << 20, 256 << 20);
            files.segment_bytes = self.segment_size.unwrap_or(default);
            files.engine = match self.io_engine {
                EngineChoice::Auto => IoEngine::Auto,
                EngineChoice::Uring => IoEngine::Uring,
                EngineChoice::Psync => IoEngine::Psync,
            };
            files.direct = !self.buffered;
            files.durable = self.durable;
            files
        });
        StoreConfig {
            pipeline: self.pipeline().to_owned(),
            dram_bytes: self.dram,
            dram_blocks: self.dram_blocks.map(Count::get),
            files,
            policy: self.policy.kind(),
            digest: match self.digest {
                DigestChoice::Off => DigestMode::Off,
                DigestChoice::Blake3 => DigestMode::On(DigestAlgorithm::Blake3),
                DigestChoice::Sha256 => DigestMode::On(DigestAlgorithm::Sha256),
            },
            write: match self.write {
                WriteChoice::Back => WritePolicy::Back,
                WriteChoice::Through => WritePolicy::Through,
            },
            admit_partial: self.admit_partial,
            ..StoreConfig::default()
        }
    }
}
