//! A process of its own that loads the CUDA driver and prints what it says.
//!
//! A process and not a thread with a deadline: a thread that hangs in the driver cannot be ended, a
//! crash in the driver would end the doctor, and the driver would stay in a process that may be a
//! node. The process starts with `exec`, so it is no fork of one that had started CUDA, which the
//! driver would refuse.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read as _, Seek as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use cascade_runtime::{Deadline, SystemClock, sleep};
use rustix::fs::{MemfdFlags, memfd_create};

use super::gpu_answer::GpuAnswer;

/// Pause between two questions whether the process has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Runs a command that prints a [`GpuAnswer`], and kills it after the time limit.
pub(super) fn ask(command: &[OsString], time_limit: Duration) -> GpuAnswer {
    let answer = match command {
        [] => Ok(GpuAnswer::NotAsked),
        [program, arguments @ ..] => answer_of(Command::new(program).args(arguments), time_limit),
    };
    answer.unwrap_or_else(|error| GpuAnswer::Failed(error.to_string()))
}

fn answer_of(command: &mut Command, time_limit: Duration) -> io::Result<GpuAnswer> {
    // Not a pipe: a process that the driver leaves behind could keep a pipe open for ever.
    let mut output = File::from(memfd_create("cascade-doctor", MemfdFlags::CLOEXEC)?);
    command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(Stdio::null());
    let child = command.spawn().map_err(|error| {
        let program = command.get_program().display();
        io::Error::new(error.kind(), format!("cannot start {program} to load the driver: {error}"))
    })?;
    let status = wait(child, time_limit)?;
    if !status.success() {
        return Err(io::Error::other(format!("the process that loaded it ended with {status}")));
    }
    let mut text = String::new();
    output.rewind()?;
    output.read_to_string(&mut text)?;
    // The driver may have printed lines of its own before.
    let last = text.lines().next_back().unwrap_or_default();
    serde_json::from_str(last).map_err(|error| {
        io::Error::other(format!("the process that loaded it printed no answer: {error}"))
    })
}

/// Waits until the process ends, or kills it.
fn wait(mut child: Child, time_limit: Duration) -> io::Result<ExitStatus> {
    let deadline = Deadline::after(&SystemClock, time_limit);
    while !deadline.has_passed(&SystemClock) {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        sleep(POLL_INTERVAL);
    }
    child.kill()?;
    // A process that hangs in the kernel does not end at once. Its status says nothing more.
    std::thread::spawn(move || drop(child.wait()));
    let found = format!("no answer within {} s", time_limit.as_secs_f64());
    Err(io::Error::new(io::ErrorKind::TimedOut, found))
}
