//! `cascade bench`: measurements of this machine and this build.

mod eviction;
mod gpu;
mod kv;
mod kv_suite;
mod own_process;
mod shadow;
mod transfer;
mod transport;
mod vllm;

use std::path::{Path, PathBuf};
use std::time::Duration;

use cascade_bench::node::NodeOptions;
use cascade_bench::{Bench, Figure, MeasureError, node, table_header};
use cascade_replay::environment::Environment;
use clap::{Args, Subcommand};

use crate::bench::eviction::EvictionArgs;
use crate::bench::gpu::GpuArgs;
use crate::bench::kv::KvArgs;
use crate::bench::kv_suite::KvSuiteArgs;
use crate::bench::shadow::ShadowArgs;
use crate::bench::transfer::TransferArgs;
use crate::bench::transport::TransportArgs;
use crate::bench::vllm::VllmArgs;
use crate::{EXIT_OK, Failure, Screen, built, write_json};

/// What to measure, and whether the build may be one whose figures mean nothing.
#[derive(Debug, Args)]
pub(super) struct BenchArgs {
    /// Run although this build is not optimised, to test the benchmark. Its figures mean nothing.
    #[arg(long, global = true)]
    unoptimised: bool,
    #[command(subcommand)]
    verb: BenchVerb,
}

#[derive(Debug, Subcommand)]
enum BenchVerb {
    /// Measure an embedded store: put, get, view, lookup, restart and disk.
    Core(CoreArgs),
    /// Measure a served node: control path, copies, hot reads, idle clients, soak.
    Node(NodeArgs),
    /// Measure a GPU: copies by length, number and way, registration, cost of a submission.
    Gpu(GpuArgs),
    /// Run MLPerf Storage's KV cache workload: users whose KV is stored and read again.
    Kv(Box<KvArgs>),
    /// Run up to eleven workloads of `bench kv` one after another, and compare them.
    KvSuite(Box<KvSuiteArgs>),
    /// Compare eviction policies and Belady's optimum over traces and capacities.
    Eviction(EvictionArgs),
    /// Compare the predictions of shadow caches with stores of those sizes.
    Shadow(ShadowArgs),
    /// Measure moving blocks between processes: TCP, TLS and shared memory, beside their limits.
    Transport(TransportArgs),
    /// Measure moving the KV of a prompt from a prefill to a decode process, layer by layer.
    Transfer(TransferArgs),
    /// Measure vLLM with the connector: time to first token with and without a hit.
    Vllm(Box<VllmArgs>),
    /// Run as a worker process of `bench node`: commands on stdin, reports on stdout.
    #[command(hide = true)]
    NodeWorker,
    /// Run as the other process of `bench transport`.
    #[command(hide = true)]
    TransportTarget,
    /// Run as the other process of `bench transfer`.
    #[command(hide = true)]
    TransferPeer,
}

/// The measurements of an embedded store.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade bench core
      1 million keys and half a GiB on disk: about one minute.
  cascade bench core --full --json figures.json
      10 million keys (3 GiB of memory) and a restart with a million blocks: about ten minutes.
  cascade bench core --only put/
      Only figures whose name contains put/.

Each limit is measured in the same run and alternates with the figure: memcpy between the same kinds
of memory, fio (or plain O_DIRECT reads if fio is missing) with the same block size and depth, or a
plain hash table. A share of 100 % reaches the limit of the machine. Run it on an idle machine; a
wide range of samples means that it was busy.")]
pub(super) struct CoreArgs {
    /// Larger sizes and counts.
    #[arg(long)]
    full: bool,
    /// Write the figures as JSON to FILE; - is standard output.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Directory on the disk to measure.
    #[arg(long, value_name = "DIR", default_value = ".")]
    directory: PathBuf,
    /// Measure only figures whose name contains TEXT.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

/// The measurements of a served node.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade bench node
      About three minutes, with 1 GiB of memory and up to 9 processes.
  cascade bench node --short
      Check that every measurement works, with little work for each. Its values mean nothing.
  cascade bench node --only control/
      Only figures whose name contains control/.
  cascade bench node --only soak/ --soak 3600 --json soak.json
      An hour of mixed load while workers are killed, to find leaks.
  cascade bench node --only replay/ --trace data/traces/mooncake/conversation_trace.jsonl
      Show how much time of a replay goes into copies and how much into round trips.

The node is a child process (`cascade serve` on a temporary socket), and so is each worker. Each
limit is measured in the same run and alternates with the figure: a bare round trip over a Unix
socket, or memcpy by the same processes in the same pool. Run it on an idle machine; a wide range of
samples means that it was busy.")]
pub(super) struct NodeArgs {
    /// Write the figures as JSON to FILE; - is standard output.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure only figures whose name contains TEXT.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Only check that every measurement works, with little work for each.
    #[arg(long)]
    short: bool,
    /// Also replay this trace through a client.
    #[arg(long, value_name = "TRACE")]
    trace: Option<PathBuf>,
    /// Also run a mixed load of this length while workers are killed.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    soak: Option<u64>,
}

impl BenchVerb {
    /// Where the figures go as JSON.
    fn json(&self) -> Option<&Path> {
        match self {
            Self::Core(args) => args.json.as_deref(),
            Self::Node(args) => args.json.as_deref(),
            Self::Gpu(args) => args.json(),
            Self::Kv(args) => args.json(),
            Self::KvSuite(args) => args.json(),
            Self::Eviction(args) => args.json(),
            Self::Shadow(args) => args.json(),
            Self::Transport(args) => args.json(),
            Self::Transfer(args) => args.json(),
            Self::Vllm(args) => args.json(),
            Self::NodeWorker | Self::TransportTarget | Self::TransferPeer => None,
        }
    }

    /// A process that a benchmark starts, which reports to it.
    fn is_worker(&self) -> bool {
        matches!(self, Self::NodeWorker | Self::TransportTarget | Self::TransferPeer)
    }
}

/// Runs one of the benchmarks.
///
/// # Errors
/// If this build is not optimised and that is not permitted, or the benchmark fails.
pub(super) fn run(args: &BenchArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let build = built::build();
    if let Some(warning) = build.warning().filter(|_| !args.verb.is_worker()) {
        if !args.unoptimised {
            return Err(Failure::usage(
                format!("{warning} ({}, opt-level {})", build.profile, build.opt_level),
                "build with `make build`, or add --unoptimised to run it for a test",
            ));
        }
        if args.verb.json() == Some(Path::new("-")) {
            screen.notice(warning)?;
        } else {
            screen.line(warning)?;
        }
    }
    match &args.verb {
        BenchVerb::Core(args) => core(args, screen),
        BenchVerb::Node(args) => node(args, screen),
        BenchVerb::Gpu(args) => gpu::run(args, screen),
        BenchVerb::Kv(args) => kv::run(args, screen),
        BenchVerb::KvSuite(args) => kv_suite::run(args, screen),
        BenchVerb::Eviction(args) => eviction::run(args, screen),
        BenchVerb::Shadow(args) => shadow::run(args, screen),
        BenchVerb::Vllm(args) => vllm::run(args, screen),
        BenchVerb::Transport(args) => transport::run(args, screen),
        BenchVerb::Transfer(args) => transfer::run(args, screen),
        BenchVerb::TransferPeer => {
            let orders = std::io::stdin().lock();
            cascade_bench::transfer::run_peer(orders, std::io::stdout().lock())
                .map_err(|error| Failure::other("run as the other process of a transfer", error))?;
            Ok(EXIT_OK)
        }
        BenchVerb::TransportTarget => {
            let orders = std::io::stdin().lock();
            cascade_bench::transport::run_target(orders, std::io::stdout().lock())
                .map_err(|error| Failure::other("run as the target of a benchmark", error))?;
            Ok(EXIT_OK)
        }
        BenchVerb::NodeWorker => {
            let commands = std::io::stdin().lock();
            node::run_worker(commands, std::io::stdout().lock())
                .map_err(|error| Failure::other("run as a worker process", error))?;
            Ok(EXIT_OK)
        }
    }
}

fn core(args: &CoreArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let output = Output::new(args.json.as_deref(), args.only.as_deref());
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
    let output = Output::new(args.json.as_deref(), args.only.as_deref());
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

/// Where figures are written, and which are selected.
#[derive(Debug, Clone, Copy)]
struct Output<'a> {
    json: Option<&'a Path>,
    only: Option<&'a str>,
    /// What is measured, if the environment does not say it.
    subject: Option<&'a str>,
    /// The header of columns that only these rows have.
    columns: &'static str,
}

/// Called with each figure when it is measured.
type Deliver<'d> = &'d mut dyn FnMut(Figure) -> Result<(), MeasureError>;

impl<'a> Output<'a> {
    fn new(json: Option<&'a Path>, only: Option<&'a str>) -> Self {
        Self { json, only, subject: None, columns: "" }
    }

    /// Measures, prints each figure when it is ready, and writes the JSON at the end.
    fn measure(
        self,
        disk: Option<&Path>,
        screen: &mut Screen,
        measure: impl FnOnce(Deliver<'_>) -> Result<(), MeasureError>,
    ) -> Result<i32, Failure> {
        let environment = Environment::capture(built::build(), disk);
        let is_json_on_screen = self.json == Some(Path::new("-"));
        if is_json_on_screen {
            self.subject.map_or(Ok(()), |subject| screen.notice(subject))?;
        } else {
            let headline = screen.dim(&environment.headline());
            screen.line(headline)?;
            self.subject.map_or(Ok(()), |subject| screen.line(screen.bold(subject)))?;
            let header = screen.bold(&table_header(self.columns));
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
                let printed = screen.line(row);
                printed.map_err(|failure| MeasureError::Deliver(Box::new(failure)))?;
            }
            figures.push(figure);
            Ok(())
        })?;
        if figures.is_empty() {
            let only = self.only.unwrap_or("");
            return Err(Failure::usage(
                format!("--only {only:?} matches no figure"),
                "run without --only to see all names",
            ));
        }
        self.finish(&figures, &environment, screen)?;
        Ok(EXIT_OK)
    }

    /// Prints how many targets were met, and writes the figures and the environment as JSON.
    fn finish(
        self,
        figures: &[Figure],
        environment: &Environment,
        screen: &mut Screen,
    ) -> Result<(), Failure> {
        let missed = figures.iter().filter(|figure| figure.is_reached == Some(false)).count();
        let targets = figures.iter().filter(|figure| figure.is_reached.is_some()).count();
        let met = targets - missed;
        let Some(path) = self.json else {
            return screen.line(format!("{met} of {targets} targets met"));
        };
        write_json(path, figures, screen)?;
        if path == Path::new("-") {
            return Ok(());
        }
        let environment_path = path.with_extension("environment.json");
        write_json(&environment_path, environment, screen)?;
        screen.line(format!("{met} of {targets} targets met"))?;
        let (figures, environment) = (path.display(), environment_path.display());
        screen.notice(format!("figures: {figures}, environment: {environment}"))
    }
}
