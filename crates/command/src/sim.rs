//! `cascade sim`: simulates stores, or the transport, on virtual time and checks what they promise.

use std::ffi::OsString;
use std::io::{self, BufReader};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use cascade_runtime::{Plant, SystemClock, random_u64};
use cascade_sim::{
    Length, Processes, Progress, SimOptions, SimResult, Subject, Violation, Workers, serve,
};
use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use crate::{
    Count, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, Failure, Screen, interrupt, parse_time,
    write_json,
};

/// Operations without `--operations` and `--seconds`.
const OPERATIONS: u64 = 1_000_000;
/// The same of the transport: as many worlds.
const TRANSPORT_OPERATIONS: u64 = 100_000;
/// How often the progress bar is redrawn.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// Worlds that one process runs. A process starts in milliseconds and a world takes some hundred.
const WORLDS_MAX: u64 = 50;
/// Real time that a world may take. It takes seconds in a build without optimisation.
const WORLD_TIME: Duration = Duration::from_secs(300);
/// Two runs of one seed differed.
const EXIT_DIFFERENT: i32 = 3;

/// What to simulate.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade sim --operations 1000000
      A million operations with a fresh seed, which is printed.
  cascade sim --seed 7 --seconds 60 --twice
      A minute, with each world run twice: equal seeds have to give equal runs.
  cascade sim --seed 7 --operations 1000000 --world 12
      Run one world of a simulation again, such as the one that a violation names.
  cascade sim --transport --seconds 60 --twice
      Simulate endpoints of the transport on a network with faults, instead of stores.
  cascade sim --seed 7 --operations 100000 --plant early-publish
      Plant a bug in the store, to see that the simulator finds it.

A simulation consists of independent worlds of 20,000 operations each. In a world, the real store
with its own threads runs on virtual time; one thread at a time, chosen by the seed. Several clients
call it, and each result is compared with a naive model. The seed decides everything: the event hash
of two runs is equal, on any machine and with any --jobs. A world of --transport has 2,000
operations, by the clients of 2 to 6 endpoints.

Exit codes: 0 nothing wrong; 1 a violation; 2 usage; 3 two runs of a world differed (--twice);
130 interrupted.")]
pub(super) struct SimArgs {
    /// Nodes of each world. Only 1 is possible so far.
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1))]
    nodes: u64,
    /// Simulate endpoints of the transport on a network, instead of stores.
    #[arg(long, conflicts_with = "nodes")]
    transport: bool,
    /// Seed of the simulation [default: a fresh one, which is printed].
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Number of operations, exactly [default: 1000000, of the transport 100000].
    #[arg(long, value_name = "N", conflicts_with = "seconds")]
    operations: Option<Count>,
    /// Begin worlds for this long, such as 60 or 10m.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    seconds: Option<Duration>,
    /// Run only the world with this number.
    #[arg(long, value_name = "N")]
    world: Option<u64>,
    /// Worlds to run at the same time, a process for each [default: one for each processor].
    #[arg(long, value_name = "N")]
    jobs: Option<NonZeroUsize>,
    /// Run each world twice and compare.
    #[arg(long)]
    twice: bool,
    /// Plant a bug: lost-wake-up, early-publish, stale-address, late-deadline or outliving-lease;
    /// of the transport, early-notice, early-cancel or late-deadline.
    #[arg(long, value_name = "NAME")]
    plant: Option<Plant>,
    /// Write the result as JSON to FILE; - is standard output.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Run the worlds whose numbers come in: what the processes of a simulation do.
    #[arg(long, hide = true, requires = "seed", conflicts_with_all = ["json", "world"])]
    worker: bool,
}

/// The result with the build that it is of.
#[derive(Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    result: &'a SimResult,
    #[serde(skip_serializing_if = "Option::is_none")]
    nodes: Option<u64>,
    commit: &'static str,
}

pub(super) fn run(args: &SimArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let fresh = || random_u64().map_err(|error| Failure::other("draw a seed", error));
    let seed = args.seed.map_or_else(fresh, Ok)?;
    let default = if args.transport { TRANSPORT_OPERATIONS } else { OPERATIONS };
    let operations = args.operations.map_or(default, Count::get);
    let subject = if args.transport { Subject::Transport } else { Subject::Store };
    let options = SimOptions {
        subject,
        seed,
        length: args.seconds.map_or(Length::Operations(operations), Length::Time),
        world: args.world,
        jobs: args.jobs.or_else(|| thread::available_parallelism().ok()).map_or(1, Into::into),
        twice: args.twice,
        plant: args.plant,
    };
    if let (Some(world), Length::Operations(operations)) = (args.world, options.length)
        && world.saturating_mul(subject.world_operations()) >= operations
    {
        let worlds = operations.div_ceil(subject.world_operations());
        return Err(Failure::usage(
            format!("--world {world}: {operations} operations have {worlds} worlds, from 0"),
            "give the --operations of the simulation that has this world",
        ));
    }
    if args.worker {
        return serve_worlds(&options);
    }
    interrupt::install_handler()?;
    // First, so that it is known also if this process does not live to its end.
    screen.notice(format!("simulating with seed {seed}; Control-C stops and reports"))?;
    let (result, was_stopped) = simulate(&options, screen)?;
    write(args, &result, screen)?;
    Ok(match () {
        () if result.violations > 0 || result.wrong_bytes > 0 => EXIT_FAILED,
        () if result.differences > 0 => EXIT_DIFFERENT,
        () if was_stopped => EXIT_INTERRUPTED,
        () => EXIT_OK,
    })
}

/// What a process of a simulation does: it runs the worlds that its parent names.
fn serve_worlds(options: &SimOptions) -> Result<i32, Failure> {
    let served = serve(options, BufReader::new(io::stdin()), io::stdout());
    served.map_err(|error| Failure::other("serve a simulation as one of its processes", error))?;
    Ok(EXIT_OK)
}

/// The command line of this process up to `sim`, with the arguments of a process of a simulation.
///
/// The program may be Python. Then its first arguments are the script of the command, and its path
/// must stay as it was given: a virtual environment's interpreter is a link, and Python finds the
/// environment by the path of the link.
fn worker_command(options: &SimOptions) -> Result<(OsString, Vec<OsString>), Failure> {
    let mut own = std::env::args_os().take_while(|argument| argument != "sim");
    let program = own.next().ok_or_else(|| {
        Failure::usage("the command line has no program name", "run it as `cascade sim`")
    })?;
    Ok((program, own.chain(worker_arguments(options)).collect()))
}

fn worker_arguments(options: &SimOptions) -> Vec<OsString> {
    let mut arguments =
        vec!["sim".into(), "--worker".into(), format!("--seed={}", options.seed).into()];
    arguments.push(match options.length {
        Length::Operations(operations) => format!("--operations={operations}").into(),
        Length::Time(time) => format!("--seconds={}ms", time.as_millis().max(1)).into(),
    });
    if options.subject == Subject::Transport {
        arguments.push("--transport".into());
    }
    if options.twice {
        arguments.push("--twice".into());
    }
    arguments.extend(options.plant.map(|plant| format!("--plant={plant}").into()));
    arguments
}

/// Simulates in a thread while this one updates the progress bar and handles Control-C.
fn simulate(options: &SimOptions, screen: &Screen) -> Result<(SimResult, bool), Failure> {
    let progress = Progress::default();
    let bar = progress_bar(options, screen);
    let failed = |error| Failure::other("start a process of the simulation", error);
    let command = worker_command(options)?;
    let processes = Processes { command, worlds_max: WORLDS_MAX, world_time: WORLD_TIME };
    let workers = Workers::Processes(&processes);
    let result = thread::scope(|scope| {
        let simulation =
            scope.spawn(|| cascade_sim::run(options, workers, &progress, &SystemClock));
        while !simulation.is_finished() {
            if interrupt::is_requested() {
                progress.is_stopped.store(true, Ordering::Relaxed);
            }
            bar.set_position(progress.operations.load(Ordering::Relaxed));
            let violations = progress.violations.load(Ordering::Relaxed);
            bar.set_message(format!("{violations} violations"));
            thread::park_timeout(PROGRESS_INTERVAL);
        }
        simulation.join()
    });
    bar.finish_and_clear();
    match result {
        Ok(result) => Ok((result.map_err(failed)?, progress.is_stopped.load(Ordering::Relaxed))),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

fn progress_bar(options: &SimOptions, screen: &Screen) -> ProgressBar {
    let target = if screen.is_interactive {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let (length, template) = match options.length {
        Length::Operations(operations) => (
            Some(operations),
            "  {bar:40} {human_pos}/{human_len} operations, {msg}, {elapsed} of about {duration}",
        ),
        Length::Time(_) => (None, "  {spinner} {human_pos} operations, {msg}, {elapsed}"),
    };
    let style = ProgressStyle::with_template(template);
    let style = style.expect("the template names known fields only");
    ProgressBar::with_draw_target(length, target).with_style(style)
}

/// Writes the summary and the JSON. There is no summary if JSON goes to standard output.
fn write(args: &SimArgs, result: &SimResult, screen: &mut Screen) -> Result<(), Failure> {
    if args.json.as_deref() != Some(Path::new("-")) {
        summarize(result, screen)?;
    }
    if let Some(path) = &args.json {
        let commit = crate::built::commit();
        let nodes = (!args.transport).then_some(args.nodes);
        write_json(path, &Document { result, nodes, commit }, screen)?;
    }
    Ok(())
}

fn summarize(result: &SimResult, screen: &mut Screen) -> Result<(), Failure> {
    let took = result.seconds.as_f64();
    let minute = result.operations as f64 / took.max(0.001) * 60.0;
    screen.line(format!(
        "simulated {} operations in {} worlds in {took:.1} s ({:.1} million a minute)",
        result.operations,
        result.worlds,
        minute / 1e6
    ))?;
    screen.line(format!(
        "  {:.0} s of virtual time, {} switches between threads, {} reopenings, {} crashes",
        result.simulated_seconds.as_f64(),
        result.switches,
        result.reopenings,
        result.crashes
    ))?;
    if !result.counts.is_empty() {
        let counts = result.counts.iter().map(|(what, count)| format!("{count} {what}"));
        screen.line(format!("  {}", counts.collect::<Vec<_>>().join(", ")))?;
    }
    if result.recovered_blocks > 0 {
        let blocks = result.recovered_blocks;
        screen.line(format!("  {blocks} blocks in memory were found by the next process"))?;
    }
    if let Some(plant) = &result.plant {
        screen.line(format!("  planted bug: {plant}"))?;
    }
    screen.line(format!("  seed {}, event hash {}", result.seed, result.event_hash))?;
    for Violation { world, time_us, text, profile, repeat, .. } in &result.listed {
        screen.line(format!("world {world} at {time_us} us: {text}"))?;
        let repeat = screen.dim(&format!("  in: {profile}\n  repeat: {repeat}"));
        screen.line(repeat)?;
    }
    if result.late_transfers > 0 {
        screen.line(format!(
            "  {} uses of transfers that had not ended at the deadline of their call",
            result.late_transfers
        ))?;
    }
    if result.differences > 0 {
        for repeat in &result.repeat_differences {
            screen.line(format!("differs: {repeat}"))?;
        }
        let text = format!("{} worlds differed in their second run", result.differences);
        let text = screen.verdict(false, &text);
        screen.line(text)?;
    }
    let verdict = format!("{} wrong reads, {} violations", result.wrong_bytes, result.violations);
    let verdict = screen.verdict(result.is_clean(), &verdict);
    screen.line(verdict)
}
