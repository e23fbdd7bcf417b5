//! HTTP: metrics, health, status and the page, on a TCP port and a Unix socket beside the node's.

mod access;
mod answers;
mod connections;
mod page;
mod places;
mod plot;
mod routes;
mod runbooks;
mod security;

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::Duration;

use cascade_store::SecretError;
use thiserror::Error;
use tokio::sync::watch;

use crate::config::{ConfigError, SecurityConfig};
use crate::node::{Node, NodeError};
use crate::socket::SocketFile;

use access::Access;
use security::Secrets;

/// Connections that the kernel keeps until they are accepted.
const BACKLOG: i32 = 4096;
/// How long an answer under way may keep the end of the thread.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// The Unix socket for HTTP of a node that listens at a path.
pub fn socket_of(node_socket: &Path) -> PathBuf {
    let mut path = node_socket.as_os_str().to_owned();
    path.push(".http");
    path.into()
}

/// Where requests come in.
#[derive(Debug)]
struct Listeners {
    tcp: TcpListener,
    unix: Option<std::os::unix::net::UnixListener>,
    file: Option<SocketFile>,
}

/// How the TCP port is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpConfig {
    /// Where it listens; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Who may use it.
    pub security: SecurityConfig,
    /// Connections at a time, on the port and on the Unix socket each; one more takes the place of
    /// the one that has been idle longest, or gets health alone. Default: 256.
    pub connections_max: usize,
    /// How long a request's head, a TLS handshake or the wait for a next request may take.
    /// Default: 10 s.
    pub head_timeout: Duration,
    /// How long a connection may last in all, so that no slow reader holds one. Default: 60 s.
    pub connection_timeout: Duration,
}

impl HttpConfig {
    /// The defaults, for an address.
    pub fn new(listen: SocketAddr, security: SecurityConfig) -> Self {
        Self {
            listen,
            security,
            connections_max: 256,
            head_timeout: Duration::from_secs(10),
            connection_timeout: Duration::from_secs(60),
        }
    }
}

/// Why the TCP port cannot be served, by what the operator can change.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HttpError {
    /// The address cannot be had.
    #[error("cannot listen on {address}; is another program there, or is it not this host's?")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// The security settings contradict each other, or leave the port open to strangers.
    #[error(transparent)]
    Settings(#[from] ConfigError),
    /// A file with a secret cannot be read, or others can.
    #[error("security.{setting}: {source}")]
    Secret {
        /// The setting.
        setting: &'static str,
        /// What is wrong, and what would be right.
        source: SecretError,
    },
    /// A file that a setting names is of no use.
    #[error("security.{setting}: {path:?} {reason}")]
    File {
        /// The setting.
        setting: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong, and what would be right.
        reason: &'static str,
        /// The cause, when there is one.
        #[source]
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
    /// A thread could not be started.
    #[error("cannot start the thread of the TCP port")]
    Thread(#[source] std::io::Error),
}

/// A TCP port that is served, until this goes.
#[derive(Debug)]
pub struct HttpHandle {
    address: SocketAddr,
    access: Arc<RwLock<Arc<Access>>>,
    stop: watch::Sender<Option<Duration>>,
    thread: Option<JoinHandle<()>>,
}

/// Serves a node's TCP port, and a Unix socket beside the node's.
///
/// # Errors
/// If the address cannot be had, another node has the Unix socket, or the security settings make
/// no sense.
pub fn serve(node: &Node, config: HttpConfig) -> Result<HttpHandle, NodeError> {
    config.security.check(Some(config.listen)).map_err(HttpError::Settings)?;
    let secrets = Secrets::read(&config.security)?;
    let bind = |source| HttpError::Bind { address: config.listen, source };
    let listener = TcpListener::bind(config.listen).map_err(bind)?;
    listener.set_nonblocking(true).map_err(bind)?;
    // Again, because the standard library's queue of 128 makes whoever comes after a flood wait
    // for the second try of its kernel, which is a second later.
    rustix::net::listen(&listener, BACKLOG).map_err(|error| bind(error.into()))?;
    let address = listener.local_addr().map_err(bind)?;
    node.note_address(address);
    let access = Arc::new(RwLock::new(Arc::new(Access::new(address, secrets))));
    let (stop, stopped) = watch::channel(None);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        // One for figures, one for readiness of each router.
        .max_blocking_threads(3)
        .build()
        .map_err(HttpError::Thread)?;
    if security::is_token_in_the_clear(&config.security, address) {
        tracing::warn!(%address, "the token travels unencrypted; add tls_certificate");
    }
    let (unix, file) = listen_beside(node)?;
    let listeners = Listeners { tcp: listener, unix, file };
    let served = (node.clone(), Arc::clone(&access));
    let thread = std::thread::Builder::new()
        .name("cascade-http".to_owned())
        .spawn(move || {
            let (node, access) = served;
            runtime.block_on(connections::run(listeners, node, access, config, stopped));
            runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
        })
        .map_err(HttpError::Thread)?;
    tracing::info!(%address, "the TCP port is served");
    Ok(HttpHandle { address, access, stop, thread: Some(thread) })
}

type BesideNode = (Option<std::os::unix::net::UnixListener>, Option<SocketFile>);

/// The Unix socket for HTTP, with the permissions of the node's own. A path that is too long for
/// one leaves it out: everything that it tells, `cascade status` tells too.
fn listen_beside(node: &Node) -> Result<BesideNode, NodeError> {
    let path = socket_of(&node.config().socket);
    let group = node.config().admin_group.as_ref().map(|group| group.number);
    if rustix::net::SocketAddrUnix::new(&path).is_err() {
        tracing::warn!(path = %path.display(), "no Unix socket for HTTP: its path is too long");
        return Ok((None, None));
    }
    let (listener, file) = SocketFile::listen(&path, node.config().socket_mode, group)?;
    let operation = "serve the Unix socket for HTTP";
    listener.set_nonblocking(true).map_err(|source| NodeError::Server { operation, source })?;
    tracing::info!(path = %path.display(), "HTTP is served on a Unix socket, by user");
    Ok((Some(listener), Some(file)))
}

impl HttpHandle {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Reads the token and the certificates again. Connections that are open keep theirs.
    ///
    /// # Errors
    /// If the new ones make no sense; then the old ones stay.
    pub fn reload(&self, security: &SecurityConfig) -> Result<(), HttpError> {
        security.check(Some(self.address))?;
        let access = Arc::new(Access::new(self.address, Secrets::read(security)?));
        *self.access.write().unwrap_or_else(PoisonError::into_inner) = access;
        tracing::info!(address = %self.address, "token and certificates were read again");
        Ok(())
    }

    /// Takes no more connections, lets requests that are under way end, and returns by then.
    pub fn stop(mut self, timeout: Duration) {
        self.end(timeout);
    }

    fn end(&mut self, timeout: Duration) {
        self.stop.send_replace(Some(timeout));
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of the TCP port panicked");
        }
    }
}

impl Drop for HttpHandle {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.end(Duration::ZERO);
        }
    }
}
