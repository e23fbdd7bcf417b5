//! The process of `cascade serve`: start, serve, reload, shut down.

use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use cascade_block::ByteSize;
use rustix::process::Signal;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;

use crate::admin;
use crate::config::{ConfigError, Environment};
use crate::controls::ProcessControls;
use crate::doctor::{self, CheckState, Finding, Machine, ThisMachine};
use crate::gpu_node::GpuNodeTask;
use crate::http::{self, HttpConfig, HttpHandle};
use crate::notify::ServiceManager;
use crate::socket::SocketFile;
use crate::status::NodeState;
use crate::telemetry::{self, Spans};
use crate::tier_log::TierLog;
use crate::{Node, NodeConfig, NodeError, Server};

/// What a signal requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProcessEvent {
    Stop,
    Reload,
}

/// Time limit at shutdown for HTTP requests in flight, and again for the export of spans.
const PORT_STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// A stop signal is a repetition of the first until the node has been closing its stores for this
/// long: `timeout` and shells signal the process and its group, and the node must not discard
/// pending blocks for that.
const SAME_STOP_REQUEST: Duration = Duration::from_secs(1);

/// Interval of the log lines about a start that takes long.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);

/// Poll interval of the log lines about tiers.
const TIERS_INTERVAL: Duration = Duration::from_secs(5);

/// Serves until the process is stopped.
///
/// SIGTERM and SIGINT shut it down cleanly. Another one stops it at once, if it comes when the node
/// has been closing its stores for a second (`SAME_STOP_REQUEST`).
/// SIGHUP reloads the configuration through `reload`. Prints one line with `ready` to standard
/// output once it serves. With `stop_with_input`, the end of the standard input stops it, too: the
/// process that started it has ended then.
pub fn run(
    config: NodeConfig,
    stop_with_input: bool,
    reload: impl Fn() -> Result<NodeConfig, ConfigError> + Send + 'static,
) -> Result<(), NodeError> {
    let failed = |operation| move |source| NodeError::Server { operation, source };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(failed("start the runtime that waits for signals"))?;
    // Handlers first: a signal during the recovery is kept, and then shuts down cleanly.
    let signals = runtime.block_on(async { ProcessSignals::new() });
    let mut signals = signals.map_err(failed("install signal handlers"))?;
    let service_manager = ServiceManager::of(&Environment::of_process())
        .map_err(failed("connect to the service manager at NOTIFY_SOCKET"))?;
    raise_descriptor_limit();
    if stop_with_input {
        stop_with_the_input(&signals.stop).map_err(failed("start the thread that reads input"))?;
    }
    let spans = config.trace_endpoint.as_deref().map(Spans::open).transpose()?;
    let log = telemetry::start(&config.log, spans.as_ref())?;
    if config.log.json {
        telemetry::log_panics();
    }
    log_derived_files_capacity(&config);
    log_failed_checks(&config);
    let group = config.admin_group.as_ref().map(|group| group.gid);
    // Its lock comes before the stores: a second node at the same socket fails here.
    let (listener, file) = SocketFile::listen(&config.socket, config.socket_mode, group)?;
    let node = Node::new(config)?;
    node.set_controls(ProcessControls::new(reload, log, &signals.stop));
    if let Some(spans) = &spans {
        node.set_spans(spans.clone());
    }
    // The port comes before the stores, which can take minutes: it says how far they are.
    let port = serve_http(&node)?;
    let opening = node.clone();
    if !open_stores(&runtime, &mut signals, &node, move || opening.open_stores())? {
        tracing::info!("stopped during the start");
        return Ok(());
    }
    let server = Server::start(node.clone(), listener)?;
    node.set_state(NodeState::Serving);
    node.watch_gpu(&signals.stop).map_err(failed("start the thread that watches the GPU"))?;
    let gpu_node = start_gpu_node(&runtime, &node);
    let line = ready_line(&node);
    print_ready(&node, &line).map_err(failed("print the ready line to standard output"))?;
    log_notify_error(service_manager.ready(&line));
    serve_until_stopped(&runtime, &mut signals, &node, &service_manager, &line);
    tracing::info!("shutting down: no new requests are accepted, pending blocks are written");
    node.set_state(NodeState::Draining);
    log_notify_error(service_manager.stopping());
    if let Some(gpu_node) = gpu_node {
        runtime.block_on(gpu_node.stop());
    }
    // Clients first, then the socket's file and lock, then the stores: a node that starts meanwhile
    // gets the socket only after this one has stopped serving it.
    server.stop();
    drop(file);
    let closed = close(&runtime, &mut signals, &node);
    // The TCP port is last, so that monitoring can observe the drain.
    if let Some(port) = port {
        port.stop(PORT_STOP_TIMEOUT);
    }
    if let Some(spans) = spans {
        spans.close(PORT_STOP_TIMEOUT);
    }
    closed.and(node.check_gpu())
}

/// Opens the stores by `open`, in a thread of its own, and logs how far it is. Returns false if the
/// process is told to stop meanwhile: the thread ends with the process then.
fn open_stores(
    runtime: &tokio::runtime::Runtime,
    signals: &mut ProcessSignals,
    node: &Node,
    open: impl FnOnce() -> Result<(), NodeError> + Send + 'static,
) -> Result<bool, NodeError> {
    tracing::info!(
        memory = %ByteSize(node.config().dram_bytes()).rounded(),
        "allocating the memory of all pools, and opening the tiers"
    );
    let (sender, mut opened) = tokio::sync::oneshot::channel();
    // Without a receiver, the process ends.
    let open = move || drop(sender.send(open()));
    let thread = std::thread::Builder::new().name("cascade-open".to_owned()).spawn(open);
    let operation = "start the thread that opens the stores";
    drop(thread.map_err(|source| NodeError::Server { operation, source })?);
    let mut has_reload = false;
    loop {
        let event = runtime.block_on(async {
            tokio::select! {
                opened = &mut opened => OpeningEvent::Opened(opened),
                event = signals.next() => OpeningEvent::Signal(event),
                () = tokio::time::sleep(PROGRESS_INTERVAL) => OpeningEvent::Waited,
            }
        });
        match event {
            // Only a panic drops the sender before it has sent the result.
            OpeningEvent::Opened(opened) => {
                opened.unwrap_or_else(|_| Err(unfinished("a store panicked")))?;
                if has_reload {
                    reload_config(node);
                }
                return Ok(true);
            }
            OpeningEvent::Signal(ProcessEvent::Stop) => return Ok(false),
            OpeningEvent::Signal(ProcessEvent::Reload) => has_reload = true,
            OpeningEvent::Waited => tracing::info!("{}", node.progress_of_start()),
        }
    }
}

/// What happens while the stores are opened.
enum OpeningEvent {
    Opened(Result<Result<(), NodeError>, tokio::sync::oneshot::error::RecvError>),
    Signal(ProcessEvent),
    Waited,
}

/// Reloads the configuration when it is told to, and logs problems of tiers.
fn serve_until_stopped(
    runtime: &tokio::runtime::Runtime,
    signals: &mut ProcessSignals,
    node: &Node,
    service_manager: &ServiceManager,
    line: &str,
) {
    let mut tiers = TierLog::default();
    loop {
        // A time-out drops the future; a signal stays pending until the next call.
        let event = async { tokio::time::timeout(TIERS_INTERVAL, signals.next()).await };
        let event = runtime.block_on(event);
        for line in tiers.new_lines(&node.status()) {
            tracing::warn!("{line}");
        }
        match event {
            Err(_elapsed) => continue,
            Ok(ProcessEvent::Stop) => return,
            Ok(ProcessEvent::Reload) => {}
        }
        // `ready` ends the reload for the service manager, also if the reload failed.
        log_notify_error(service_manager.reloading());
        reload_config(node);
        log_notify_error(service_manager.ready(line));
    }
}

/// Starts the node in the memory of a GPU, if this node has one.
fn start_gpu_node(runtime: &tokio::runtime::Runtime, node: &Node) -> Option<GpuNodeTask> {
    let gpu = Arc::clone(node.gpu_node()?);
    let of_node = node.config().gpu_node.clone()?;
    let node = node.clone();
    // With the settings of the time when it starts.
    let variables = move || node.current_config().settings.of_gpu_node(&of_node);
    Some(GpuNodeTask::start(runtime, gpu, variables))
}

/// Starts a thread that stops the process when the standard input ends. What it says is ignored.
fn stop_with_the_input(stop: &Arc<Notify>) -> io::Result<()> {
    let stop = Arc::clone(stop);
    let watch = move || {
        // An input that cannot be read has ended, too.
        drop(io::copy(&mut io::stdin().lock(), &mut io::sink()));
        stop.notify_one();
    };
    std::thread::Builder::new().name("cascade-input".to_owned()).spawn(watch).map(drop)
}

/// Serves HTTP if `listen` is set.
fn serve_http(node: &Node) -> Result<Option<HttpHandle>, NodeError> {
    let Some(listen) = node.config().listen else { return Ok(None) };
    let port = http::serve(node, HttpConfig::new(listen, node.config().security.clone()))?;
    if let Some(controls) = node.controls() {
        controls.http_access.get_or_init(|| port.access());
    }
    Ok(Some(port))
}

/// Closes the stores within `shutdown_timeout`.
///
/// A thread of its own closes them, so that this one can give up at the deadline or at a second
/// signal. The thread then keeps running until the process exits.
fn close(
    runtime: &tokio::runtime::Runtime,
    signals: &mut ProcessSignals,
    node: &Node,
) -> Result<(), NodeError> {
    let (sender, closed) = tokio::sync::oneshot::channel();
    let closing = node.clone();
    let close = move || {
        if sender.send(closing.close()).is_err() {
            tracing::warn!("the stores closed only after shutdown_timeout");
        }
    };
    let thread = std::thread::Builder::new().name("cascade-close".to_owned()).spawn(close);
    let operation = "start the thread that closes the stores";
    drop(thread.map_err(|source| NodeError::Server { operation, source })?);
    let timeout = node.live_settings().shutdown_timeout;
    runtime.block_on(async {
        tokio::select! {
            // Only a panic drops the sender before it has sent the result.
            closed = closed => closed.unwrap_or_else(|_| Err(unfinished("a store panicked"))),
            () = tokio::time::sleep(timeout) => Err(unfinished(&format!(
                "not every block was written within shutdown_timeout ({} s); the others are lost",
                timeout.as_secs_f64()
            ))),
            () = signals.next_stop_request() => Err(unfinished(
                "a second signal ended it before every block was written; the others are lost",
            )),
        }
    })
}

fn unfinished(what: &str) -> NodeError {
    NodeError::Unfinished { unfinished: what.to_owned() }
}

/// Raises the soft limit of open files to the hard limit: a client takes two descriptors.
fn raise_descriptor_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!(%error, ?current, "cannot raise the limit of open files; see `ulimit -n`");
    }
}

/// Reloads the configuration and applies the settings that a running node can change.
fn reload_config(node: &Node) {
    if let Err(reason) = admin::reload(node) {
        tracing::error!(%reason, "cannot reload the configuration; the current one stays in force");
    }
}

/// Runs the checks of `cascade doctor` and logs those that failed, as operators often start a node
/// without running the doctor first.
fn log_failed_checks(config: &NodeConfig) {
    // The CUDA driver is not asked: a node does not use it, and it would delay the start.
    let machine: Arc<dyn Machine> = Arc::new(ThisMachine::default());
    let report = doctor::examine(Ok(config.clone()), &machine, doctor::TIME_LIMIT);
    for finding in report.checks.iter().filter(|finding| finding.state == CheckState::Failed) {
        let Finding { id: check, found, why, remedy, .. } = finding;
        tracing::warn!(%check, %found, %why, remedy, "a check of this machine failed");
    }
}

/// Logs a capacity that is a default derived from free space, with the reason for its size.
fn log_derived_files_capacity(config: &NodeConfig) {
    if let Some((bytes, reason)) = config.settings.derived_files_capacity() {
        let capacity = ByteSize(bytes).rounded();
        tracing::info!(%capacity, reason, "files_capacity is not set; using a share of the disk");
    }
}

fn log_notify_error(sent: io::Result<()>) {
    if let Err(error) = sent {
        tracing::warn!(%error, "cannot notify the service manager");
    }
}

/// The pipeline, with the tiers that this node does not have.
fn shown_pipeline(config: &NodeConfig) -> String {
    let shown = config.store.pipeline.split('|').map(|name| {
        let is_absent = name.trim().eq_ignore_ascii_case("hbm") && config.gpu.is_none();
        let absent = if is_absent { " (absent: no GPU is set)" } else { "" };
        format!("{}{absent}", name.trim())
    });
    shown.collect::<Vec<_>>().join("|")
}

/// Prints the line with `ready`: as JSON if the log is JSON, because both may go to one file.
fn print_ready(node: &Node, line: &str) -> io::Result<()> {
    let mut output = io::stdout();
    if node.config().log.json {
        writeln!(output, "{}", telemetry::json_line("INFO", line))?;
    } else {
        writeln!(output, "{line}")?;
    }
    output.flush()
}

fn ready_line(node: &Node) -> String {
    let config = node.config();
    let version = env!("CARGO_PKG_VERSION");
    let hbm = if config.gpu_node.is_some() { "Hbm|" } else { "" };
    let pipeline = shown_pipeline(config);
    let socket = config.socket.display();
    let scheme = if config.security.certificate.is_some() { "https" } else { "http" };
    let port = node.address().map(|address| format!(", {scheme}://{address}/"));
    let port = port.unwrap_or_default();
    format!("cascade {version} ready: socket {socket}{port}, pipeline {hbm}{pipeline}")
}

/// The signals that the process handles, and the admin command that stops it.
struct ProcessSignals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    hangup: tokio::signal::unix::Signal,
    /// Sent for a write beyond the limit of file sizes. With a handler that write is an error, and
    /// without one the process ends.
    _file_size: tokio::signal::unix::Signal,
    /// Notified by `drain` with `exit`.
    stop: Arc<Notify>,
}

impl ProcessSignals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            _file_size: signal(SignalKind::from_raw(Signal::XFSZ.as_raw()))?,
            stop: Arc::default(),
        })
    }

    async fn next(&mut self) -> ProcessEvent {
        tokio::select! {
            _ = self.terminate.recv() => ProcessEvent::Stop,
            _ = self.interrupt.recv() => ProcessEvent::Stop,
            _ = self.hangup.recv() => ProcessEvent::Reload,
            () = self.stop.notified() => ProcessEvent::Stop,
        }
    }

    /// Returns when a stop is requested again. A reload and repetitions of the first request are
    /// not requests to stop at once.
    async fn next_stop_request(&mut self) {
        // From here, not from the first signal: signals that came while the server stopped are all
        // received now, and their times are unknown.
        let first = tokio::time::Instant::now();
        while self.next().await != ProcessEvent::Stop || first.elapsed() < SAME_STOP_REQUEST {}
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::net::TcpStream;

    use tokio::time::{Instant, sleep};

    use super::*;

    /// The reason of `/readyz`, or the code of another page.
    fn get(port: &HttpHandle, path: &str) -> String {
        let mut stream = TcpStream::connect(port.address()).unwrap();
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", port.address());
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn a_node_that_starts_answers_and_can_be_stopped() {
        let directory = tempfile::tempdir().unwrap();
        let mut config = NodeConfig::new(directory.path().join("socket"));
        config.listen = Some("127.0.0.1:0".parse().unwrap());
        let node = Node::new(config).unwrap();
        let port = serve_http(&node).unwrap().unwrap();
        assert!(get(&port, "/healthz").starts_with("HTTP/1.1 200"));
        for path in ["/readyz", "/", "/status.json", "/metrics"] {
            let answer = get(&port, path);
            assert!(answer.starts_with("HTTP/1.1 503"), "{path}: {answer}");
            assert!(
                answer.contains("starting: ") && answer.contains(" % of the memory"),
                "{path}: {answer}"
            );
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut signals = runtime.block_on(async { ProcessSignals::new() }).unwrap();
        let (end, is_ended) = std::sync::mpsc::channel::<()>();
        signals.stop.notify_one();
        // Ends with the other end of the channel: not before the stop.
        let endless = move || is_ended.recv().map_err(|_| unfinished("it ends"));
        assert!(!open_stores(&runtime, &mut signals, &node, endless).unwrap());
        drop(end);
        let fails = || Err(unfinished("no memory"));
        assert!(open_stores(&runtime, &mut signals, &node, fails).is_err());
        let opening = node.clone();
        let open = move || opening.open_stores();
        assert!(open_stores(&runtime, &mut signals, &node, open).unwrap());
        assert!(get(&port, "/status.json").starts_with("HTTP/1.1 200"));
    }

    #[test]
    fn the_ready_line_names_a_tier_that_is_absent() {
        let mut config = NodeConfig::new("/socket");
        "Hbm|Dram | Files".clone_into(&mut config.store.pipeline);
        assert_eq!(shown_pipeline(&config), "Hbm (absent: no GPU is set)|Dram|Files");
        config.gpu = Some("GPU-1".to_owned());
        assert_eq!(shown_pipeline(&config), "Hbm|Dram|Files");
    }

    #[test]
    fn repetitions_of_a_stop_request_are_ignored_for_a_second() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut signals = ProcessSignals::new().unwrap();
            let stop = Arc::clone(&signals.stop);
            let began = Instant::now();
            let repeat = async {
                loop {
                    stop.notify_one();
                    sleep(Duration::from_millis(10)).await;
                }
            };
            tokio::select! {
                () = repeat => {}
                () = signals.next_stop_request() => {}
            }
            assert!(began.elapsed() >= SAME_STOP_REQUEST, "{:?}", began.elapsed());
        });
    }
}
