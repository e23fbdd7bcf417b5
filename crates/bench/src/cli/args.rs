//! The options of `cascade replay`.

use std::path::PathBuf;

use cascade_block::{DigestAlgorithm, DigestMode};
use cascade_store::{FileLayout, FilesConfig, IoEngine, PolicyKind, StoreConfig, WritePolicy};
use clap::{Args, ValueEnum};

use crate::cli::{Count, Failure, WarmUp, parse_bytes};

/// What to replay, through which store, and where to write what happened.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  cascade replay conversation_trace.jsonl --dram 256MiB
      One tier of DRAM; payload scaled down to 64 KiB a block, which the summary says.
  cascade replay conversation_trace.jsonl --dram 300MiB --files /var/tmp/c --files-capacity 2GiB \\
      --block-bytes 16KiB --json out.json --report out.html
      Two tiers, figures for programs and a page of plots.
  cascade replay conversation_trace.jsonl --metadata-only --dram-blocks 9140 --policy lru
      A policy's hit rate at a capacity in blocks, without payload, in a second.
  cascade replay sessions/*.json --model llama3.1-8b --limit 500 --dram 8GiB
      Blocks as large as that model makes them.

A block counts as hit only while the hits are unbroken from the start of its request: that is what
an inference engine can use. Every byte that the store returns is compared with what was stored;
one wrong byte makes the exit code 1.")]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the command line")]
pub struct ReplayArgs {
    /// Trace files: Mooncake JSONL, or recorded agent sessions (JSON).
    #[arg(required = true, value_name = "TRACE")]
    pub traces: Vec<PathBuf>,

    /// Tiers from fast to slow [default: Dram|Files with --files, else Dram].
    #[arg(long, value_name = "STAGES", help_heading = "Store")]
    pub pipeline: Option<String>,
    /// Size of the DRAM tier.
    #[arg(long, value_name = "SIZE", default_value = "512MiB", value_parser = parse_bytes)]
    #[arg(help_heading = "Store")]
    pub dram: u64,
    /// Most blocks in DRAM, whatever their size.
    #[arg(long, value_name = "N", help_heading = "Store")]
    pub dram_blocks: Option<Count>,
    /// Directory of the file tier. What it holds from an earlier run counts; see --fresh.
    #[arg(long, value_name = "DIR", help_heading = "Store")]
    pub files: Option<PathBuf>,
    /// Bytes that the file tier may take.
    #[arg(long, value_name = "SIZE", default_value = "4GiB", value_parser = parse_bytes)]
    #[arg(help_heading = "Store")]
    pub files_capacity: u64,
    /// Size of one segment of the file tier [default: 256MiB, less for a small tier].
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, help_heading = "Store")]
    pub segment_size: Option<u64>,
    /// Drop what the directory holds before starting.
    #[arg(long, requires = "files", help_heading = "Store")]
    pub fresh: bool,
    /// Which blocks leave DRAM first.
    #[arg(long, value_enum, default_value_t = Policy::PrefixCost, help_heading = "Store")]
    pub policy: Policy,
    /// Whether a put waits for the file tier.
    #[arg(long, value_enum, default_value_t = Write::Back, help_heading = "Store")]
    pub write: Write,
    /// Name blocks by content too, so that equal bytes are stored once.
    #[arg(long, value_enum, default_value_t = Digest::Off, help_heading = "Store")]
    pub digest: Digest,
    /// Take a request's last, partly filled block too.
    #[arg(long, help_heading = "Store")]
    pub admit_partial: bool,
    /// How blocks lie in the file tier.
    #[arg(long, value_enum, default_value_t = Layout::Segments, help_heading = "Store")]
    pub files_layout: Layout,
    /// What reads and writes files.
    #[arg(long, value_enum, default_value_t = Engine::Auto, help_heading = "Store")]
    pub io_engine: Engine,
    /// Read and write files through the page cache, not past it.
    #[arg(long, help_heading = "Store")]
    pub buffered: bool,
    /// Count a block as stored only once it is on stable storage.
    #[arg(long, help_heading = "Store")]
    pub durable: bool,

    /// Bytes a block: the payload is scaled down to this, and the summary says how far.
    #[arg(long, value_name = "SIZE", default_value = "64KiB", value_parser = parse_bytes)]
    #[arg(help_heading = "Workload", conflicts_with = "model")]
    pub block_bytes: u64,
    /// Blocks as large as this model makes them (llama3.1-8b, qwen3-32b, ...).
    #[arg(long, value_name = "NAME", help_heading = "Workload")]
    pub model: Option<String>,
    /// 0 as fast as possible; 1 in real time; 60 a minute a second.
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    #[arg(help_heading = "Workload")]
    pub speed: f64,
    /// Workers that take requests in order of arrival.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Workload")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: u16,
    /// Requests that fill the cache before anything is counted: 500 or 10%.
    #[arg(long, value_name = "N|P%", default_value = "0", value_parser = WarmUp::parse)]
    #[arg(help_heading = "Workload")]
    pub warm_up: WarmUp,
    /// Only the first requests of the trace.
    #[arg(long, value_name = "N", help_heading = "Workload")]
    pub limit: Option<Count>,
    /// Placement without payload: hit rates in a second, no bytes, no times.
    #[arg(long, help_heading = "Workload", conflicts_with_all = ["files", "digest", "threads"])]
    pub metadata_only: bool,

    /// Write the figures as JSON; - is standard output.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub json: Option<PathBuf>,
    /// Write one self-contained page of plots.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub report: Option<PathBuf>,
}

/// `--policy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Policy {
    Lru,
    S3fifo,
    Arc,
    Waterfall,
    PrefixCost,
}

/// `--write`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Write {
    /// A put returns from memory, the files follow.
    Back,
    /// A put returns when every tier has the block.
    Through,
}

/// `--digest`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Digest {
    Off,
    Blake3,
    Sha256,
}

/// `--files-layout`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Layout {
    /// Append-only segments of many blocks.
    Segments,
    /// One file a block, for shared file systems.
    FilePerBlock,
}

/// `--io-engine`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// uring where the kernel allows it, else psync.
    Auto,
    /// `io_uring`, or an error.
    Uring,
    /// preadv and pwritev.
    Psync,
}

impl Policy {
    /// The store's name for it.
    pub fn kind(self) -> PolicyKind {
        match self {
            Self::Lru => PolicyKind::Lru,
            Self::S3fifo => PolicyKind::S3Fifo,
            Self::Arc => PolicyKind::Arc,
            Self::Waterfall => PolicyKind::Waterfall,
            Self::PrefixCost => PolicyKind::PrefixCost,
        }
    }

    /// As it is written on the command line.
    pub fn name(self) -> String {
        let value = self.to_possible_value().expect("no variant is hidden");
        value.get_name().to_owned()
    }
}

impl ReplayArgs {
    /// The pipeline, chosen or implied.
    pub fn pipeline(&self) -> &str {
        let implied = if self.files.is_some() { "Dram|Files" } else { "Dram" };
        self.pipeline.as_deref().unwrap_or(implied)
    }

    /// Refuses options that contradict each other.
    pub fn check(&self) -> Result<(), Failure> {
        if !self.speed.is_finite() || self.speed < 0.0 {
            return Err(Failure::usage(
                format!("--speed {} is no speed", self.speed),
                "0 replays as fast as possible, 1 in real time, 60 a minute a second",
            ));
        }
        let names_files = self.pipeline().split('|').any(|stage| stage.trim() == "Files");
        match (names_files && !self.metadata_only, &self.files) {
            (true, None) => Err(Failure::usage(
                format!("--pipeline {:?} has a file tier but no directory", self.pipeline()),
                "add --files DIR, an empty directory of its own",
            )),
            (false, Some(directory)) => Err(Failure::usage(
                format!(
                    "--files {} is given, but --pipeline {:?} has no stage Files",
                    directory.display(),
                    self.pipeline()
                ),
                "leave one of them out, or write --pipeline 'Dram|Files'",
            )),
            _ => Ok(()),
        }
    }

    /// The store that these options describe.
    pub fn store_config(&self) -> StoreConfig {
        let files = self.files.as_ref().map(|directory| {
            let mut files = FilesConfig::new(directory);
            files.capacity_bytes = self.files_capacity;
            // Enough segments that taking one back does not drop a large share of the tier.
            let fitting = (self.files_capacity / 16).next_power_of_two().clamp(1 << 20, 256 << 20);
            files.segment_bytes = self.segment_size.unwrap_or(fitting);
            files.layout = match self.files_layout {
                Layout::Segments => FileLayout::Segments,
                Layout::FilePerBlock => FileLayout::FilePerBlock,
            };
            files.engine = match self.io_engine {
                Engine::Auto => IoEngine::Auto,
                Engine::Uring => IoEngine::Uring,
                Engine::Psync => IoEngine::Psync,
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
                Digest::Off => DigestMode::Off,
                Digest::Blake3 => DigestMode::On(DigestAlgorithm::Blake3),
                Digest::Sha256 => DigestMode::On(DigestAlgorithm::Sha256),
            },
            write: match self.write {
                Write::Back => WritePolicy::Back,
                Write::Through => WritePolicy::Through,
            },
            admit_partial: self.admit_partial,
            ..StoreConfig::default()
        }
    }
}
