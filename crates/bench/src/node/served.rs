//! The measured node: a child process of this command that serves on a temporary socket.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use cascade_client::{Client, ConnectOptions};
use rustix::process::{Pid, Signal, kill_process};

use super::process::{ProcessStats, this_command};
use super::{machine_ns, sleep};
use crate::MeasureError;

/// Time-out of the node's end after SIGTERM.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// A node process that is stopped on drop.
#[derive(Debug)]
pub(super) struct ServedNode {
    child: Child,
    directory: PathBuf,
}

impl ServedNode {
    /// Starts a node with only a DRAM tier and waits until it serves.
    pub(super) fn start(dram_bytes: usize) -> Result<Self, MeasureError> {
        let failed = |error| MeasureError::measure("a served node", error);
        let directory = socket_directory().map_err(failed)?;
        let mut command = this_command()?;
        command.arg("serve").arg("--socket").arg(directory.join("s"));
        command.args(["--pipeline", "Dram", "--log-filter", "warn"]);
        command.arg("--dram").arg(dram_bytes.to_string());
        let spawned = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let served = Self { child: spawned.map_err(failed)?, directory };
        served.wait_until_ready()
    }

    fn wait_until_ready(mut self) -> Result<Self, MeasureError> {
        let output = self.child.stdout.take().expect("stdout is piped");
        // The output ends when the node ends, so this does not wait for ever.
        for line in BufReader::new(output).lines() {
            let line = line.map_err(|error| MeasureError::measure("a served node", error))?;
            if line.contains("ready") {
                return Ok(self);
            }
        }
        Err(MeasureError::measure(
            "a served node",
            "it ended before it was ready; its message is above",
        ))
    }

    /// The path of its socket.
    pub(super) fn socket(&self) -> PathBuf {
        self.directory.join("s")
    }

    /// A client in this process.
    pub(super) fn connect(&self) -> Result<Client, MeasureError> {
        let options = ConnectOptions::new(self.socket());
        Client::connect(options).map_err(|error| MeasureError::measure("a client", error))
    }

    /// The kernel's statistics of the node process.
    pub(super) fn stats(&self) -> Result<ProcessStats, MeasureError> {
        ProcessStats::of(self.child.id())
    }

    fn end(&mut self) {
        let process = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        let signalled = process.map(|process| kill_process(process, Signal::TERM));
        let until = machine_ns() + u64::try_from(END_TIMEOUT.as_nanos()).unwrap_or(u64::MAX);
        while signalled == Some(Ok(())) && machine_ns() < until {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            sleep(Duration::from_millis(5));
        }
        // The process may have ended meanwhile, which is fine.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Drop for ServedNode {
    fn drop(&mut self) {
        self.end();
        // If this fails, only the file of a socket remains in the temporary directory.
        drop(fs::remove_dir_all(&self.directory));
    }
}

/// A new directory for sockets. Its path is short, because the path of a socket is limited to 107
/// bytes.
pub(super) fn socket_directory() -> std::io::Result<PathBuf> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let name = format!("cascade-bench-{}-{number}", std::process::id());
    let path = std::env::temp_dir().join(name);
    fs::DirBuilder::new().mode(0o700).create(&path)?;
    Ok(path)
}
