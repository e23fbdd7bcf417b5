//! Worker processes, as the measurement sees them: orders in, reports out, killed when dropped.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::machine_ns;
use super::order::{Order, Report, Work};
use super::process::{ProcessFacts, this_command};
use super::served::Served;
use crate::cli::Failure;

/// How long a worker may take beyond what it was told to.
const REPORT_TIMEOUT: Duration = Duration::from_secs(120);
/// From the order until all begin: every worker has read it by then.
const START_AFTER: Duration = Duration::from_millis(50);

/// One worker process.
#[derive(Debug)]
pub(super) struct Worker {
    child: Child,
    orders: ChildStdin,
    reports: BufReader<ChildStdout>,
}

/// Several that work at the same time.
#[derive(Debug)]
pub(super) struct Crew(Vec<Worker>);

/// What a crew did.
#[derive(Debug, Clone, Copy)]
pub(super) struct Done {
    /// From the first that began until the last was done.
    pub(super) took: Duration,
    /// Blocks of all.
    pub(super) blocks: u64,
}

impl Worker {
    /// Starts one.
    pub(super) fn start() -> Result<Self, Failure> {
        let mut command = this_command()?;
        command.args(["bench", "node-worker"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let spawned = command.spawn();
        let mut child = spawned.map_err(|e| Failure::measure("a worker process", e))?;
        let orders = child.stdin.take().expect("it is piped");
        let reports = BufReader::new(child.stdout.take().expect("it is piped"));
        Ok(Self { child, orders, reports })
    }

    fn order(&mut self, order: &Order) -> Result<(), Failure> {
        let mut line = serde_json::to_string(order).map_err(|e| Failure::measure("an order", e))?;
        line.push('\n');
        let written = self.orders.write_all(line.as_bytes());
        written.map_err(|error| Failure::measure("a worker process", error))
    }

    fn report(&mut self, within: Duration) -> Result<Report, Failure> {
        let failed = |error: std::io::Error| Failure::measure("a worker process", error);
        if !self.has_report(within)? {
            return Err(Failure::measure("a worker process", "it does not answer"));
        }
        let mut line = String::new();
        self.reports.read_line(&mut line).map_err(failed)?;
        if line.is_empty() {
            return Err(Failure::measure("a worker process", "it ended; its message is above"));
        }
        match serde_json::from_str(&line) {
            Ok(Report::Failed(why)) => Err(Failure::measure("a worker's blocks", why)),
            Ok(report) => Ok(report),
            Err(error) => Err(Failure::measure("a worker process", error)),
        }
    }

    /// One order and its report.
    pub(super) fn tell(&mut self, order: &Order) -> Result<Report, Failure> {
        self.order(order)?;
        self.report(REPORT_TIMEOUT)
    }

    /// Orders work until a time on the machine's clock, and does not wait for it.
    pub(super) fn begin(&mut self, work: Work, stop_ns: u64) -> Result<(), Failure> {
        self.order(&Order::Work { work, start_ns: 0, stop_ns: Some(stop_ns) })
    }

    /// Looks whether it is still at work; one that reported early found something wrong.
    pub(super) fn expect_busy(&mut self) -> Result<(), Failure> {
        if !self.has_report(Duration::ZERO)? {
            return Ok(());
        }
        let report = self.report(Duration::ZERO)?;
        Err(Failure::measure("a worker process", format!("it ended early: {report:?}")))
    }

    fn has_report(&mut self, within: Duration) -> Result<bool, Failure> {
        let within = Timespec::try_from(within).unwrap_or(Timespec { tv_sec: 60, tv_nsec: 0 });
        let mut fds = [PollFd::new(self.reports.get_ref(), PollFlags::IN)];
        let count = poll(&mut fds, Some(&within));
        Ok(count.map_err(|error| Failure::measure("a worker process", error))? > 0)
    }

    /// Waits for what [`Worker::begin`] ordered.
    pub(super) fn finish(&mut self, stop_ns: u64) -> Result<(u64, u64), Failure> {
        let left = Duration::from_nanos(stop_ns.saturating_sub(machine_ns()));
        match self.report(left + REPORT_TIMEOUT)? {
            Report::Span { blocks, hits, .. } => Ok((blocks, hits)),
            other => Err(Failure::measure("a worker process", format!("it answers {other:?}"))),
        }
    }

    /// What the kernel tells of it.
    pub(super) fn facts(&self) -> Result<ProcessFacts, Failure> {
        ProcessFacts::of(self.child.id())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Already gone is as good; nothing that it holds is needed any more.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Crew {
    /// Workers that are connected to a node.
    pub(super) fn start(count: usize, served: &Served) -> Result<Self, Failure> {
        let workers: Result<Vec<_>, _> = (0..count).map(|_| Worker::start()).collect();
        let mut crew = Self(workers?);
        crew.tell(|_| Order::Open { socket: served.socket() })?;
        Ok(crew)
    }

    /// One order for each, at the same time.
    pub(super) fn tell(&mut self, order: impl Fn(usize) -> Order) -> Result<(), Failure> {
        for (at, worker) in self.0.iter_mut().enumerate() {
            worker.order(&order(at))?;
        }
        self.0.iter_mut().try_for_each(|worker| worker.report(REPORT_TIMEOUT).map(drop))
    }

    /// One order for all, one worker after the other.
    pub(super) fn tell_in_turn(&mut self, order: &Order) -> Result<(), Failure> {
        self.0.iter_mut().try_for_each(|worker| worker.tell(order).map(drop))
    }

    /// All do the same at the same time: once, or for some time.
    pub(super) fn work(&mut self, work: Work, lasting: Option<Duration>) -> Result<Done, Failure> {
        let after = |ns: u64, time: Duration| ns + u64::try_from(time.as_nanos()).unwrap_or(0);
        let start_ns = after(machine_ns(), START_AFTER);
        let stop_ns = lasting.map(|lasting| after(start_ns, lasting));
        let order = Order::Work { work, start_ns, stop_ns };
        self.0.iter_mut().try_for_each(|worker| worker.order(&order))?;
        let (mut first, mut last, mut all) = (u64::MAX, 0, 0);
        for worker in &mut self.0 {
            match worker.report(REPORT_TIMEOUT + lasting.unwrap_or_default())? {
                Report::Span { began_ns, ended_ns, blocks, .. } => {
                    first = first.min(began_ns);
                    last = last.max(ended_ns);
                    all += blocks;
                }
                other => {
                    return Err(Failure::measure("a worker", format!("it answers {other:?}")));
                }
            }
        }
        let took = Duration::from_nanos(last.saturating_sub(first));
        Ok(Done { took, blocks: all })
    }

    /// The workers, for orders of their own.
    pub(super) fn workers(&mut self) -> &mut [Worker] {
        &mut self.0
    }
}
