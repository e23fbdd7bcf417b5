//! `cascade bench`: measurements of this machine and this build.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand};

use crate::cli::eviction::{self, EvictionArgs};
use crate::cli::shadow::{self, ShadowArgs};
use crate::cli::vllm::{self, VllmArgs};
use crate::cli::{EXIT_OK, Failure, Screen, write_json};
use crate::environment::Environment;
use crate::measure::node::{self, NodeOptions};
use crate::measure::{Bench, Figure, table_header};

#[derive(Debug, Subcommand)]
pub(super) enum BenchVerb {
    /// Put, get, view, lookup, restart and disk, each beside its physical limit.
    Core(CoreArgs),
    /// A served node and its workers: control path, copies, hot reads, idle clients, soak.
    Node(NodeArgs),
    /// Replay every eviction policy over traces and capacities, beside Belady's optimum.
    Eviction(EvictionArgs),
    /// Compare what shadow caches predict with what stores of those sizes measure.
    Shadow(ShadowArgs),
    /// vLLM with the connector: how much faster is a prompt that was seen before?
    Vllm(Box<VllmArgs>),
    /// A worker process of `bench node`: orders on standard input, reports on standard output.
    #[command(hide = true)]
    NodeWorker,
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

/// Which measurements of a served node.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade bench node
      About three minutes, 1 GiB of memory, up to 9 processes.
  cascade bench node --short
      Every figure with little work behind it: does it work? Its values mean nothing.
  cascade bench node --only control/
      Only figures whose name contains control/.
  cascade bench node --only soak/ --soak 3600 --json soak.json
      An hour of mixed load with workers that are killed; nothing may grow.
  cascade bench node --only replay/ --trace data/traces/mooncake/conversation_trace.jsonl
      How much of a real replay is copying, and how much round trips?

The node is a child process (`cascade serve` on a temporary socket), workers are processes too.
Limits are measured in the same run, in turn with the figure: a bare round trip over a Unix socket,
memcpy by the same processes in the same pool. Run it on a quiet machine; the range of samples tells
whether it was.")]
pub(super) struct NodeArgs {
    /// Write the figures as JSON; - is standard output.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Only figures whose name contains this.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Little work for each figure: whether all of it works, not how well.
    #[arg(long)]
    short: bool,
    /// Replay this trace through a client too.
    #[arg(long, value_name = "TRACE")]
    trace: Option<PathBuf>,
    /// Add a mixed load with dying workers that lasts as many seconds.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    soak: Option<u64>,
}

/// Runs one of the measurements; those of an engine in `interpreter` if it has the engine.
pub(super) fn run(
    args: &BenchVerb,
    interpreter: Option<PathBuf>,
    screen: &mut Screen,
) -> Result<i32, Failure> {
    match args {
        BenchVerb::Core(args) => core(args, screen),
        BenchVerb::Node(args) => node(args, screen),
        BenchVerb::Eviction(args) => eviction::run(args, screen),
        BenchVerb::Shadow(args) => shadow::run(args, screen),
        BenchVerb::Vllm(args) => vllm::run(args, interpreter, screen),
        BenchVerb::NodeWorker => {
            let orders = std::io::stdin().lock();
            node::run_worker(orders, std::io::stdout().lock())
                .map_err(|error| Failure::measure("blocks of a worker", error))?;
            Ok(EXIT_OK)
        }
    }
}

fn core(args: &CoreArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let output = Output { json: args.json.as_deref(), only: args.only.as_deref() };
    output.measure(Some(&args.directory), screen, |deliver| {
        Bench {
            is_full: args.full,
            directory: args.directory.clone(),
            only: args.only.clone(),
            deliver,
        }
        .run()
    })
}

fn node(args: &NodeArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let output = Output { json: args.json.as_deref(), only: args.only.as_deref() };
    let options = NodeOptions {
        is_short: args.short,
        trace: args.trace.clone(),
        soak: args.soak.map(Duration::from_secs),
    };
    output.measure(None, screen, |deliver| {
        let (directory, only) = (PathBuf::from("."), args.only.clone());
        node::run(&mut Bench { is_full: false, directory, only, deliver }, &options)
    })
}

/// Where figures go, and which were asked for.
#[derive(Debug, Clone, Copy)]
struct Output<'a> {
    json: Option<&'a Path>,
    only: Option<&'a str>,
}

/// Takes a figure as soon as it is there.
type Deliver<'d> = &'d mut dyn FnMut(Figure) -> Result<(), Failure>;

impl Output<'_> {
    /// Measures, shows each figure as it comes, and writes all of them down.
    fn measure(
        self,
        disk: Option<&Path>,
        screen: &mut Screen,
        measure: impl FnOnce(Deliver<'_>) -> Result<(), Failure>,
    ) -> Result<i32, Failure> {
        let environment = Environment::capture(disk);
        let is_json_on_screen = self.json == Some(Path::new("-"));
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
        measure(&mut |figure: Figure| {
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
        })?;
        if figures.is_empty() {
            let only = self.only.unwrap_or("");
            return Err(Failure::usage(
                format!("--only {only:?} matches no figure"),
                "leave it out to see all names",
            ));
        }
        self.finish(&figures, &environment, screen)?;
        Ok(EXIT_OK)
    }

    /// Writes the list of figures, and beside it what they were measured on.
    fn finish(
        self,
        figures: &[Figure],
        environment: &Environment,
        screen: &mut Screen,
    ) -> Result<(), Failure> {
        let missed = figures.iter().filter(|figure| figure.is_reached == Some(false)).count();
        let asked = figures.iter().filter(|figure| figure.is_reached.is_some()).count();
        let Some(path) = self.json else {
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
}
