//! A child process of a benchmark: it takes orders on stdin, one JSON line each, and answers on
//! stdout. Every wait for an answer has a deadline.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use cascade_runtime::{Deadline, SystemClock};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::MeasureError;

/// The longest that an order takes: filling and comparing gigabytes in a debug build.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(300);

fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> MeasureError {
    MeasureError::measure("with a second process", error)
}

/// A child process; killed on drop.
#[derive(Debug)]
pub(crate) struct ChildProcess {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl ChildProcess {
    /// Starts `cascade bench VERB`.
    pub(crate) fn start(verb: &str) -> Result<Self, MeasureError> {
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.args(["bench", verb]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(failed)?;
        let orders = child.stdin.take().expect("stdin is piped");
        let answers = BufReader::new(child.stdout.take().expect("stdout is piped"));
        Ok(Self { child, orders, answers })
    }

    /// Its process ID.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Gives an order and returns its answer.
    pub(crate) fn ask<A: DeserializeOwned>(
        &mut self,
        order: &impl Serialize,
    ) -> Result<A, MeasureError> {
        let text = serde_json::to_string(order).map_err(failed)?;
        writeln!(self.orders, "{text}").map_err(failed)?;
        self.answer()
    }

    /// The next answer of an order that has several.
    pub(crate) fn answer<A: DeserializeOwned>(&mut self) -> Result<A, MeasureError> {
        let deadline = Deadline::after(&SystemClock, ANSWER_TIMEOUT);
        // It writes whole lines, so that the rest of a started one follows at once.
        while self.answers.buffer().is_empty() && !self.is_readable(deadline)? {
            if deadline.has_passed(&SystemClock) {
                let limit = ANSWER_TIMEOUT.as_secs();
                return Err(failed(format!("it did not answer within {limit} s")));
            }
        }
        let mut line = String::new();
        let bytes = self.answers.read_line(&mut line).map_err(failed)?;
        if bytes == 0 {
            return Err(failed("it ended; the reason is on standard error"));
        }
        serde_json::from_str(&line).map_err(failed)
    }

    fn is_readable(&self, deadline: Deadline) -> Result<bool, MeasureError> {
        let left = deadline.remaining(&SystemClock);
        let left = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        match poll(&mut [PollFd::new(self.answers.get_ref(), PollFlags::IN)], Some(&left)) {
            Ok(count) => Ok(count > 0),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(error) => Err(failed(error)),
        }
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // It may have ended already.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Writes one answer.
pub(crate) type WriteAnswer<'a, A> = dyn FnMut(&A) -> Result<(), MeasureError> + 'a;

/// Runs as a child process: answers each order until stdin ends.
pub(crate) fn serve<O: DeserializeOwned, A: Serialize>(
    orders: impl BufRead,
    mut answers: impl Write,
    mut carry_out: impl FnMut(O, &mut WriteAnswer<'_, A>) -> Result<(), MeasureError>,
) -> Result<(), MeasureError> {
    for line in orders.lines() {
        let order = serde_json::from_str(&line.map_err(failed)?).map_err(failed)?;
        carry_out(order, &mut |answer| {
            let text = serde_json::to_string(answer).map_err(failed)?;
            writeln!(answers, "{text}").and_then(|()| answers.flush()).map_err(failed)
        })?;
    }
    Ok(())
}

/// Processor time of this process so far, in nanoseconds.
pub(crate) fn own_cpu_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let time = Duration::try_from(time).unwrap_or_default();
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// A directory for a socket; removed on drop.
#[derive(Debug)]
pub(crate) struct SocketDirectory(PathBuf);

impl SocketDirectory {
    /// Makes one in the temporary directory, for this process.
    pub(crate) fn make() -> Result<Self, MeasureError> {
        let number = cascade_runtime::random_u64().map_err(failed)?;
        let path = std::env::temp_dir().join(format!("cascade-bench-{number:016x}"));
        std::fs::create_dir(&path).map_err(failed)?;
        Ok(Self(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for SocketDirectory {
    fn drop(&mut self) {
        // If this fails, only the file of a socket remains in the temporary directory.
        drop(std::fs::remove_dir_all(&self.0));
    }
}
