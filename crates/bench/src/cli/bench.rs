//! `cascade bench`: measurements of this machine and this build.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};

use crate::cli::eviction::{self, EvictionArgs};
use crate::cli::shadow::{self, ShadowArgs};
use crate::cli::{EXIT_OK, Failure, Screen, write_json};
use crate::environment::Environment;
use crate::measure::{Bench, Figure, table_header};

#[derive(Debug, Subcommand)]
pub(super) enum BenchVerb {
    /// Put, get, view, lookup, restart and disk, each beside its physical limit.
    Core(CoreArgs),
    /// Replay every eviction policy over traces and capacities, beside Belady's optimum.
    Eviction(EvictionArgs),
    /// Compare what shadow caches predict with what stores of those sizes measure.
    Shadow(ShadowArgs),
}

/// Which measurements.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade bench core
      About a minute: 1 million keys, half a GiB on disk.
  cascade bench core --full --json figures.json
      About ten minutes: 10 million keys (3 GiB of memory), a restart with a million blocks.
  cascade bench core --only put/
      Only figures whose name contains put/.

Each limit is measured in the same run, in turn with the figure: memcpy between the same kinds of
memory, fio (or plain O_DIRECT reads where fio is missing) with the same block size and depth, a
hash table without a store around it. A share of 100 % is all that the machine gives. Run it on a
quiet machine; the range of samples tells whether it was.")]
pub(super) struct CoreArgs {
    /// Larger sizes and counts.
    #[arg(long)]
    full: bool,
    /// Write the figures as JSON; - is standard output.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Directory on the disk to measure.
    #[arg(long, value_name = "DIR", default_value = ".")]
    directory: PathBuf,
    /// Only figures whose name contains this.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

pub(super) fn run(args: &BenchVerb, screen: &mut Screen) -> Result<i32, Failure> {
    match args {
        BenchVerb::Core(args) => core(args, screen),
        BenchVerb::Eviction(args) => eviction::run(args, screen),
        BenchVerb::Shadow(args) => shadow::run(args, screen),
    }
}

fn core(args: &CoreArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let environment = Environment::capture(Some(&args.directory));
    let is_json_on_screen = args.json.as_deref() == Some(Path::new("-"));
    if environment.profile == "debug" {
        screen.remark("note: this is a debug build; its figures mean nothing")?;
    }
    if !is_json_on_screen {
        let about = screen.dim(&environment.headline());
        screen.line(about)?;
        let header = screen.bold(&table_header());
        screen.line(header)?;
    }
    let mut figures: Vec<Figure> = Vec::new();
    let mut deliver = |figure: Figure| {
        if !is_json_on_screen {
            let row = figure.row();
            let row = match figure.is_reached {
                Some(is_reached) => screen.verdict(is_reached, &row),
                None => row,
            };
            screen.line(row)?;
        }
        figures.push(figure);
        Ok(())
    };
    Bench {
        is_full: args.full,
        directory: args.directory.clone(),
        only: args.only.clone(),
        deliver: &mut deliver,
    }
    .run()?;
    if figures.is_empty() {
        let only = args.only.as_deref().unwrap_or("");
        return Err(Failure::usage(
            format!("--only {only:?} matches no figure"),
            "leave it out to see all names",
        ));
    }
    finish(args, &figures, &environment, screen)?;
    Ok(EXIT_OK)
}

/// Writes the list of figures, and beside it what they were measured on.
fn finish(
    args: &CoreArgs,
    figures: &[Figure],
    environment: &Environment,
    screen: &mut Screen,
) -> Result<(), Failure> {
    let missed = figures.iter().filter(|figure| figure.is_reached == Some(false)).count();
    let asked = figures.iter().filter(|figure| figure.is_reached.is_some()).count();
    let Some(path) = &args.json else {
        return screen.line(format!("{} of {asked} targets met", asked - missed));
    };
    write_json(path, figures, screen)?;
    if path == Path::new("-") {
        return Ok(());
    }
    let beside = path.with_extension("environment.json");
    write_json(&beside, environment, screen)?;
    screen.line(format!("{} of {asked} targets met", asked - missed))?;
    screen.remark(format!("figures: {}, machine: {}", path.display(), beside.display()))
}
