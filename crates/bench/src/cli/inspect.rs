//! `cascade inspect`: what a file tier's directory holds, and whether it is intact.

use std::path::PathBuf;

use clap::Args;

use crate::cli::{EXIT_OK, Failure, Screen};

/// A directory to look into.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade inspect /var/tmp/cache
  cascade inspect /var/tmp/cache --verify
      Reads every block and checks its checksum; exit code 1 if any is damaged.")]
pub(super) struct InspectArgs {
    /// Directory of a file tier. It must not be in use.
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Read every block and check it.
    #[arg(long)]
    verify: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &InspectArgs, screen: &mut Screen) -> Result<i32, Failure> {
    screen.line(format!("{args:?}"))?;
    Ok(EXIT_OK)
}
