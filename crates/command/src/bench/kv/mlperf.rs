//! `cascade bench kv --mlperf`: trials, waits and ranks of a submission, and its files.

mod launcher;
mod plan;
mod show;
mod trial;

use std::path::Path;

use cascade_kv_bench::submission::figures::{OptionRun, RankOfTrial};
use cascade_kv_bench::submission::files::{SubmissionRun, run_datetime};
use cascade_replay::environment::Environment;
use cascade_replay::figures::span;
use cascade_runtime::{Clock, SystemClock};

use self::launcher::Ranks;
use self::plan::Plan;
use self::trial::Trials;
use crate::bench::kv::args::KvArgs;
use crate::{
    EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, Failure, Screen, built, interrupt, write_json,
};

/// Runs all trials and writes the files of the submission.
pub(super) fn run(args: &KvArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let ranks = Ranks::of_process(args.mlperf.ranks)?;
    let plan = Plan::new(args, ranks)?;
    let started = SystemClock.monotonic();
    let run_datetime = run_datetime(SystemClock.unix_ms() / 1000);
    interrupt::install_handler()?;
    announce(&plan, screen)?;
    let cache_is_new = plan.create_directories()?;
    let trials = Trials { plan: &plan, run_datetime: &run_datetime };
    let options = run_options(&trials, screen);
    if cache_is_new {
        // Only if it is empty: others may have put files into it meanwhile.
        drop(std::fs::remove_dir(&plan.cache_dir));
    }
    let (options, is_interrupted) = options?;
    let is_good = !options.iter().any(|option| option.is_partial() || option.has_invalid());
    if !ranks.is_first() {
        return Ok(exit_code(is_interrupted, is_good));
    }
    let environment = Environment::capture(built::build(), None);
    let run = SubmissionRun {
        division: plan.division,
        run_datetime,
        ranks_of_host: ranks.of_host,
        hosts: ranks.hosts(),
        ranks: ranks.total,
        trials: plan.sequence.trials,
        duration_seconds: plan.sequence.duration_seconds,
        options,
        deviations: plan.sequence.deviations(),
        parameters: plan.parameters()?,
        command: environment.argv.join(" "),
        results_dir: plan.results_dir.display().to_string(),
        seconds: SystemClock.monotonic().saturating_sub(started).as_secs_f64(),
        is_interrupted,
    };
    write_files(&run, &plan.results_dir, screen)?;
    show::show(&run, screen)?;
    screen.notice(format!("results: {}", plan.results_dir.display()))?;
    Ok(exit_code(is_interrupted, is_good))
}

fn exit_code(is_interrupted: bool, is_good: bool) -> i32 {
    match (is_interrupted, is_good) {
        (true, _) => EXIT_INTERRUPTED,
        (false, true) => EXIT_OK,
        (false, false) => EXIT_FAILED,
    }
}

fn announce(plan: &Plan, screen: &mut Screen) -> Result<(), Failure> {
    let sequence = &plan.sequence;
    let own = plan.ranks.own.map_or(String::new(), |own| format!(", of which this is {own}"));
    screen.notice(format!(
        "MLPerf {}, as the original stores and counts (--compatible): {} options, {} trials of {} \
         s each, {} ranks{own}; at least {}",
        plan.division.name(),
        plan.options.len(),
        sequence.trials,
        sequence.duration_seconds,
        plan.ranks.total,
        span(sequence.seconds() as f64),
    ))?;
    for deviation in sequence.deviations() {
        screen.notice(format!("note: not a valid closed submission: {deviation}"))?;
    }
    Ok(())
}

/// Runs the options one after another. Returns them, and whether it was interrupted.
fn run_options(
    trials: &Trials<'_>,
    screen: &mut Screen,
) -> Result<(Vec<OptionRun>, bool), Failure> {
    trials.meet(screen)?;
    let mut options = Vec::new();
    for (at, option) in trials.plan.options.iter().enumerate() {
        if at > 0 && !trials.settle("before the next option", screen)? {
            return Ok((options, true));
        }
        let mut run = OptionRun { option: option.number, trials: Vec::new() };
        for number in 0..trials.plan.sequence.trials {
            let name = format!("option {}, trial {number}", option.number);
            if !trials.settle(&format!("before {name}"), screen)? {
                break;
            }
            let ranks = trials.run(option, number, screen)?;
            let has_failed = ranks.iter().all(|rank| rank.figures.is_none());
            let was_left = ranks.iter().any(is_gone);
            run.trials.push(ranks);
            if has_failed || was_left || !trials.settle(&format!("after {name}"), screen)? {
                break;
            }
        }
        let is_whole = run.trials.len() == trials.plan.sequence.trials as usize;
        if !run.trials.is_empty() {
            options.push(run);
        }
        if interrupt::is_requested() {
            return Ok((options, true));
        }
        if !is_whole {
            screen.notice("a trial gave no result, so that the rest of the run is left out")?;
            break;
        }
    }
    Ok((options, interrupt::is_requested()))
}

/// Whether a rank gave no sign of its end, so that the next trial would wait for it, too.
fn is_gone(rank: &RankOfTrial) -> bool {
    rank.failure.as_deref().is_some_and(|why| why.starts_with(trial::NO_SIGN))
}

fn write_files(run: &SubmissionRun, results: &Path, screen: &mut Screen) -> Result<(), Failure> {
    let stamp = &run.run_datetime;
    let summary = format!("kvcache_run_summary_{stamp}.json");
    let metadata = format!("kv_cache_{stamp}_metadata.json");
    write_json(&results.join("summary.json"), &run.summary(false), screen)?;
    write_json(&results.join(summary), &run.summary(true), screen)?;
    write_json(&results.join(metadata), &run.metadata(), screen)
}
