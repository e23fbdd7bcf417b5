//! The life of a node's process: start, serve, reload, stop.

use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use cascade_block::ByteSize;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;

use crate::admin;
use crate::config::{ConfigError, Environment};
use crate::controls::Controls;
use crate::doctor::{self, Finding, Machine, State, ThisMachine};
use crate::http::{self, HttpConfig};
use crate::notify::Supervisor;
use crate::socket::SocketFile;
use crate::status::NodeState;
use crate::telemetry::{self, Spans};
use crate::tier_log::TierLog;
use crate::{Node, NodeConfig, NodeError, Server};

/// What a signal asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Stop,
    Reload,
}

/// How long requests of the TCP port and spans under way may take at the end.
const PORT_STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// How often tiers are looked at for what is to be logged.
const TIERS_INTERVAL: Duration = Duration::from_secs(5);

/// Serves until the process is told to end: SIGTERM and SIGINT end it cleanly, a second one at
/// once; SIGHUP makes it read its configuration anew by `reload`. Prints one line with `ready` to
/// standard output once it serves.
pub fn run(
    config: NodeConfig,
    reload: impl Fn() -> Result<NodeConfig, ConfigError> + Send + 'static,
) -> Result<(), NodeError> {
    let failed = |operation| move |source| NodeError::Server { operation, source };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(failed("start the thread that waits for signals"))?;
    let orders = runtime.block_on(async { Orders::new() });
    let mut orders = orders.map_err(failed("wait for signals"))?;
    let supervisor =
        Supervisor::of(&Environment::of_process()).map_err(failed("reach the service manager"))?;
    raise_descriptors();
    let spans = config.trace_endpoint.as_deref().map(Spans::open).transpose()?;
    let log = telemetry::start(&config.log, spans.as_ref())?;
    say_files_capacity(&config);
    foresee(&config);
    let group = config.admin_group.as_ref().map(|group| group.number);
    let (listener, file) = SocketFile::listen(&config.socket, config.socket_mode, group)?;
    let node = Node::open(config)?;
    node.set_controls(Controls::new(reload, log, &orders.stop));
    if let Some(spans) = &spans {
        node.set_spans(spans.clone());
    }
    let security = node.config().security.clone();
    let port = node.config().listen.map(|listen| HttpConfig::new(listen, security));
    let port = port.map(|port| http::serve(&node, port)).transpose()?;
    let server = Server::start(node.clone(), listener)?;
    node.set_state(NodeState::Serving);
    let line = ready_line(&node);
    let mut output = io::stdout();
    let printed = writeln!(output, "{line}").and_then(|()| output.flush());
    printed.map_err(failed("print that it is ready"))?;
    tell(supervisor.ready(&line));
    let mut tiers = TierLog::default();
    loop {
        let order = async { tokio::time::timeout(TIERS_INTERVAL, orders.next()).await };
        let order = runtime.block_on(order);
        for line in tiers.news(&node.status()) {
            tracing::warn!("{line}");
        }
        match order {
            Err(_nothing_yet) => continue,
            Ok(Order::Stop) => break,
            Ok(Order::Reload) => {}
        }
        tell(supervisor.reloading());
        follow(&node);
        tell(supervisor.ready(&line));
    }
    tracing::info!("stopping: nothing new is taken, what waits for the tiers is written down");
    node.set_state(NodeState::Draining);
    tell(supervisor.stopping());
    server.stop();
    drop(file);
    let closed = close(&runtime, &mut orders, &node);
    // Whoever watches sees the node drain until it is over.
    if let Some(port) = port {
        port.stop(PORT_STOP_TIMEOUT);
    }
    if let Some(spans) = spans {
        spans.close(PORT_STOP_TIMEOUT);
    }
    closed
}

/// Closes the stores, for as long as the shutdown may take.
fn close(
    runtime: &tokio::runtime::Runtime,
    orders: &mut Orders,
    node: &Node,
) -> Result<(), NodeError> {
    let (sender, closed) = tokio::sync::oneshot::channel();
    let closing = node.clone();
    let close = move || {
        if sender.send(closing.close()).is_err() {
            tracing::warn!("the stores closed after the shutdown's deadline");
        }
    };
    let thread = std::thread::Builder::new().name("cascade-close".to_owned()).spawn(close);
    let operation = "start the thread that closes the stores";
    drop(thread.map_err(|source| NodeError::Server { operation, source })?);
    let most = node.live().shutdown_timeout;
    runtime.block_on(async {
        tokio::select! {
            closed = closed => closed.unwrap_or_else(|_| Err(unfinished("a store panicked"))),
            () = tokio::time::sleep(most) => Err(unfinished(&format!(
                "its tiers did not take everything within {} s; what is missing there is lost",
                most.as_secs_f64()
            ))),
            _ = orders.next() => Err(unfinished("it was told to stop at once")),
        }
    })
}

fn unfinished(what: &str) -> NodeError {
    NodeError::Unfinished { unfinished: what.to_owned() }
}

/// Every client is a descriptor or two: as many as the machine lets this user have.
fn raise_descriptors() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!(%error, ?current, "cannot raise the limit of open files");
    }
}

/// Takes from a configuration that was read again what a running node can take.
fn follow(node: &Node) {
    if let Err(reason) = admin::reload(node) {
        tracing::error!(%reason, "the configuration is refused; it stays as it was");
    }
}

/// Logs what the doctor calls failed: who starts a node often has not asked the doctor before.
fn foresee(config: &NodeConfig) {
    let machine: Arc<dyn Machine> = Arc::new(ThisMachine);
    let report = doctor::examine(Ok(config.clone()), &machine, doctor::TIME_LIMIT);
    for finding in report.checks.iter().filter(|finding| finding.state == State::Failed) {
        let Finding { id: check, found, why, remedy, .. } = finding;
        tracing::warn!(%check, %found, %why, remedy, "this machine does not carry the node");
    }
}

/// Logs a size that nobody chose: an operator who expects another one sees why.
fn say_files_capacity(config: &NodeConfig) {
    if let Some((bytes, reason)) = config.settings.derived_files_capacity() {
        let capacity = ByteSize(bytes).rounded();
        tracing::info!(%capacity, reason, "files_capacity is not set: the file tier takes a share");
    }
}

fn tell(told: io::Result<()>) {
    if let Err(error) = told {
        tracing::warn!(%error, "the service manager was not told");
    }
}

fn ready_line(node: &Node) -> String {
    let config = node.config();
    let version = env!("CARGO_PKG_VERSION");
    let pipeline = &config.store.pipeline;
    let socket = config.socket.display();
    let scheme = if config.security.certificate.is_some() { "https" } else { "http" };
    let port = node.address().map(|address| format!(", {scheme}://{address}/"));
    let port = port.unwrap_or_default();
    format!("cascade {version} ready: socket {socket}{port}, pipeline {pipeline}")
}

/// The signals that a node follows.
struct Orders {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    hangup: tokio::signal::unix::Signal,
    /// An administrator's order to end.
    stop: Arc<Notify>,
}

impl Orders {
    fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            stop: Arc::default(),
        })
    }

    async fn next(&mut self) -> Order {
        tokio::select! {
            _ = self.terminate.recv() => Order::Stop,
            _ = self.interrupt.recv() => Order::Stop,
            _ = self.hangup.recv() => Order::Reload,
            () = self.stop.notified() => Order::Stop,
        }
    }
}
