//! Child processes that run worlds. What killed threads of a world leave behind, their stacks and
//! memory, ends with its process, and so does a crash.

use std::ffi::{OsStr, OsString};
use std::io::{self, BufRead, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use cascade_runtime::{Clock, Deadline};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::options::SimOptions;
use crate::report::WorldReport;

/// Kills after which a process is replaced: each leaves the memory of a store and a dozen stacks.
const CRASHES_MAX: u64 = 100;
/// Bytes read from a process at once.
const READ_BYTES: usize = 16 << 10;

/// How worlds run in processes of their own.
#[derive(Debug, Clone)]
pub struct Processes {
    /// The program and the arguments of such a process. It calls [`serve`] with the options of the
    /// simulation.
    pub command: (OsString, Vec<OsString>),
    /// Worlds after which a process is replaced.
    pub worlds_max: u64,
    /// Real time that a world may take.
    pub world_time: Duration,
}

/// A process that runs one world after another.
#[derive(Debug)]
pub(crate) struct Worker {
    process: Child,
    /// Numbers of worlds, one a line. The process ends at the end of this.
    numbers: Option<ChildStdin>,
    /// Results, one a line.
    results: ChildStdout,
    received: Vec<u8>,
    worlds: u64,
    crashes: u64,
}

/// Runs the worlds whose numbers come in, one a line, and writes the result of each as a line of
/// JSON: what a process of [`Processes`] does.
///
/// # Errors
///
/// If a line is not a number or a world of the simulation, or a stream fails.
pub fn serve(options: &SimOptions, input: impl BufRead, mut output: impl Write) -> io::Result<()> {
    for line in input.lines() {
        let line = line?;
        let number = line.trim().parse().map_err(|_| invalid(format!("`{line}` is no world")))?;
        let missing = || invalid(format!("the simulation has no world {number}"));
        let report = options.run_world(number).ok_or_else(missing)?;
        serde_json::to_writer(&mut output, &report)?;
        output.write_all(b"\n")?;
        output.flush()?;
    }
    Ok(())
}

impl Processes {
    /// Runs a world in the process, and in a new one where there is none or it is worn out. A
    /// process that fails is gone, and its failure is the result of the world.
    pub(crate) fn run_world(
        &self,
        worker: &mut Option<Worker>,
        number: u64,
        clock: &dyn Clock,
    ) -> io::Result<WorldReport> {
        let is_worn =
            |worker: &mut Worker| worker.worlds >= self.worlds_max || worker.crashes >= CRASHES_MAX;
        drop(worker.take_if(is_worn));
        let running = match worker {
            Some(running) => running,
            None => worker.insert(Worker::start(&self.command.0, &self.command.1)?),
        };
        let deadline = Deadline::after(clock, self.world_time);
        match running.run_world(number, deadline, clock) {
            Ok(report) => Ok(report),
            Err(error) => {
                let why = running.fate(&error, self.world_time);
                *worker = None;
                Ok(WorldReport::without_result(number, format!("the process of this world {why}")))
            }
        }
    }
}

impl Worker {
    fn start(program: &OsStr, arguments: &[OsString]) -> io::Result<Self> {
        let mut command = Command::new(program);
        // A group of its own: Control-C is for the parent, which waits for the worlds in progress.
        command.args(arguments).process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn()?;
        let (numbers, results) = (process.stdin.take(), process.stdout.take());
        let results = results.expect("its output is a pipe");
        Ok(Self { process, numbers, results, received: Vec::new(), worlds: 0, crashes: 0 })
    }

    fn run_world(
        &mut self,
        number: u64,
        deadline: Deadline,
        clock: &dyn Clock,
    ) -> io::Result<WorldReport> {
        let numbers = self.numbers.as_mut().expect("open until this is dropped");
        writeln!(numbers, "{number}")?;
        let line = self.read_line(deadline, clock)?;
        let report: WorldReport = serde_json::from_slice(&line)?;
        if report.world != number {
            return Err(invalid(format!("a result of world {}", report.world)));
        }
        self.worlds += 1;
        self.crashes += report.crashes;
        Ok(report)
    }

    fn read_line(&mut self, deadline: Deadline, clock: &dyn Clock) -> io::Result<Vec<u8>> {
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                let rest = self.received.split_off(end + 1);
                return Ok(std::mem::replace(&mut self.received, rest));
            }
            let left = deadline.remaining(clock);
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            // Not without a limit, if the time cannot be given to the kernel.
            let left = Timespec::try_from(left).map_err(io::Error::other)?;
            match poll(&mut [PollFd::new(&self.results, PollFlags::IN)], Some(&left)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(error.into()),
            }
            let mut bytes = [0; READ_BYTES];
            match self.results.read(&mut bytes)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                read => self.received.extend_from_slice(&bytes[..read]),
            }
        }
    }

    /// What became of a process that gave no result.
    fn fate(&mut self, error: &io::Error, world_time: Duration) -> String {
        match error.kind() {
            io::ErrorKind::TimedOut => format!("gave no result within {world_time:?}"),
            io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe => {
                // It has closed its streams: it ends.
                match self.process.wait() {
                    Ok(status) => format!("ended early: {status}"),
                    Err(error) => format!("ended early: {error}"),
                }
            }
            _ => format!("gave no valid result: {error}"),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.numbers.take());
        // It waits for the next number, or failed: there is nothing to lose.
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests;
