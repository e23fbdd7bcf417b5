//! A child process of this program: it ends with its parent, and its output goes to a file.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::thread;

use crate::{Failure, interrupt};

/// A running child. Dropping it kills it.
#[derive(Debug)]
pub(super) struct OwnProcess {
    child: Child,
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
        Ok(Self { child, input })
    }

    /// How it ended, if it has.
    pub(super) fn ended(&mut self) -> Result<Option<ExitStatus>, Failure> {
        let status = self.child.try_wait();
        status.map_err(|error| Failure::other("wait for a process of this program", error))
    }

    /// Lets it stop and report.
    pub(super) fn stop(&mut self) {
        drop(self.input.take());
    }

    /// Ends it at once.
    pub(super) fn kill(&mut self) -> Result<(), Failure> {
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
