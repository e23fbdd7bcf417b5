//! A child process of this program: it ends with its parent, and its output goes to a file.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

use cascade_runtime::{Deadline, SystemClock};

use crate::{Failure, interrupt};

/// How often processes are looked at.
const POLL: Duration = Duration::from_millis(50);
/// Longest time that a benchmark may take beside its window, three times.
const TAIL: Duration = Duration::from_secs(3600);
/// How long a process that is to stop may take to report.
const STOPPING: Duration = Duration::from_secs(120);

/// A running child. Dropping it kills it.
#[derive(Debug)]
pub(super) struct OwnProcess {
    child: Child,
    /// How it ended, if it did so itself.
    status: Option<ExitStatus>,
    /// The child stops and reports when this is closed, also by the end of the parent.
    input: Option<ChildStdin>,
}

impl OwnProcess {
    /// Starts this program with these arguments, which have `--ends-with-input`.
    pub(super) fn start(arguments: &[OsString], log: &Path) -> Result<Self, Failure> {
        let failed = |error| Failure::other("start a process of this program", error);
        let output = File::create(log).map_err(|source| Failure::write(log, source))?;
        let errors = output.try_clone().map_err(failed)?;
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        // A group of its own: Control-C is for the parent, which closes the input.
        command.args(arguments).process_group(0);
        command.stdin(Stdio::piped()).stdout(output).stderr(errors);
        let mut child = command.spawn().map_err(failed)?;
        let input = child.stdin.take();
        Ok(Self { child, status: None, input })
    }

    /// How it ended. None if it did not end in time, and was killed.
    pub(super) fn status(&self) -> Option<ExitStatus> {
        self.status
    }

    /// Whether it has ended.
    fn has_ended(&mut self) -> Result<bool, Failure> {
        if self.status.is_none() {
            let status = self.child.try_wait();
            self.status = status
                .map_err(|error| Failure::other("wait for a process of this program", error))?;
        }
        Ok(self.status.is_some())
    }

    /// Lets it stop and report.
    fn stop(&mut self) {
        drop(self.input.take());
    }

    /// Ends it at once.
    fn kill(&mut self) -> Result<(), Failure> {
        let killed = self.child.kill();
        killed.map_err(|error| Failure::other("end a process of this program", error))
    }
}

impl Drop for OwnProcess {
    fn drop(&mut self) {
        // One that has ended cannot be killed; there is nothing to lose.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Waits until all have ended. Control-C stops them, and so does the longest time that a benchmark
/// with such a window may take. Those that do not report then are killed. `look` is called
/// meanwhile.
pub(super) fn wait_for_all(
    processes: &mut [OwnProcess],
    window: Duration,
    mut look: impl FnMut() -> Result<(), Failure>,
) -> Result<(), Failure> {
    let deadline = Deadline::after(&SystemClock, window * 3 + TAIL);
    let mut stopping: Option<Deadline> = None;
    loop {
        let mut is_one_left = false;
        for process in processes.iter_mut() {
            is_one_left |= !process.has_ended()?;
        }
        if !is_one_left {
            return Ok(());
        }
        look()?;
        let is_ending = interrupt::is_requested() || deadline.has_passed(&SystemClock);
        if is_ending && stopping.is_none() {
            processes.iter_mut().for_each(OwnProcess::stop);
            stopping = Some(Deadline::after(&SystemClock, STOPPING));
        }
        if stopping.is_some_and(|deadline| deadline.has_passed(&SystemClock)) {
            let mut left = processes.iter_mut().filter(|process| process.status.is_none());
            return left.try_for_each(OwnProcess::kill);
        }
        thread::park_timeout(POLL);
    }
}

/// How a process failed, in one line with the error of its output.
pub(super) fn failure(status: Option<ExitStatus>, log: &Path) -> String {
    let Some(status) = status else {
        return "did not end in time, and was killed".to_owned();
    };
    let Some(code) = status.code() else { return format!("killed: {status}") };
    let output = fs::read_to_string(log).unwrap_or_default();
    let error = output.lines().find(|line| line.starts_with("error: ")).unwrap_or("no error");
    format!("exit code {code}: {error} ({})", log.display())
}

/// Treats the end of standard input as Control-C, so that this process ends with its parent.
pub(super) fn end_with_input() -> Result<(), Failure> {
    let watch = || {
        let mut input = io::stdin().lock();
        let mut byte = [0];
        while !matches!(input.read(&mut byte), Ok(0) | Err(_)) {}
        interrupt::request();
    };
    let started = thread::Builder::new().name("parent-watch".to_owned()).spawn(watch);
    started.map(drop).map_err(|error| Failure::other("watch the parent process", error))
}
