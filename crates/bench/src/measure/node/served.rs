//! The node under measurement: this very command as a child that serves a temporary socket.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use cascade_client::{Client, ConnectOptions};
use rustix::process::{Pid, Signal, kill_process};

use super::process::{ProcessFacts, this_command};
use super::{machine_ns, rest};
use crate::cli::Failure;

/// How long a node may take to end on its own.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// A node that serves until this is dropped.
#[derive(Debug)]
pub(super) struct Served {
    child: Child,
    directory: PathBuf,
}

impl Served {
    /// Starts a node with a DRAM tier alone and waits until it serves.
    pub(super) fn start(dram_bytes: usize) -> Result<Self, Failure> {
        let failed = |error| Failure::measure("a served node", error);
        let directory = scratch().map_err(failed)?;
        let mut command = this_command()?;
        command.arg("serve").arg("--socket").arg(directory.join("s"));
        command.args(["--pipeline", "Dram", "--log-filter", "warn"]);
        command.arg("--dram").arg(dram_bytes.to_string());
        let spawned = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let served = Self { child: spawned.map_err(failed)?, directory };
        served.wait_until_ready()
    }

    fn wait_until_ready(mut self) -> Result<Self, Failure> {
        let output = self.child.stdout.take().expect("it is piped");
        // It ends with the node at the latest.
        for line in BufReader::new(output).lines() {
            let line = line.map_err(|error| Failure::measure("a served node", error))?;
            if line.contains("ready") {
                return Ok(self);
            }
        }
        Err(Failure::measure("a served node", "it ended before it was ready; its message is above"))
    }

    /// Where it listens.
    pub(super) fn socket(&self) -> PathBuf {
        self.directory.join("s")
    }

    /// A client in this process.
    pub(super) fn connect(&self) -> Result<Client, Failure> {
        let options = ConnectOptions::new(self.socket());
        Client::connect(options).map_err(|error| Failure::measure("a client", error))
    }

    /// What the kernel tells of it.
    pub(super) fn facts(&self) -> Result<ProcessFacts, Failure> {
        ProcessFacts::of(self.child.id())
    }

    fn end(&mut self) {
        let process = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        let asked = process.map(|process| kill_process(process, Signal::TERM));
        let until = machine_ns() + u64::try_from(END_TIMEOUT.as_nanos()).unwrap_or(u64::MAX);
        while asked == Some(Ok(())) && machine_ns() < until {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            rest(Duration::from_millis(5));
        }
        // Already gone is as good.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.end();
        // A directory that stays behind holds nothing but a socket.
        drop(fs::remove_dir_all(&self.directory));
    }
}

/// A directory for sockets, with a short name: a socket's address is short.
pub(super) fn scratch() -> std::io::Result<PathBuf> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let name = format!("cascade-bench-{}-{number}", std::process::id());
    let path = std::env::temp_dir().join(name);
    fs::DirBuilder::new().mode(0o700).create(&path)?;
    Ok(path)
}
