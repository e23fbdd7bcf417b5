//! `cascade bench`: measurements of this machine and this build.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::cli::{EXIT_OK, Failure, Screen};

#[derive(Debug, Subcommand)]
pub(super) enum BenchVerb {
    /// Put, get, view, lookup, restart and disk, each beside its physical limit.
    Core(CoreArgs),
}

/// Which measurements.
#[derive(Debug, Args)]
pub(super) struct CoreArgs {
    /// Larger sizes and counts: ten minutes instead of one, ten million keys, 4 GiB on disk.
    #[arg(long)]
    full: bool,
    /// Write the figures as JSON; - is standard output.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Directory on the disk to measure.
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    directory: PathBuf,
    /// Only figures whose name contains this.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

pub(super) fn run(args: &BenchVerb, screen: &mut Screen) -> Result<i32, Failure> {
    screen.line(format!("{args:?}"))?;
    Ok(EXIT_OK)
}
