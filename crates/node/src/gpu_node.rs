//! Starts the node in the memory of a GPU as a process of its own, and again after a failure.

use std::io;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cascade_runtime::{Clock, SystemClock};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::runtime::Runtime;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::config::GpuNodeConfig;

/// The flag of `cascade serve` with which a node stops when its standard input ends.
pub const STOP_WITH_INPUT: &str = "stop-with-input";

/// The pause before the first new start after a failure. It doubles up to `PAUSE_MAX`.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// The longest pause. A node that served for this long begins again with the shortest.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// Time for a clean stop; after it the process is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// The node in the memory of a GPU that belongs to a node in DRAM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuNodeStatus {
    /// The GPU's UUID.
    pub uuid: String,
    /// The node's socket.
    pub socket: String,
    /// What it does.
    pub state: GpuNodeState,
    /// Why it does not serve, if it failed.
    pub reason: Option<String>,
    /// Its process, if it runs.
    pub pid: Option<u32>,
}

impl GpuNodeStatus {
    /// What an operator should know of it.
    pub(crate) fn note(&self) -> Option<String> {
        let uuid = &self.uuid;
        match self.state {
            GpuNodeState::Starting | GpuNodeState::Serving => None,
            GpuNodeState::Released => Some(format!(
                "the memory of GPU {uuid} was given back; `cascade hbm start` takes it again"
            )),
            GpuNodeState::Failed => {
                let reason = self.reason.as_deref().unwrap_or("its log says why");
                Some(format!("the node in the memory of GPU {uuid} failed: {reason}"))
            }
        }
    }
}

/// What the node in the memory of a GPU does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GpuNodeState {
    /// Its process runs and is not ready yet.
    Starting,
    /// It serves.
    Serving,
    /// It gave the memory back to the GPU. It starts again when it is told to.
    Released,
    /// It failed, and starts again after a pause.
    Failed,
}

impl GpuNodeState {
    /// The word in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Serving => "serving",
            Self::Released => "released",
            Self::Failed => "failed",
        }
    }
}

/// A handle on the node of the GPU: its status, and the order to start it again.
#[derive(Debug)]
pub(crate) struct GpuNode {
    config: GpuNodeConfig,
    status: Mutex<GpuNodeStatus>,
    start: Notify,
    stop: Notify,
}

impl GpuNode {
    pub(crate) fn new(config: GpuNodeConfig) -> Self {
        let status = GpuNodeStatus {
            uuid: config.uuid.clone(),
            socket: config.socket.display().to_string(),
            state: GpuNodeState::Starting,
            reason: None,
            pid: None,
        };
        Self { config, status: Mutex::new(status), start: Notify::new(), stop: Notify::new() }
    }

    pub(crate) fn status(&self) -> GpuNodeStatus {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Starts the node unless it runs.
    pub(crate) fn start(&self) {
        let is_down = matches!(self.status().state, GpuNodeState::Released | GpuNodeState::Failed);
        if is_down {
            self.start.notify_one();
        }
    }

    fn set(&self, state: GpuNodeState, pid: Option<u32>, reason: Option<String>) {
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        status.state = state;
        status.pid = pid;
        status.reason = reason;
    }
}

type Variables = Vec<(String, Option<String>)>;

/// The task that keeps the node of the GPU running.
#[derive(Debug)]
pub(crate) struct GpuNodeTask {
    gpu: Arc<GpuNode>,
    task: JoinHandle<()>,
}

impl GpuNodeTask {
    /// Starts the node of the GPU. `variables` are set for its process, and those without a value
    /// removed.
    pub(crate) fn start(
        runtime: &Runtime,
        gpu: Arc<GpuNode>,
        variables: impl Fn() -> Variables + Send + Sync + 'static,
    ) -> Self {
        let task = runtime.spawn(keep_running(Arc::clone(&gpu), variables));
        Self { gpu, task }
    }

    /// Stops the node of the GPU. Its process has ended, or was killed, when this returns.
    pub(crate) async fn stop(self) {
        self.gpu.stop.notify_one();
        if let Err(error) = self.task.await {
            tracing::warn!(%error, "the task that runs the node of the GPU panicked");
        }
    }
}

/// How a run of the node ended.
enum Ended {
    /// This node told it to.
    Stopped,
    /// An operator told it to, or others need the memory.
    Released,
    /// By itself, or it could not be started.
    Failed(String),
}

async fn keep_running(gpu: Arc<GpuNode>, variables: impl Fn() -> Variables + Send + Sync) {
    let mut pause = PAUSE_MIN;
    loop {
        let began = SystemClock.monotonic();
        let uuid = &*gpu.config.uuid;
        match run_once(&gpu, variables()).await {
            Ended::Stopped => return,
            Ended::Released => {
                pause = PAUSE_MIN;
                gpu.set(GpuNodeState::Released, None, None);
                tracing::info!(
                    gpu = uuid,
                    "the memory of the GPU was given back; `cascade hbm start` takes it again"
                );
                tokio::select! {
                    () = gpu.start.notified() => {}
                    () = gpu.stop.notified() => return,
                }
            }
            Ended::Failed(reason) => {
                if SystemClock.monotonic().saturating_sub(began) >= PAUSE_MAX {
                    pause = PAUSE_MIN;
                }
                let pause_s = pause.as_secs();
                tracing::warn!(gpu = uuid, reason, pause_s, "the node of the GPU does not run");
                gpu.set(GpuNodeState::Failed, None, Some(reason));
                tokio::select! {
                    () = sleep(pause) => {}
                    () = gpu.start.notified() => {}
                    () = gpu.stop.notified() => return,
                }
                pause = PAUSE_MAX.min(pause * 2);
            }
        }
    }
}

/// Runs the node of the GPU until its process ends or `stop` is notified.
async fn run_once(gpu: &GpuNode, variables: Variables) -> Ended {
    gpu.set(GpuNodeState::Starting, None, None);
    let mut child = match command(variables).spawn() {
        Ok(child) => child,
        Err(error) => return Ended::Failed(format!("cannot start its process: {error}")),
    };
    let input = child.stdin.take();
    let pid = child.id();
    gpu.set(GpuNodeState::Starting, pid, None);
    let output = child.stdout.take();
    let serve = async {
        let mut lines = BufReader::new(output?).lines();
        // The first line says `ready`. The output then ends with the process.
        lines.next_line().await.ok().flatten()?;
        gpu.set(GpuNodeState::Serving, pid, None);
        tracing::info!(gpu = &*gpu.config.uuid, socket = %gpu.config.socket.display(), pid,
            "the node of the GPU serves");
        lines.next_line().await.ok().flatten()
    };
    let run = async {
        let (_, ended) = tokio::join!(serve, child.wait());
        ended
    };
    tokio::select! {
        ended = run => of_exit(ended),
        () = gpu.stop.notified() => {
            end(child, input).await;
            Ended::Stopped
        }
    }
}

fn of_exit(ended: io::Result<ExitStatus>) -> Ended {
    match ended {
        Ok(status) if status.success() => Ended::Released,
        Ok(status) => Ended::Failed(format!("its process ended with {status}; see the log")),
        Err(error) => Ended::Failed(format!("cannot wait for its process: {error}")),
    }
}

/// Ends the process: it stops when its input ends.
async fn end(mut child: Child, input: Option<ChildStdin>) {
    drop(input);
    if timeout(STOP_TIMEOUT, child.wait()).await.is_err() {
        tracing::warn!("the node of the GPU did not stop in time, and is killed");
        // Not waited for: a process that hangs in the driver may never end.
        if let Err(error) = child.start_kill() {
            tracing::warn!(%error, "cannot kill the node of the GPU");
        }
    }
}

/// The command of the node. This process's configuration file and flags do not count for it.
fn command(variables: Variables) -> Command {
    // Not the path of the program, which may be another version by now.
    let mut command = Command::new("/proc/self/exe");
    command.arg("serve").arg(format!("--{STOP_WITH_INPUT}"));
    for (name, value) in variables {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
    command
}
