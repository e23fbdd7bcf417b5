//! A trial: its ranks run as processes of this program, and leave a result and how they ended.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::thread;
use std::time::Duration;

use cascade_kv_bench::directory::BenchDirectory;
use cascade_kv_bench::submission::SubmissionOption;
use cascade_kv_bench::submission::figures::{RankFigures, RankOfTrial};
use cascade_runtime::{Deadline, SystemClock};

use super::plan::Plan;
use crate::bench::own_process::{self, OwnProcess};
use crate::{EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, Failure, Screen, interrupt, write_file};

/// How often files are looked at.
const POLL: Duration = Duration::from_millis(50);
/// How long ranks of one launcher wait for each other at the start.
const MEETING: Duration = Duration::from_secs(120);
/// Longest time that this process waits for ranks of others after its own, beside the window.
const OTHERS_TAIL: Duration = Duration::from_secs(900);
/// How the failure of a rank begins that did not tell how it ended.
pub(super) const NO_SIGN: &str = "gave no sign of its end";
/// The file that says how a rank ended.
const ENDED: &str = "ended.txt";
/// What it says of a rank that left a result.
const GOOD: &str = "ok";
/// What it says of a rank whose result has a reason not to be trusted.
const INVALID: &str = "invalid";

/// The trials of a submission.
#[derive(Debug)]
pub(super) struct Trials<'a> {
    pub(super) plan: &'a Plan,
    pub(super) run_datetime: &'a str,
}

impl Trials<'_> {
    /// Waits for the other ranks of a launcher. Without a directory that all share, this fails.
    pub(super) fn meet(&self, screen: &mut Screen) -> Result<(), Failure> {
        let plan = self.plan;
        let Some(own) = plan.ranks.own else { return Ok(()) };
        let directory = plan.results_dir.join("ranks");
        let name = |rank: u32| directory.join(format!("rank_{rank}.started"));
        fs::create_dir_all(&directory).map_err(|source| Failure::write(&directory, source))?;
        write_file(&name(own), self.run_datetime.as_bytes())?;
        screen.notice(format!("rank {own} waits for the other {}", plan.ranks.total - 1))?;
        let missing = wait_for((0..plan.ranks.total).map(name).collect(), MEETING);
        if missing.is_empty() || interrupt::is_requested() {
            return Ok(());
        }
        let names: Vec<String> = missing.iter().map(|it| it.display().to_string()).collect();
        Err(Failure::usage(
            format!("ranks did not start within {} s: no {}", MEETING.as_secs(), names.join(", ")),
            "start all ranks at once with srun or mpirun, with a --results-dir that all hosts \
             share; for ranks of this host alone, add --ranks",
        ))
    }

    /// Waits until the storage is idle. Returns whether the run goes on.
    pub(super) fn settle(&self, when: &str, screen: &mut Screen) -> Result<bool, Failure> {
        let seconds = self.plan.sequence.settle_seconds;
        if seconds > 0 && !interrupt::is_requested() {
            screen.notice(format!(
                "waiting {seconds} s {when}, so that the storage is idle; --settle-seconds 0 does \
                 not wait, Control-C ends the run"
            ))?;
        }
        let deadline = Deadline::after(&SystemClock, Duration::from_secs(seconds));
        while !interrupt::is_requested() && !deadline.has_passed(&SystemClock) {
            thread::park_timeout(POLL.min(deadline.remaining(&SystemClock)));
        }
        Ok(!interrupt::is_requested())
    }

    /// Runs the ranks of this process, waits for those of others, and reads all results.
    pub(super) fn run(
        &self,
        option: &SubmissionOption,
        trial: u32,
        screen: &mut Screen,
    ) -> Result<Vec<RankOfTrial>, Failure> {
        let plan = self.plan;
        let (ranks, seconds) = (plan.ranks.here(), plan.sequence.duration_seconds);
        screen.notice(format!(
            "option {} ({}), trial {trial}: {} ranks run for {seconds} s; Control-C stops and \
             reports",
            option.number, option.name, plan.ranks.total
        ))?;
        let directories: Vec<PathBuf> =
            (0..plan.ranks.total).map(|it| plan.rank_directory(option.number, trial, it)).collect();
        let mut running = Vec::new();
        for rank in ranks.clone() {
            let directory = &directories[rank as usize];
            fs::create_dir_all(directory).map_err(|source| Failure::write(directory, source))?;
            let output = directory.join(format!("kvcache_results_{}.json", self.run_datetime));
            let arguments = plan.arguments(option, rank, &output);
            running.push(OwnProcess::start(&arguments, &directory.join("output.log"))?);
        }
        own_process::wait_for_all(&mut running, Duration::from_secs(seconds), || Ok(()))?;
        for (rank, process) in ranks.zip(&running) {
            let directory = &directories[rank as usize];
            let text = how_it_ended(process.status(), directory);
            write_file(&directory.join(ENDED), text.as_bytes())?;
            self.clean_up(rank);
        }
        drop(running);
        let ends = directories.iter().map(|directory| directory.join(ENDED)).collect();
        let longest = Duration::from_secs(seconds) + OTHERS_TAIL;
        let missing = wait_for(ends, longest);
        Ok(directories.iter().map(|it| rank_of(it, &missing, longest)).collect())
    }

    /// Removes what a rank that was killed has left.
    fn clean_up(&self, rank: u32) {
        let cache = self.plan.rank_cache(rank);
        if cache.exists() {
            // What cannot be removed is removed by the next run in this directory.
            drop(BenchDirectory::claim(&cache, false));
            drop(fs::remove_dir(&cache));
        }
    }
}

/// How a rank ended, in one line.
fn how_it_ended(status: Option<ExitStatus>, directory: &Path) -> String {
    match status.map(|status| (status, status.code())) {
        Some((_, Some(EXIT_OK))) => GOOD.to_owned(),
        Some((_, Some(EXIT_INTERRUPTED))) => "stopped before its end".to_owned(),
        Some((_, Some(EXIT_FAILED))) if result_of(directory).is_some() => INVALID.to_owned(),
        _ => own_process::failure(status, &directory.join("output.log")),
    }
}

/// Waits for files. Returns those that are missing at the deadline, or when Control-C is pressed.
fn wait_for(mut files: Vec<PathBuf>, longest: Duration) -> Vec<PathBuf> {
    let deadline = Deadline::after(&SystemClock, longest);
    loop {
        files.retain(|file| !file.exists());
        let is_over = deadline.has_passed(&SystemClock) || interrupt::is_requested();
        if files.is_empty() || is_over {
            return files;
        }
        thread::park_timeout(POLL);
    }
}

/// What a rank has left in its directory.
fn rank_of(directory: &Path, missing: &[PathBuf], longest: Duration) -> RankOfTrial {
    let ended = directory.join(ENDED);
    let mut is_invalid = false;
    let failure = if missing.contains(&ended) {
        Some(format!("{NO_SIGN} within {} s: no {}", longest.as_secs(), ended.display()))
    } else {
        match fs::read_to_string(&ended) {
            Ok(text) if text == GOOD => None,
            Ok(text) if text == INVALID => {
                is_invalid = true;
                None
            }
            Ok(text) => Some(text),
            Err(error) => Some(format!("cannot read {}: {error}", ended.display())),
        }
    };
    let result = result_of(directory);
    let path = result.as_ref().map_or(directory, |(path, _)| path).display().to_string();
    RankOfTrial { path, figures: result.map(|(_, figures)| figures), failure, is_invalid }
}

/// The result file of a rank, if it is whole.
fn result_of(directory: &Path) -> Option<(PathBuf, RankFigures)> {
    let entries = fs::read_dir(directory).ok()?;
    entries.filter_map(Result::ok).map(|entry| entry.path()).find_map(|path| {
        let is_result = path.file_stem()?.to_str()?.starts_with("kvcache_results_")
            && path.extension().is_some_and(|extension| extension == "json");
        let text = is_result.then(|| fs::read(&path).ok())??;
        let figures = RankFigures::of(&serde_json::from_slice(&text).ok()?)?;
        Some((path, figures))
    })
}
