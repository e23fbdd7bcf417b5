//! `cascade bench shadow`: what shadow caches predict, beside what larger stores measure.

use std::path::{Path, PathBuf};

use clap::Args;

use crate::cli::args::Policy;
use crate::cli::eviction::traces;
use crate::cli::{EXIT_OK, Failure, Screen, write_json};
use crate::study::{ShadowTier, shadow_markdown, shadow_row};

/// Which traces, sizes and tier.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade bench shadow
      The table of docs/decisions/0015: three traces, DRAM at three sizes, four samples each.
  cascade bench shadow trace.jsonl --policy lru --sizes 10
      Your own trace under another policy.
  cascade bench shadow --files /var/tmp/shadow
      The file tier below a small DRAM, in an empty directory of its own.

Each size is replayed through a real store, whose shadows predict what half as much again and twice
as much would give; stores of those sizes then measure it. Block payload is 64 bytes, or 4 KiB with
a file tier.")]
pub(super) struct ShadowArgs {
    /// Trace files, or directories whose files are one trace [default: the bundled ones].
    #[arg(value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// Sizes of the tier in percent of a trace's different blocks.
    #[arg(long, value_name = "PERCENT,...", value_delimiter = ',', default_value = "5,10,25")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=100))]
    sizes: Vec<u64>,
    /// How many samples to predict from; the error told is the largest of them.
    #[arg(long, value_name = "N", default_value_t = 4)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=64))]
    samples: u64,
    /// Which blocks leave DRAM first.
    #[arg(long, value_enum, default_value_t = Policy::PrefixCost)]
    policy: Policy,
    /// Study the file tier, in this directory, instead of DRAM.
    #[arg(long, value_name = "DIR")]
    files: Option<PathBuf>,
    /// Write the figures as JSON; - is standard output.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub(super) fn run(args: &ShadowArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let tier = match &args.files {
        Some(directory) => ShadowTier::Files(directory),
        None => ShadowTier::Dram,
    };
    let mut rows = Vec::new();
    for trace in traces(&args.traces)? {
        for size in &args.sizes {
            let row = shadow_row(&trace, args.policy.kind(), tier, *size, args.samples);
            rows.push(row.map_err(|error| Failure::measure("shadows", error.to_string()))?);
        }
    }
    if args.json.as_deref() != Some(Path::new("-")) {
        screen.line(shadow_markdown(&rows).trim_end())?;
        let memory = rows.iter().map(|row| row.memory_bytes).max().unwrap_or(0);
        screen.line(format!("\nMemory of all that watches, at most: {} KiB", memory / 1024))?;
    }
    if let Some(path) = &args.json {
        write_json(path, &rows, screen)?;
    }
    Ok(EXIT_OK)
}
