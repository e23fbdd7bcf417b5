//! `cascade bench kv-suite`: the workloads of the original's wrapper one after another, compared.

mod args;
mod plan;

use std::fs;
use std::path::Path;
use std::time::Duration;

use cascade_kv_bench::suite::comparison::{Comparison, RunFigures, RunOutcome, RunState};
use cascade_kv_bench::suite::page;
use cascade_kv_bench::suite::plan::SuiteRun;
use cascade_replay::environment::Environment;
use cascade_replay::figures::span;
use cascade_runtime::{Clock, SystemClock};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

pub(super) use self::args::KvSuiteArgs;
use self::plan::Plan;
use crate::bench::own_process::{self, OwnProcess};
use crate::{
    EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, Failure, Screen, built, interrupt, write_file,
    write_json,
};

pub(super) fn run(args: &KvSuiteArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let plan = Plan::new(args)?;
    let environment = Environment::capture(built::build(), Some(&plan.cache_dir));
    interrupt::install_handler()?;
    plan.create_results()?;
    announce(&plan, screen)?;
    let outcomes = run_all(&plan, screen)?;
    let comparison =
        Comparison { outcomes, is_interrupted: interrupt::is_requested(), environment };
    write_comparison(args, &plan, &comparison, screen)?;
    Ok(match (comparison.is_interrupted, comparison.is_good()) {
        (true, _) => EXIT_INTERRUPTED,
        (false, true) => EXIT_OK,
        (false, false) => EXIT_FAILED,
    })
}

fn announce(plan: &Plan, screen: &mut Screen) -> Result<(), Failure> {
    let options = &plan.options;
    screen.notice(format!(
        "{}: about {}, and what each stores before its window; Control-C stops and reports",
        plan.counts(),
        span(plan.seconds_from(0) as f64),
    ))?;
    screen.notice(format!(
        "model {}, {} users, {} under high load; sized by {:.1} GiB of memory",
        options.model,
        options.usual_users(),
        options.high_users(),
        options.memory_gib,
    ))?;
    screen.notice(format!(
        "KV: {}, results: {}",
        plan.cache_dir.display(),
        plan.results_dir.display()
    ))
}

/// Runs all runs one after another. One that fails does not stop the others, Control-C does.
fn run_all(plan: &Plan, screen: &mut Screen) -> Result<Vec<RunOutcome>, Failure> {
    let mut outcomes = Vec::new();
    for (at, run) in plan.runs.iter().enumerate() {
        let mut outcome = RunOutcome {
            run: run.clone(),
            state: RunState::NotRun,
            seconds: 0.0,
            figures: None,
            result_file: plan.result_file(run).display().to_string(),
            command: plan.command(run),
        };
        if !interrupt::is_requested() {
            screen.notice(format!(
                "{} {}: {}; {} users, {} s, about {} left",
                plan.position(at),
                run.name,
                run.workload.summary(),
                run.users,
                run.seconds,
                span(plan.seconds_from(at) as f64),
            ))?;
            let started = SystemClock.monotonic();
            outcome.state = match run_one(plan, at, screen) {
                Ok(state) => state,
                Err(failure) => RunState::Failed(first_line(&failure.explain())),
            };
            outcome.seconds = SystemClock.monotonic().saturating_sub(started).as_secs_f64();
            outcome.figures = figures_of(&plan.result_file(run));
            screen.notice(format!("  {}", ended(&outcome)))?;
        }
        outcomes.push(outcome);
    }
    Ok(outcomes)
}

/// How a run ended, in one line.
fn ended(outcome: &RunOutcome) -> String {
    let figures = match (&outcome.state, &outcome.figures) {
        (RunState::Failed(why), _) => why.clone(),
        (_, None) => "without a result".to_owned(),
        (_, Some(it)) => format!(
            "{:.2} GiB/s read, {:.2} GiB/s written, criteria {} {}/{}",
            it.read_gib_per_second,
            it.written_gib_per_second,
            it.assessment.0,
            it.assessment.1,
            it.assessment.2
        ),
    };
    format!("{} after {:.0} s: {figures}", outcome.state.name(), outcome.seconds)
}

/// Runs a process of this program to its end.
fn run_one(plan: &Plan, at: usize, screen: &mut Screen) -> Result<RunState, Failure> {
    let run = &plan.runs[at];
    let log = plan.log(run);
    let mut process = [OwnProcess::start(&plan.arguments(run), &log)?];
    let bar = progress_bar(run, &plan.position(at), screen);
    let started = SystemClock.monotonic();
    let mut is_told = false;
    let waited = own_process::wait_for_all(&mut process, Duration::from_secs(run.seconds), || {
        bar.set_position(SystemClock.monotonic().saturating_sub(started).as_secs());
        if interrupt::is_requested() && !is_told {
            is_told = true;
            return bar.suspend(|| {
                screen.notice(
                    "stopping: the workload reports first; Control-C again ends at once, without \
                     a comparison",
                )
            });
        }
        Ok(())
    });
    bar.finish_and_clear();
    waited?;
    let status = process[0].status();
    drop(process);
    let has_result = figures_of(&plan.result_file(run)).is_some();
    Ok(match status.and_then(|status| status.code()) {
        Some(EXIT_OK) if has_result => RunState::Done,
        Some(EXIT_INTERRUPTED) if has_result => RunState::Interrupted,
        Some(EXIT_FAILED) if has_result => RunState::Invalid,
        Some(EXIT_INTERRUPTED) if interrupt::is_requested() => RunState::NotRun,
        Some(_) => RunState::Failed(own_process::failure(status, &log)),
        None => {
            plan.clean_up();
            RunState::Failed(own_process::failure(status, &log))
        }
    })
}

/// The figures of a result file, if it is whole.
fn figures_of(path: &Path) -> Option<RunFigures> {
    let text = fs::read(path).ok()?;
    RunFigures::of(&serde_json::from_slice(&text).ok()?)
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or(text).to_owned()
}

fn progress_bar(run: &SuiteRun, position: &str, screen: &Screen) -> ProgressBar {
    let target = if screen.is_interactive {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let style = ProgressStyle::with_template("  {msg} {bar:40} {pos}/{len} s");
    let style = style.expect("the template names known fields only");
    let bar = ProgressBar::with_draw_target(Some(run.seconds), target).with_style(style);
    bar.set_message(format!("{position} {}", run.name));
    bar
}

/// Prints the tables, and writes JSON and report.
fn write_comparison(
    args: &KvSuiteArgs,
    plan: &Plan,
    comparison: &Comparison,
    screen: &mut Screen,
) -> Result<(), Failure> {
    let output = args.output.clone().unwrap_or_else(|| plan.results_dir.join("comparison.json"));
    let is_json_on_screen = output == Path::new("-");
    for (at, line) in comparison.lines().into_iter().enumerate() {
        match (is_json_on_screen, at) {
            (true, _) => screen.notice(line)?,
            (false, 0) => screen.line(format!("\n{}", screen.bold(&line)))?,
            (false, _) => screen.line(line)?,
        }
    }
    write_json(&output, &comparison.to_json(), screen)?;
    if !is_json_on_screen {
        screen.notice(format!("comparison: {}", output.display()))?;
    }
    if let Some(path) = &args.report {
        write_file(path, page::page(comparison).as_bytes())?;
        screen.notice(format!("report:     {}", path.display()))?;
    }
    Ok(())
}
