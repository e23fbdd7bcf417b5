//! The TCP port: metrics, health, status and the page, on a thread of its own.

mod access;
mod connections;
mod page;
mod plot;
mod routes;
mod security;

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::Duration;

use cascade_store::SecretError;
use thiserror::Error;
use tokio::sync::watch;

use crate::config::{ConfigError, SecurityConfig};
use crate::node::{Node, NodeError};

use access::Access;
use security::Secrets;

/// How the TCP port is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpConfig {
    /// Where it listens; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Who may use it.
    pub security: SecurityConfig,
    /// Connections at a time; one more is closed at once. Default: 256.
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

/// Serves a node's TCP port.
///
/// # Errors
/// If the address cannot be had or the security settings make no sense.
pub fn serve(node: &Node, config: HttpConfig) -> Result<HttpHandle, NodeError> {
    config.security.check(Some(config.listen)).map_err(HttpError::Settings)?;
    let secrets = Secrets::read(&config.security)?;
    let bind = |source| HttpError::Bind { address: config.listen, source };
    let listener = TcpListener::bind(config.listen).map_err(bind)?;
    listener.set_nonblocking(true).map_err(bind)?;
    let address = listener.local_addr().map_err(bind)?;
    node.note_address(address);
    let access = Arc::new(RwLock::new(Arc::new(Access::new(address, secrets))));
    let (stop, stopped) = watch::channel(None);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
        .map_err(HttpError::Thread)?;
    if security::is_token_in_the_clear(&config.security, address) {
        tracing::warn!(%address, "the token travels unencrypted; add tls_certificate");
    }
    let served = (node.clone(), Arc::clone(&access));
    let thread = std::thread::Builder::new()
        .name("cascade-http".to_owned())
        .spawn(move || {
            let (node, access) = served;
            runtime.block_on(connections::run(listener, node, access, config, stopped));
        })
        .map_err(HttpError::Thread)?;
    tracing::info!(%address, "the TCP port is served");
    Ok(HttpHandle { address, access, stop, thread: Some(thread) })
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
