//! Worker processes of a measurement: they get commands, send reports, and are killed on drop.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::machine_ns;
use super::process::{ProcessStats, this_command};
use super::protocol::{Work, WorkerCommand, WorkerReport};
use super::served::ServedNode;
use crate::MeasureError;

/// Time-out of a report, in addition to the duration of the ordered work.
const REPORT_TIMEOUT: Duration = Duration::from_secs(120);
/// Delay of the common start, so that every worker has read its command by then.
const START_DELAY: Duration = Duration::from_millis(50);

/// One worker process.
#[derive(Debug)]
pub(super) struct WorkerProcess {
    child: Child,
    commands: ChildStdin,
    reports: BufReader<ChildStdout>,
}

/// Several worker processes that work at the same time.
#[derive(Debug)]
pub(super) struct WorkerGroup(Vec<WorkerProcess>);

/// The work that a group has done.
#[derive(Debug, Clone, Copy)]
pub(super) struct WorkDone {
    /// From the start of the first worker to the end of the last.
    pub(super) took: Duration,
    /// Blocks of all workers.
    pub(super) blocks: u64,
}

impl WorkerProcess {
    /// Starts a worker process.
    pub(super) fn start() -> Result<Self, MeasureError> {
        let mut command = this_command()?;
        command.args(["bench", "node-worker"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let spawned = command.spawn();
        let mut child = spawned.map_err(|e| MeasureError::measure("a worker process", e))?;
        let commands = child.stdin.take().expect("stdin is piped");
        let reports = BufReader::new(child.stdout.take().expect("stdout is piped"));
        Ok(Self { child, commands, reports })
    }

    fn send(&mut self, command: &WorkerCommand) -> Result<(), MeasureError> {
        let mut line = serde_json::to_string(command)
            .map_err(|error| MeasureError::measure("a worker process", error))?;
        line.push('\n');
        let written = self.commands.write_all(line.as_bytes());
        written.map_err(|error| MeasureError::measure("a worker process", error))
    }

    fn report(&mut self, timeout: Duration) -> Result<WorkerReport, MeasureError> {
        let failed = |error: std::io::Error| MeasureError::measure("a worker process", error);
        if !self.has_report(timeout)? {
            let what = format!("it sent no report within {} s", timeout.as_secs());
            return Err(MeasureError::measure("a worker process", what));
        }
        let mut line = String::new();
        self.reports.read_line(&mut line).map_err(failed)?;
        if line.is_empty() {
            return Err(MeasureError::measure(
                "a worker process",
                "it ended; its message is above",
            ));
        }
        match serde_json::from_str(&line) {
            Ok(WorkerReport::Failed(why)) => {
                Err(MeasureError::measure("the blocks of a worker", why))
            }
            Ok(report) => Ok(report),
            Err(error) => Err(MeasureError::measure("a worker process", error)),
        }
    }

    /// Sends a command and waits for its report.
    pub(super) fn run(&mut self, command: &WorkerCommand) -> Result<WorkerReport, MeasureError> {
        self.send(command)?;
        self.report(REPORT_TIMEOUT)
    }

    /// Starts work that ends at a time of [`machine_ns`], without waiting for its report.
    pub(super) fn begin(&mut self, work: Work, stop_ns: u64) -> Result<(), MeasureError> {
        self.send(&WorkerCommand::Work { work, start_ns: 0, stop_ns: Some(stop_ns) })
    }

    /// Fails if the worker has already reported, because a worker ends early only on an error.
    pub(super) fn expect_busy(&mut self) -> Result<(), MeasureError> {
        if !self.has_report(Duration::ZERO)? {
            return Ok(());
        }
        let report = self.report(Duration::ZERO)?;
        Err(MeasureError::measure("a worker process", format!("it ended early: {report:?}")))
    }

    fn has_report(&mut self, timeout: Duration) -> Result<bool, MeasureError> {
        let timeout = Timespec::try_from(timeout).unwrap_or(Timespec { tv_sec: 60, tv_nsec: 0 });
        let mut fds = [PollFd::new(self.reports.get_ref(), PollFlags::IN)];
        let count = poll(&mut fds, Some(&timeout));
        Ok(count.map_err(|error| MeasureError::measure("a worker process", error))? > 0)
    }

    /// Waits for the report of the work of [`WorkerProcess::begin`]. Returns blocks and hits.
    pub(super) fn finish(&mut self, stop_ns: u64) -> Result<(u64, u64), MeasureError> {
        let left = Duration::from_nanos(stop_ns.saturating_sub(machine_ns()));
        match self.report(left + REPORT_TIMEOUT)? {
            WorkerReport::Span { blocks, hits, .. } => Ok((blocks, hits)),
            other => Err(MeasureError::measure("a worker process", format!("it sent {other:?}"))),
        }
    }

    /// The kernel's statistics of the process.
    pub(super) fn stats(&self) -> Result<ProcessStats, MeasureError> {
        ProcessStats::of(self.child.id())
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        // The process may have ended already, which is fine.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl WorkerGroup {
    /// Starts workers and connects them to a node.
    pub(super) fn start(count: usize, served: &ServedNode) -> Result<Self, MeasureError> {
        let workers: Result<Vec<_>, _> = (0..count).map(|_| WorkerProcess::start()).collect();
        let mut group = Self(workers?);
        group.run_each(|_| WorkerCommand::Open { socket: served.socket() })?;
        Ok(group)
    }

    /// Runs a command of its own in each worker, all at the same time.
    pub(super) fn run_each(
        &mut self,
        command: impl Fn(usize) -> WorkerCommand,
    ) -> Result<(), MeasureError> {
        for (at, worker) in self.0.iter_mut().enumerate() {
            worker.send(&command(at))?;
        }
        self.0.iter_mut().try_for_each(|worker| worker.report(REPORT_TIMEOUT).map(drop))
    }

    /// Runs a command in all workers, one after the other.
    pub(super) fn run_in_turn(&mut self, command: &WorkerCommand) -> Result<(), MeasureError> {
        self.0.iter_mut().try_for_each(|worker| worker.run(command).map(drop))
    }

    /// All workers do the same work at the same time: one pass, or repeatedly for `duration`.
    pub(super) fn work(
        &mut self,
        work: Work,
        duration: Option<Duration>,
    ) -> Result<WorkDone, MeasureError> {
        let after = |ns: u64, time: Duration| ns + u64::try_from(time.as_nanos()).unwrap_or(0);
        let start_ns = after(machine_ns(), START_DELAY);
        let stop_ns = duration.map(|duration| after(start_ns, duration));
        let command = WorkerCommand::Work { work, start_ns, stop_ns };
        self.0.iter_mut().try_for_each(|worker| worker.send(&command))?;
        let (mut first, mut last, mut all) = (u64::MAX, 0, 0);
        for worker in &mut self.0 {
            match worker.report(REPORT_TIMEOUT + duration.unwrap_or_default())? {
                WorkerReport::Span { began_ns, ended_ns, blocks, .. } => {
                    first = first.min(began_ns);
                    last = last.max(ended_ns);
                    all += blocks;
                }
                other => {
                    let what = format!("it sent {other:?}");
                    return Err(MeasureError::measure("a worker process", what));
                }
            }
        }
        let took = Duration::from_nanos(last.saturating_sub(first));
        Ok(WorkDone { took, blocks: all })
    }

    /// The workers, for commands to single ones.
    pub(super) fn workers(&mut self) -> &mut [WorkerProcess] {
        &mut self.0
    }
}
