//! Counts the system calls of processes with strace, from outside of the code that makes them.

use std::fs;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::Duration;

use cascade_runtime::{Deadline, SystemClock, sleep};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, getppid, kill_process};

use super::failed;
use crate::MeasureError;

/// How long strace may take to attach and to detach.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The longest pause between two looks at whether strace has ended.
const PAUSE: Duration = Duration::from_millis(5);
/// What marks the begin and the end of what is counted in strace's log: a system call that nothing
/// else here makes.
const MARK: &str = "getppid(";

/// strace, attached to this process and another one.
#[derive(Debug)]
pub(super) struct SystemCalls {
    strace: Child,
    /// Open, so that strace can say what it wants.
    _said: ChildStderr,
    log: PathBuf,
}

impl SystemCalls {
    /// Attaches to this process and to `other`; the log is written to `log`.
    ///
    /// # Errors
    /// Why system calls cannot be counted here.
    pub(super) fn attach(other: u32, log: PathBuf) -> Result<Self, String> {
        let mut command = Command::new("strace");
        command.args(["-f", "-s", "0", "-e", "signal=none", "-o"]).arg(&log);
        for process in [std::process::id(), other] {
            command.args(["-p", &process.to_string()]);
        }
        let mut strace =
            command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().map_err(|error| {
                format!("strace does not start (Debian: apt-get install strace): {error}")
            })?;
        let stderr = strace.stderr.take().expect("stderr is piped");
        let attached = wait_until_attached(&stderr, 2);
        let calls = Self { strace, _said: stderr, log };
        let refused =
            |reason: String| format!("strace cannot attach to processes here: {}", reason.trim());
        attached.map(|()| calls).map_err(refused)
    }

    /// Marks in the log that what is counted begins, or ends.
    pub(super) fn mark() {
        let _parent = getppid();
    }

    /// Detaches, and returns how many calls were made between each mark of a begin and that of its
    /// end.
    pub(super) fn counts(mut self) -> Result<Vec<u64>, MeasureError> {
        self.detach();
        let log = fs::read_to_string(&self.log).map_err(failed)?;
        Ok(between_marks(&log))
    }

    /// Ends strace, which lets the processes go on.
    fn detach(&mut self) {
        let has_ended = |strace: &mut Child| !matches!(strace.try_wait(), Ok(None));
        if has_ended(&mut self.strace) {
            return;
        }
        let deadline = Deadline::after(&SystemClock, TIMEOUT);
        if let Some(pid) = i32::try_from(self.strace.id()).ok().and_then(Pid::from_raw) {
            match kill_process(pid, Signal::INT) {
                // It may end at this moment.
                Ok(()) | Err(_) => {}
            }
        }
        while !has_ended(&mut self.strace) {
            if deadline.has_passed(&SystemClock) {
                // The kernel detaches for a tracer that is gone.
                drop(self.strace.kill());
                drop(self.strace.wait());
                return;
            }
            sleep(PAUSE);
        }
    }
}

impl Drop for SystemCalls {
    fn drop(&mut self) {
        self.detach();
    }
}

/// Waits until strace says that it has attached to so many processes. The error is what it said.
fn wait_until_attached(stderr: &ChildStderr, count: usize) -> Result<(), String> {
    let deadline = Deadline::after(&SystemClock, TIMEOUT);
    let mut said = String::new();
    while said.matches(" attached").count() < count {
        let left = deadline.remaining(&SystemClock);
        let left =
            Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        let ready = poll(&mut [PollFd::new(stderr, PollFlags::IN)], Some(&left));
        let mut buffer = [0; 4096];
        let read = match ready {
            Ok(1..) => rustix::io::read(stderr.as_fd(), &mut buffer),
            Ok(0) => Ok(0),
            Err(error) => Err(error),
        };
        match read {
            Ok(0) => return Err(said),
            Ok(bytes) => said.push_str(&String::from_utf8_lossy(&buffer[..bytes])),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.to_string()),
        }
    }
    Ok(())
}

/// Calls that begin between the first mark and the second, the third and the fourth, and so on.
fn between_marks(log: &str) -> Vec<u64> {
    let mut counts = vec![];
    let mut is_counting = false;
    for line in log.lines() {
        let call = line.split_once(' ').map_or("", |(_, call)| call.trim_start());
        if call.starts_with(MARK) {
            is_counting = !is_counting;
            if is_counting {
                counts.push(0);
            }
        } else if is_counting && call.starts_with(|first: char| first.is_ascii_lowercase()) {
            // Other lines are the ends of calls that began before, signals, and ends of threads.
            if let Some(count) = counts.last_mut() {
                *count += 1;
            }
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_between_marks_are_counted_once() {
        let log = "\
10 write(3, \"\"..., 5) = 5
10 getppid() = 1
10 sendmsg(4, {msg_name=NULL}, MSG_NOSIGNAL) = 100
12 <... poll resumed>) = 1 ([{fd=5, revents=POLLIN}])
12 recvmsg(5,  <unfinished ...>
10 poll([{fd=4, events=POLLIN}], 1, {tv_sec=1, tv_nsec=0}) = 1
12 <... recvmsg resumed>{msg_name=NULL}, MSG_WAITALL) = 100
12 --- SIGCHLD {si_signo=SIGCHLD} ---
10 getppid() = 1
10 close(7) = 0
10 getppid() = 1
10 getppid() = 1
12 +++ exited with 0 +++
";
        assert_eq!(between_marks(log), [3, 0]);
    }
}
