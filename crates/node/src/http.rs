//! The HTTP server for metrics, health, status and the status page, on a TCP port and a Unix
//! socket next to the node's own.

mod access;
mod connections;
mod error;
mod page;
mod plot;
mod reload;
mod responses;
mod routes;
mod runbooks;
mod security;
mod slots;

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::watch;

use crate::config::SecurityConfig;
use crate::error::NodeError;
use crate::node::Node;
use crate::socket::SocketFile;

pub use error::HttpError;
pub(crate) use reload::ReloadableAccess;
use security::Secrets;

/// Length of the kernel's queue of connections that are not accepted yet.
const BACKLOG: i32 = 4096;
/// Default connection limit of the port, and of the Unix socket. Also the number of reserve slots
/// for health checks while all others are busy. There, a new connection replaces the one that has
/// been idle longest, whatever its idle time.
const CONNECTIONS_MAX: usize = 256;
/// Descriptors that the connections of a server with the default limit can take.
pub(crate) const DESCRIPTORS_MAX: u64 = 3 * CONNECTIONS_MAX as u64;
/// How long a response in progress may delay the end of the thread.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// Path of the Unix socket for HTTP, by the path of the node's own socket.
pub fn http_socket_path(node_socket: &Path) -> PathBuf {
    let mut path = node_socket.as_os_str().to_owned();
    path.push(".http");
    path.into()
}

/// The listening sockets.
#[derive(Debug)]
struct Listeners {
    tcp: TcpListener,
    unix: Option<std::os::unix::net::UnixListener>,
    file: Option<SocketFile>,
}

/// Configuration of the HTTP server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpConfig {
    /// The TCP address. Port 0 chooses a free port.
    pub listen: SocketAddr,
    /// Authentication and TLS of the TCP port.
    pub security: SecurityConfig,
    /// Connection limit of the port, and of the Unix socket. At the limit, a new connection
    /// replaces the one that has been idle longest, or is limited to health checks. It is lower if
    /// the process may open few descriptors. Default: 256.
    pub connections_max: usize,
    /// Time limit of a request head, a TLS handshake, and the wait for the next request.
    /// Default: 10 s.
    pub head_timeout: Duration,
    /// Time limit of a connection, so that a slow reader cannot hold one. Default: 60 s.
    pub connection_timeout: Duration,
}

impl HttpConfig {
    /// The defaults, for an address.
    pub fn new(listen: SocketAddr, security: SecurityConfig) -> Self {
        Self {
            listen,
            security,
            connections_max: CONNECTIONS_MAX,
            head_timeout: Duration::from_secs(10),
            connection_timeout: Duration::from_secs(60),
        }
    }
}

/// The running HTTP server. Dropping it stops the server.
#[derive(Debug)]
pub struct HttpHandle {
    access: ReloadableAccess,
    stop: watch::Sender<Option<Duration>>,
    thread: Option<JoinHandle<()>>,
}

/// Starts the HTTP server of a node, on a TCP port and on a Unix socket next to the node's own.
///
/// # Errors
/// If listening fails, another node uses the Unix socket, or the security settings are invalid.
pub fn serve(node: &Node, config: HttpConfig) -> Result<HttpHandle, NodeError> {
    config.security.check(Some(config.listen)).map_err(HttpError::Settings)?;
    let secrets = Secrets::read(&config.security)?;
    let bind = |source| HttpError::Bind { address: config.listen, source };
    let listener = TcpListener::bind(config.listen).map_err(bind)?;
    listener.set_nonblocking(true).map_err(bind)?;
    // The standard library sets a backlog of 128. During a flood of connections it overflows, and
    // a client's kernel retries only after a second. Listening again sets a longer one.
    rustix::net::listen(&listener, BACKLOG).map_err(|error| bind(error.into()))?;
    let address = listener.local_addr().map_err(bind)?;
    node.set_address(address);
    let access = ReloadableAccess::new(address, secrets);
    let (stop, stopped) = watch::channel(None);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        // One thread for status responses, and one for readiness of each of the two routers.
        .max_blocking_threads(3)
        .build()
        .map_err(HttpError::Thread)?;
    if security::is_token_in_the_clear(&config.security, address) {
        tracing::warn!(%address, "clients send the token unencrypted; set tls_certificate");
    }
    // Before the thread starts, so that an error ends the start and not a running server.
    let (unix, file) = listen_unix(node)?;
    let listeners = Listeners { tcp: listener, unix, file };
    let shared = (node.clone(), access.clone());
    let thread = std::thread::Builder::new()
        .name("cascade-http".to_owned())
        .spawn(move || {
            let (node, access) = shared;
            runtime.block_on(connections::run(listeners, node, access, config, stopped));
            runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
        })
        .map_err(HttpError::Thread)?;
    tracing::info!(%address, "serving HTTP on a TCP port");
    Ok(HttpHandle { access, stop, thread: Some(thread) })
}

type UnixSocket = (Option<std::os::unix::net::UnixListener>, Option<SocketFile>);

/// Listens on the Unix socket for HTTP, which has the permissions of the node's own socket.
///
/// If its path would be too long, there is no such socket: `cascade status` shows the same.
fn listen_unix(node: &Node) -> Result<UnixSocket, NodeError> {
    let path = http_socket_path(&node.config().socket);
    let group = node.config().admin_group.as_ref().map(|group| group.gid);
    if rustix::net::SocketAddrUnix::new(&path).is_err() {
        tracing::warn!(
            path = %path.display(),
            "no Unix socket for HTTP: the path is too long; use a shorter path for socket"
        );
        return Ok((None, None));
    }
    let (listener, file) = SocketFile::listen(&path, node.config().socket_mode, group)?;
    let operation = "serve the Unix socket for HTTP";
    listener.set_nonblocking(true).map_err(|source| NodeError::Server { operation, source })?;
    tracing::info!(path = %path.display(), "serving HTTP on a Unix socket");
    Ok((Some(listener), Some(file)))
}

impl HttpHandle {
    /// The TCP address.
    pub fn address(&self) -> SocketAddr {
        self.access.address()
    }

    /// Reads the token and the certificates again. The token applies from the next request on;
    /// open connections keep their certificate.
    ///
    /// # Errors
    /// If the new ones are invalid. The old ones then stay in use.
    pub fn reload(&self, security: &SecurityConfig) -> Result<(), HttpError> {
        self.access.reload(security)
    }

    /// The access rules, for a reload by a signal or an admin command.
    pub(crate) fn access(&self) -> ReloadableAccess {
        self.access.clone()
    }

    /// Stops accepting connections, and waits up to `timeout` for requests in progress.
    pub fn stop(mut self, timeout: Duration) {
        self.stop_and_join(timeout);
    }

    fn stop_and_join(&mut self, timeout: Duration) {
        self.stop.send_replace(Some(timeout));
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of the HTTP server panicked");
        }
    }
}

impl Drop for HttpHandle {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.stop_and_join(Duration::ZERO);
        }
    }
}
