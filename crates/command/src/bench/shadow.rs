//! `cascade bench shadow`: predictions of shadow caches, compared with stores of those sizes.

use std::path::{Path, PathBuf};

use cascade_replay::study::{ShadowTier, shadow_markdown, shadow_row};
use clap::Args;

use crate::bench::eviction::traces;
use crate::replay::args::PolicyChoice;
use crate::{EXIT_OK, Failure, Screen, write_json};

/// The traces, capacities and tier.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade bench shadow
      Print the table of docs/decisions/0015: three traces, DRAM at three capacities, four samples.
  cascade bench shadow trace.jsonl --policy lru --sizes 10
      Use another trace and another policy.
  cascade bench shadow --files /var/tmp/shadow
      Study a file tier behind a small DRAM tier, in an empty directory.

Each trace is replayed through a real store of each capacity. Its shadow caches predict the hit rate
at 1.5 and 2 times that capacity, and stores of those capacities measure it. The payload of a block
is 64 bytes, or 4 KiB with a file tier.")]
pub(crate) struct ShadowArgs {
    /// Trace files, or directories whose files form one trace [default: those in data/traces].
    #[arg(value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// Capacities of the tier in percent of the unique blocks of a trace.
    #[arg(long, value_name = "PERCENT,...", value_delimiter = ',', default_value = "5,10,25")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=100))]
    sizes: Vec<u64>,
    /// Number of samples to predict from; the table shows the largest error among them.
    #[arg(long, value_name = "N", default_value_t = 4)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=64))]
    samples: u64,
    /// Eviction policy of DRAM.
    #[arg(long, value_enum, default_value_t = PolicyChoice::PrefixCost)]
    policy: PolicyChoice,
    /// Study a file tier in DIR instead of DRAM.
    #[arg(long, value_name = "DIR")]
    files: Option<PathBuf>,
    /// Write the results as JSON to FILE; - is standard output.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl ShadowArgs {
    pub(super) fn json(&self) -> Option<&Path> {
        self.json.as_deref()
    }
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
            rows.push(row.map_err(|error| Failure::measure("shadow caches", error))?);
        }
    }
    if args.json.as_deref() != Some(Path::new("-")) {
        screen.line(shadow_markdown(&rows).trim_end())?;
        let memory = rows.iter().map(|row| row.memory_bytes).max().unwrap_or(0);
        let memory = memory / 1024;
        screen.line(format!("\nShadow caches, history and hot prefixes: {memory} KiB at most"))?;
    }
    if let Some(path) = &args.json {
        write_json(path, &rows, screen)?;
    }
    Ok(EXIT_OK)
}
