//! `cascade bench kv`: `MLPerf` Storage's KV cache benchmark, from this program.

mod args;
mod io_log;
mod mlperf;
mod mlperf_args;
mod setup;
mod summary;
mod trace_args;
mod unbuilt;
mod xlsx;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use cascade_kv_bench::compatible::run::{self as objects, Pace};
use cascade_kv_bench::compatible::tail::THREAD_WAIT;
use cascade_kv_bench::compatible::waterfall::{Waterfall, WaterfallSizes};
use cascade_kv_bench::criteria::Assessment;
use cascade_kv_bench::devices::Device;
use cascade_kv_bench::directory::BenchDirectory;
use cascade_kv_bench::progress::Progress;
use cascade_kv_bench::report;
use cascade_kv_bench::result::{Detail, KvResult};
use cascade_kv_bench::run::{self, RunOptions, RunOutcome};
use cascade_kv_bench::store_backend::{StoreBackend, TierSizes};
use cascade_kv_bench::validation::ValidationTrace;
use cascade_kv_bench::validity::{DeviceProof, Evidence, Validity};
use cascade_kv_bench::{GIB, KvBenchError};
use cascade_replay::environment::Environment;
use cascade_runtime::{Clock, SystemClock};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

pub(super) use self::args::KvArgs;
use self::setup::Setup;
use crate::bench::own_process;
use crate::{
    EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, Failure, Screen, built, interrupt, write_file,
    write_json,
};

/// How often the progress bar is redrawn.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// What Control-C waits for.
const STOPPING: &str = "stopping: the calls that are under way end first, within 5 minutes on a \
    disk that does not answer; Control-C again ends at once, without a report";

/// Refuses options that a run would refuse at its start.
pub(super) fn check(options: Vec<OsString>) -> Result<(), Failure> {
    KvArgs::parse(options)?.check_all()
}

pub(super) fn run(args: &KvArgs, screen: &mut Screen) -> Result<i32, Failure> {
    if args.mlperf.mlperf.is_some() {
        return mlperf::run(args, screen);
    }
    args.check()?;
    xlsx::check(args)?;
    if args.mlperf.ends_with_input {
        own_process::end_with_input()?;
    }
    if let Some(path) = &args.io_trace_log {
        return io_log::run(args, path, screen);
    }
    let (recorded, validation) =
        (args.traces.recorded(args.compatible)?, args.traces.validation()?);
    let cache_dir = args.cache_dir();
    let environment = Environment::capture(built::build(), Some(&cache_dir));
    let config = args.settings()?;
    let model = args.model(&config)?;
    let directory = BenchDirectory::claim(&cache_dir, args.keep)?;
    if directory.is_new() {
        screen.notice(format!("created {} for this run", cache_dir.display()))?;
    }
    let setup = Setup::new((args, &config), model, recorded, &directory)?;
    for note in &setup.notes {
        screen.notice(format!("note: {note}"))?;
    }
    interrupt::install_handler()?;
    let (result, fault) = measure(args, setup, &directory, environment, screen)?;
    if args.keep {
        screen.notice(format!("blocks: {}", directory.blocks().display()))?;
    }
    // Before the results: a result that cannot be written must not leave the blocks behind.
    drop(directory);
    write_results(args, &result, validation.as_ref(), screen)?;
    if let Some(fault) = fault {
        return Err(fault.into());
    }
    // A run that was interrupted at once has read nothing, and is still only interrupted.
    let has_wrong_bytes = result.figures().wrong_blocks > 0;
    Ok(match (has_wrong_bytes, result.outcome.was_stopped) {
        (false, true) => EXIT_INTERRUPTED,
        (false, false) if result.validity.is_only_unoptimised() => EXIT_OK,
        _ => EXIT_FAILED,
    })
}

/// Opens the store, runs, and closes it. A store that failed after the run has figures, too.
fn measure(
    args: &KvArgs,
    mut setup: Setup,
    directory: &BenchDirectory,
    environment: Environment,
    screen: &mut Screen,
) -> Result<(KvResult, Option<KvBenchError>), Failure> {
    let measured = if setup.is_compatible {
        measure_objects(&mut setup, directory, screen)?
    } else {
        measure_store(&mut setup, directory, screen)?
    };
    let Measured { outcome, detail, has_direct_io, fault } = measured;
    let Setup { workload, sizes, options, .. } = setup;
    let figures = &outcome.figures;
    let profile = args.performance_profile.profile();
    let file_system = environment.disk.as_ref().map_or("", |disk| disk.file_system.as_str());
    let proof = DeviceProof::on(file_system, has_direct_io);
    let plan = (&workload, &options);
    let evidence = Evidence::of_store(plan, &sizes, &outcome, environment.warning, proof);
    let (evidence, assessment) = match &detail {
        Detail::Store { .. } => (evidence, Assessment::of(figures, outcome.window, profile)),
        Detail::Objects(objects) => (
            Evidence {
                storage_written_bytes: objects.written_to_files(),
                // System prompts are never there, and files drop entries.
                lost_blocks: 0,
                ..evidence
            },
            Assessment::of_objects(figures, objects, outcome.window, profile),
        ),
    };
    let validity = Validity::of(&evidence);
    let result = KvResult {
        workload,
        options,
        generation_mode: args.generation_mode.name(),
        sizes,
        outcome,
        detail,
        assessment,
        validity,
        environment,
    };
    Ok((result, fault))
}

/// What a run gives.
struct Measured {
    outcome: RunOutcome,
    detail: Detail,
    has_direct_io: bool,
    /// What failed after the window.
    fault: Option<KvBenchError>,
}

fn measure_store(
    setup: &mut Setup,
    directory: &BenchDirectory,
    screen: &mut Screen,
) -> Result<Measured, Failure> {
    let backend = StoreBackend::open(&directory.blocks(), setup.sizes)?;
    let mut outcome = with_progress(setup, directory, screen, |setup, progress| {
        run::run(&backend, &setup.workload, &setup.options, progress, &SystemClock)
    })?;
    let (stats, gpu_stats) = (Box::new(backend.stats()), backend.gpu_stats().map(Box::new));
    let has_direct_io = backend.has_direct_io();
    let closed = backend.close();
    let fault = directory.missing().or(closed.err());
    count_fault(fault.as_ref(), &mut outcome);
    Ok(Measured { outcome, detail: Detail::Store { stats, gpu_stats }, has_direct_io, fault })
}

fn measure_objects(
    setup: &mut Setup,
    directory: &BenchDirectory,
    screen: &mut Screen,
) -> Result<Measured, Failure> {
    let TierSizes { gpu_bytes, cpu_bytes, files_bytes, .. } = setup.sizes;
    let sizes = WaterfallSizes { gpu_bytes, cpu_bytes, files_bytes };
    let seed = setup.workload.seed;
    let waterfall = Waterfall::new(&directory.blocks(), sizes, seed, &SystemClock)?;
    let (mut outcome, objects) = with_progress(setup, directory, screen, |setup, progress| {
        let pace = Pace { think_scale: 1.0, thread_wait: THREAD_WAIT };
        let (workload, options) = (&setup.workload, &setup.options);
        objects::run(&waterfall, workload, options, pace, progress, &SystemClock)
    })?;
    // Files are read through the page cache, as in the original; only the kernel's counters tell
    // that the bytes came from a device.
    let fault = directory.missing();
    count_fault(fault.as_ref(), &mut outcome);
    let detail = Detail::Objects(Box::new(objects));
    Ok(Measured { outcome, detail, has_direct_io: false, fault })
}

/// Counts what failed after the window, so that the run is not valid. The advice is printed later.
fn count_fault(fault: Option<&KvBenchError>, outcome: &mut RunOutcome) {
    if let Some(text) = fault.map(ToString::to_string) {
        outcome.figures.failed(text.lines().next().unwrap_or(&text));
    }
}

/// Runs in a thread while this one updates the progress bar and handles Control-C.
fn with_progress<T: Send>(
    setup: &mut Setup,
    directory: &BenchDirectory,
    screen: &mut Screen,
    run: impl FnOnce(&Setup, &Progress) -> Result<T, KvBenchError> + Send,
) -> Result<T, Failure> {
    setup.options.device = Device::of(&directory.blocks());
    if !screen.is_interactive {
        let seconds = setup.options.duration.as_secs();
        screen.notice(format!("running for up to {seconds} s; Control-C stops and reports"))?;
    }
    let setup = &*setup;
    let requests_max = setup.workload.requests_max;
    let bar = progress_bar(&setup.options, requests_max, screen);
    let show = |progress: &Progress| show_progress(&bar, progress, requests_max.is_some());
    watch(&bar, screen, &show, |progress| run(setup, progress))
}

/// Runs in a thread while this one calls `show` and handles Control-C.
fn watch<T: Send>(
    bar: &ProgressBar,
    screen: &mut Screen,
    show: &dyn Fn(&Progress),
    run: impl FnOnce(&Progress) -> Result<T, KvBenchError> + Send,
) -> Result<T, Failure> {
    let progress = Progress::default();
    let mut told = Ok(());
    let outcome = thread::scope(|scope| {
        let running = scope.spawn(|| run(&progress));
        while !running.is_finished() {
            let is_first =
                interrupt::is_requested() && !progress.is_stopped.swap(true, Ordering::Relaxed);
            if is_first {
                told = bar.suspend(|| screen.notice(STOPPING));
            }
            show(&progress);
            thread::park_timeout(PROGRESS_INTERVAL);
        }
        running.join()
    });
    bar.finish_and_clear();
    told?;
    match outcome {
        Ok(outcome) => Ok(outcome?),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

fn show_progress(bar: &ProgressBar, progress: &Progress, counts_requests: bool) {
    let started = Duration::from_nanos(progress.started_ns.load(Ordering::Relaxed));
    if started.is_zero() {
        bar.set_message("storing what the requests expect to be there");
        return;
    }
    let elapsed = SystemClock.monotonic().saturating_sub(started);
    let requests = progress.requests.load(Ordering::Relaxed);
    let rate = |bytes: u64| bytes as f64 / GIB / elapsed.as_secs_f64().max(0.1);
    bar.set_position(if counts_requests { requests } else { elapsed.as_secs() });
    bar.set_message(format!(
        "read {:.2} GiB/s, written {:.2} GiB/s, {requests} requests",
        rate(progress.read_bytes.load(Ordering::Relaxed)),
        rate(progress.written_bytes.load(Ordering::Relaxed)),
    ));
}

fn draw_target(screen: &Screen) -> ProgressDrawTarget {
    if screen.is_interactive { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() }
}

fn progress_bar(options: &RunOptions, requests_max: Option<u64>, screen: &Screen) -> ProgressBar {
    let target = draw_target(screen);
    let (length, unit) = match requests_max {
        Some(requests) => (requests, "requests"),
        None => (options.duration.as_secs(), "s"),
    };
    let template = format!("  {{bar:40}} {{pos}}/{{len}} {unit}, {{msg}}");
    let style = ProgressStyle::with_template(&template);
    let style = style.expect("the template names known fields only");
    ProgressBar::with_draw_target(Some(length), target).with_style(style)
}

/// Writes the summary, JSON and report. There is no summary if JSON goes to standard output.
fn write_results(
    args: &KvArgs,
    result: &KvResult,
    validation: Option<&ValidationTrace>,
    screen: &mut Screen,
) -> Result<(), Failure> {
    let output = args.output.clone().unwrap_or_else(default_output);
    let is_json_on_screen = output == Path::new("-");
    if !is_json_on_screen {
        summary::show(result, screen)?;
    }
    let mut json = result.to_json();
    if let Some(trace) = validation {
        let hit_rate = result.figures().hit_rate().unwrap_or(0.0);
        json["validation"] = trace.compare(hit_rate);
        if !is_json_on_screen {
            screen.line(format!("  {}", trace.text(hit_rate)))?;
        }
    }
    write_json(&output, &json, screen)?;
    if !is_json_on_screen {
        screen.notice(format!("results: {}", output.display()))?;
    }
    if let Some(path) = &args.report {
        write_file(path, report::page(result)?.as_bytes())?;
        screen.notice(format!("report:  {}", path.display()))?;
    }
    if let Some(path) = &args.xlsx_output {
        let path = xlsx::write(args, path, result, &json)?;
        screen.notice(format!("table:   {}", path.display()))?;
    }
    Ok(())
}

/// As in the original: a file of its own for each run.
fn default_output() -> PathBuf {
    PathBuf::from(format!("benchmark_results_{}.json", SystemClock.unix_ms() / 1000))
}
