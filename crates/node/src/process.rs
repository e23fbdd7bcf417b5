//! The life of a node's process: start, serve, reload, stop.

use std::io::Write;
use tokio::signal::unix::{SignalKind, signal};

use crate::socket::SocketFile;
use crate::{Node, NodeConfig, NodeError, Phase, Server};

/// Why the process stops serving.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Signal {
    Stop,
    Reload,
}

/// Runs a node until it is told to stop: SIGTERM and SIGINT stop it cleanly, a second one at once;
/// SIGHUP makes it read its configuration again by `reload`. Prints one line with `ready` to
/// `output` when it serves.
pub fn run(
    config: NodeConfig,
    reload: impl Fn() -> Result<NodeConfig, String>,
    output: &mut dyn Write,
) -> Result<(), NodeError> {
    let failed = |operation| move |source| NodeError::Server { operation, source };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(failed("start the thread that waits for signals"))?;
    let mut signals =
        runtime.block_on(async { Signals::new() }).map_err(failed("wait for signals"))?;
    let (listener, file) = SocketFile::listen(&config.socket, config.socket_mode)?;
    let shutdown_timeout = config.shutdown_timeout;
    let node = Node::open(config)?;
    let server = Server::start(node.clone(), listener)?;
    node.set_phase(Phase::Serving);
    writeln!(output, "{}", ready_line(&node))
        .and_then(|()| output.flush())
        .map_err(failed("say that it is ready"))?;
    while runtime.block_on(signals.next()) == Signal::Reload {
        match reload() {
            Ok(_) => tracing::info!("the configuration was read again"),
            Err(error) => tracing::error!(%error, "the configuration stays as it was"),
        }
    }
    tracing::info!("stopping: nothing new is taken, what is queued is written down");
    node.set_phase(Phase::Draining);
    server.stop();
    drop(file);
    let (sender, closed) = tokio::sync::oneshot::channel();
    let closing = node.clone();
    std::thread::Builder::new()
        .name("cascade-close".to_owned())
        .spawn(move || {
            if sender.send(closing.close()).is_err() {
                tracing::warn!("the stores closed after the shutdown's deadline");
            }
        })
        .map_err(failed("start the thread that closes the stores"))?;
    runtime.block_on(async {
        tokio::select! {
            closed = closed => closed.unwrap_or_else(|_| Err(unfinished("a store panicked"))),
            () = tokio::time::sleep(shutdown_timeout) => Err(unfinished(&format!(
                "its tiers did not take everything within {} s; what is missing there is lost",
                shutdown_timeout.as_secs_f64()
            ))),
            _ = signals.next() => Err(unfinished("it was told to stop at once")),
        }
    })
}

fn unfinished(what: &str) -> NodeError {
    NodeError::Unfinished { unfinished: what.to_owned() }
}

fn ready_line(node: &Node) -> String {
    let config = node.config();
    let version = env!("CARGO_PKG_VERSION");
    let pipeline = &config.store.pipeline;
    format!("cascade {version} ready: socket {}, pipeline {pipeline}", config.socket.display())
}

/// The signals that a node follows.
struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    hangup: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.terminate.recv() => Signal::Stop,
            _ = self.interrupt.recv() => Signal::Stop,
            _ = self.hangup.recv() => Signal::Reload,
        }
    }
}
