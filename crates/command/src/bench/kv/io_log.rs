//! `--io-trace-log`: the operations of a run as a CSV file. Nothing is stored.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cascade_kv_bench::compatible::figures::LogFacts;
use cascade_kv_bench::compatible::io_log::IoLog;
use cascade_kv_bench::compatible::logged;
use cascade_kv_bench::compatible::waterfall::WaterfallSizes;
use cascade_kv_bench::criteria::{Assessment, PerformanceProfile};
use cascade_kv_bench::progress::Progress;
use cascade_kv_bench::result::{Detail, KvResult};
use cascade_kv_bench::validity::Validity;
use cascade_replay::environment::Environment;
use cascade_runtime::{Clock, ManualClock, SystemClock};
use indicatif::ProgressBar;

use super::args::KvArgs;
use super::setup::Setup;
use super::{draw_target, watch, write_results};
use crate::{EXIT_INTERRUPTED, EXIT_OK, Failure, PendingFile, Screen, built, interrupt};

/// Options that change nothing if nothing is stored and nothing is measured.
const WITHOUT_EFFECT: [&str; 6] = [
    "keep",
    "max-concurrent-allocs",
    "no-verify",
    "performance-profile",
    "precondition-threads",
    "report",
];

/// Refuses what cannot be logged, before anything runs.
fn check(args: &KvArgs, path: &Path) -> Result<(), Failure> {
    if !args.compatible {
        return Err(Failure::usage(
            "--io-trace-log has whole entries, and only --compatible stores those",
            "add --compatible, or leave out --io-trace-log to measure Cascade's store",
        ));
    }
    if path.as_os_str() == "-" {
        return Err(Failure::usage(
            "--io-trace-log needs the name of a file: the summary is on standard output",
            "give a name such as operations.csv.zst",
        ));
    }
    let given = WITHOUT_EFFECT.into_iter().find(|name| args.given.has(name));
    given.map_or(Ok(()), |name| {
        Err(Failure::usage(
            format!("--{name} has no effect with --io-trace-log: nothing is stored or measured"),
            format!("leave out --{name}"),
        ))
    })
}

/// Writes the log, the summary and the JSON.
pub(super) fn run(args: &KvArgs, path: &Path, screen: &mut Screen) -> Result<i32, Failure> {
    check(args, path)?;
    let validation = args.traces.validation()?;
    let recorded = args.traces.recorded(true)?;
    let setup = Setup::of_log((args, &args.settings()?), recorded)?;
    for note in &setup.notes {
        screen.notice(format!("note: {note}"))?;
    }
    let environment = Environment::capture(built::build(), None);
    let file = PendingFile::create(path)?;
    let result = log(args, setup, (path, &file), environment, screen)?;
    file.keep()?;
    write_results(args, &result, validation.as_ref(), screen)?;
    screen.notice(format!("log:     {}", path.display()))?;
    Ok(if result.outcome.was_stopped { EXIT_INTERRUPTED } else { EXIT_OK })
}

fn log(
    args: &KvArgs,
    setup: Setup,
    (path, file): (&Path, &PendingFile),
    environment: Environment,
    screen: &mut Screen,
) -> Result<KvResult, Failure> {
    interrupt::install_handler()?;
    let Setup { workload, sizes, options, .. } = setup;
    let tiers = WaterfallSizes {
        gpu_bytes: sizes.gpu_bytes,
        cpu_bytes: sizes.cpu_bytes,
        files_bytes: sizes.files_bytes,
    };
    let (clock, epoch) = (ManualClock::default(), Duration::from_millis(SystemClock.unix_ms()));
    let is_compressed = path.extension().is_some_and(|it| it == "zst");
    let log = IoLog::new(file.writer()?, is_compressed, epoch, &clock);
    let log = log.map_err(|source| Failure::write(path, source))?;
    let bar = ProgressBar::with_draw_target(None, draw_target(screen));
    let show = |progress: &Progress| {
        bar.set_message(format!("requests logged: {}", progress.requests.load(Ordering::Relaxed)));
        bar.tick();
    };
    let run =
        |progress: &Progress| logged::run((&log, &clock), tiers, &workload, &options, progress);
    let (outcome, mut objects) = watch(&bar, screen, &show, run)?;
    let rows = log.finish().map_err(|source| Failure::write(path, source))?;
    objects.log = Some(LogFacts { path: path.to_owned(), rows });
    let (figures, window) = (&outcome.figures, outcome.window);
    let assessment = Assessment::of_objects(figures, &objects, window, PerformanceProfile::Latency);
    Ok(KvResult {
        workload,
        options,
        generation_mode: args.generation_mode.name(),
        sizes,
        outcome,
        detail: Detail::Objects(Box::new(objects)),
        assessment,
        validity: Validity::of_log(),
        environment,
    })
}
