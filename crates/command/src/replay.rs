//! `cascade replay`: runs a replay and writes its summary, JSON and HTML report.

pub(crate) mod args;
mod assemble;
mod summary;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use cascade_replay::environment::Environment;
use cascade_replay::kernel_io::KernelIo;
use cascade_replay::result::{ReplayResult, ratio};
use cascade_replay::run::{Progress, RunOptions, RunOutcome};
use cascade_replay::workload::Workload;
use cascade_replay::{report, run};
use cascade_runtime::{Clock, SystemClock};
use cascade_store::{CallOptions, Store};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::replay::assemble::{Measured, Plan};
use crate::{
    EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, Failure, ReplayArgs, Screen, built, interrupt,
    write_file, write_json,
};

/// How often the progress bar is redrawn.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// Time-out of the last flush, which writes all pending blocks.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(600);

pub(super) fn run(args: &ReplayArgs, screen: &mut Screen) -> Result<i32, Failure> {
    args.check()?;
    let environment = Environment::capture(built::build(), args.files.as_deref());
    if environment.warning.is_some() && !args.metadata_only {
        screen.notice("note: this build is not optimised; its times mean nothing")?;
    }
    let plan = Plan::new(args)?;
    if let Some(note) = &plan.time_note {
        screen.notice(format!("note: {note}"))?;
    }
    let result = if args.metadata_only {
        plan.without_payload(environment)
    } else {
        let measured = measure(args, &plan, screen)?;
        plan.result(&measured, environment)
    };
    write_results(args, &result, screen)?;
    Ok(match (result.wrong_blocks, result.run.was_stopped) {
        (0, false) => EXIT_OK,
        (0, true) => EXIT_INTERRUPTED,
        _ => EXIT_FAILED,
    })
}

/// Writes the summary, JSON and report. There is no summary if JSON goes to standard output.
fn write_results(
    args: &ReplayArgs,
    result: &ReplayResult,
    screen: &mut Screen,
) -> Result<(), Failure> {
    let is_json_on_screen = args.json.as_deref() == Some(Path::new("-"));
    if !is_json_on_screen {
        summary::show(result, screen)?;
    }
    if let Some(path) = &args.json {
        write_json(path, result, screen)?;
        if !is_json_on_screen {
            screen.notice(format!("results: {}", path.display()))?;
        }
    }
    if let Some(path) = &args.report {
        write_file(path, report::page(result)?.as_bytes())?;
        screen.notice(format!("report:  {}", path.display()))?;
    }
    Ok(())
}

/// Opens the store, replays, and waits until all pending blocks are written.
fn measure(args: &ReplayArgs, plan: &Plan<'_>, screen: &mut Screen) -> Result<Measured, Failure> {
    let io_before = args.files.as_ref().and_then(|_| KernelIo::now());
    let failed = |doing| move |source| Failure::Store { doing, source };
    let store = Store::open(args.store_config()).map_err(failed("opening"))?;
    let mut started_with_blocks = store.stats().keys;
    if args.fresh && started_with_blocks > 0 {
        store.clear();
        started_with_blocks = 0;
    }
    let workload = plan.workload();
    let options = RunOptions {
        warm_up: plan.warm_up,
        threads: args.threads,
        speed: args.speed,
        dram_bytes: args.dram,
    };
    interrupt::install_handler()?;
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    if !screen.is_interactive {
        let count = workload.requests.len();
        screen.notice(format!("replaying {count} requests; Control-C stops and reports"))?;
    }
    let outcome = run_with_progress(&store, &workload, options, &*clock, screen);
    let began = clock.monotonic();
    let flushed = store.flush(CallOptions { timeout: Some(FLUSH_TIMEOUT), writer: None });
    let flush = clock.monotonic().saturating_sub(began);
    let stats = store.stats();
    store.close().map_err(failed("closing"))?;
    let kernel_io = io_before.and_then(|before| Some(KernelIo::now()?.since(before)));
    let mut measured = Measured { outcome, flush, started_with_blocks, stats, kernel_io };
    if let Err(error) = flushed {
        measured.outcome.counts.count_failure(&error);
    }
    Ok(measured)
}

/// Replays in a thread while this one updates the progress bar and handles Control-C.
fn run_with_progress(
    store: &Store,
    workload: &Workload,
    options: RunOptions,
    clock: &dyn Clock,
    screen: &Screen,
) -> RunOutcome {
    let progress = Progress::default();
    let bar = progress_bar(workload.requests.len(), screen);
    let outcome = thread::scope(|scope| {
        let replay = scope.spawn(|| run::run(store, workload, options, &progress, clock));
        while !replay.is_finished() {
            if interrupt::is_requested() {
                progress.is_stopped.store(true, Ordering::Relaxed);
            }
            let blocks = progress.blocks.load(Ordering::Relaxed) as f64;
            let hits = progress.hits.load(Ordering::Relaxed) as f64;
            bar.set_position(progress.requests.load(Ordering::Relaxed) as u64);
            bar.set_message(format!("hit rate {:.1} %", ratio(hits, blocks) * 100.0));
            thread::park_timeout(PROGRESS_INTERVAL);
        }
        replay.join()
    });
    bar.finish_and_clear();
    match outcome {
        Ok(outcome) => outcome,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

fn progress_bar(requests: usize, screen: &Screen) -> ProgressBar {
    let target = if screen.is_interactive {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let style = ProgressStyle::with_template(
        "  {bar:40} {pos}/{len} requests, {msg}, {elapsed} of about {duration}",
    );
    let style = style.expect("the template names known fields only");
    ProgressBar::with_draw_target(Some(requests as u64), target).with_style(style)
}
