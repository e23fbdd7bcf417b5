//! Connections to the TCP port: so many at a time, each with a limit on all that it may wait for.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsAcceptor;

use crate::http::access::Access;
use crate::http::{HttpConfig, routes};
use crate::node::Node;

/// How long to wait when the kernel has no descriptor left for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long an answer that is under way may take once its connection's time is over.
const LAST_ANSWER: Duration = Duration::from_secs(2);
/// The longest head of a request, and what is buffered of a body that nobody reads.
const BUFFER_BYTES: usize = 16 << 10;
/// One line about refused connections in so much time.
const REMARK_INTERVAL: Duration = Duration::from_secs(10);

type Current<T> = Arc<RwLock<Arc<T>>>;
type Stop = watch::Receiver<Option<Duration>>;

pub(super) async fn run(
    listener: std::net::TcpListener,
    node: Node,
    access: Current<Access>,
    config: HttpConfig,
    stop: Stop,
) {
    let mut stopped = stop.clone();
    let listener = match TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => return tracing::error!(%error, "the TCP port cannot be served"),
    };
    let server = Arc::new(Server {
        app: routes::router(&node, &access),
        slots: Arc::new(Semaphore::new(config.connections_max)),
        node,
        access,
        config,
        remarks: Remarks::default(),
    });
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            _ = stopped.wait_for(Option::is_some) => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) => server.admit(&mut connections, stream, peer, &stop),
                Err(error) => {
                    server.remarks.say(|times| {
                        tracing::warn!(%error, times, "a connection could not be taken");
                    });
                    sleep(ACCEPT_PAUSE).await;
                }
            },
            // Only so that what has ended is not kept.
            _ = connections.join_next(), if !connections.is_empty() => {}
        }
    }
    drop(listener);
    let patience = stop.borrow().unwrap_or_default();
    let drained = async { while connections.join_next().await.is_some() {} };
    if timeout(patience, drained).await.is_err() {
        tracing::debug!(left = connections.len(), "requests were cut off by the shutdown");
    }
}

struct Server {
    app: Router,
    slots: Arc<Semaphore>,
    node: Node,
    access: Current<Access>,
    config: HttpConfig,
    remarks: Remarks,
}

impl Server {
    /// Takes a connection, or closes it when there are too many.
    fn admit(
        self: &Arc<Self>,
        connections: &mut JoinSet<()>,
        stream: TcpStream,
        peer: SocketAddr,
        stop: &Stop,
    ) {
        let Ok(slot) = Arc::clone(&self.slots).try_acquire_owned() else {
            self.node.traffic().http.turned_away.fetch_add(1, Relaxed);
            self.remarks.say(|times| {
                tracing::warn!(%peer, times, "a connection was one too many");
            });
            return;
        };
        let (server, stop) = (Arc::clone(self), stop.clone());
        connections.spawn(async move {
            let open = Open::count(&server.node);
            server.serve(stream, peer, stop).await;
            drop((open, slot));
        });
    }

    async fn serve(&self, stream: TcpStream, peer: SocketAddr, stop: Stop) {
        let tls = self.access.read().unwrap_or_else(PoisonError::into_inner).tls();
        let Some(tls) = tls else { return self.answer(stream, stop).await };
        let handshake = TlsAcceptor::from(tls).accept(stream);
        let failed = match timeout(self.config.head_timeout, handshake).await {
            Ok(Ok(stream)) => return self.answer(stream, stop).await,
            Ok(Err(error)) => error.to_string(),
            Err(_) => "it took too long".to_owned(),
        };
        self.node.traffic().http.handshake_failures.fetch_add(1, Relaxed);
        self.remarks.say(|times| {
            tracing::warn!(%peer, times, reason = %failed, "a TLS handshake failed");
        });
    }

    async fn answer<S>(&self, stream: S, mut stop: Stop)
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.config.head_timeout)
            .max_buf_size(BUFFER_BYTES)
            .max_headers(64)
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(self.app.clone()));
        let mut connection = std::pin::pin!(connection);
        let ended = tokio::select! {
            ended = &mut connection => Some(ended),
            _ = stop.wait_for(Option::is_some) => None,
            () = sleep(self.config.connection_timeout) => None,
        };
        let ended = if let Some(ended) = ended {
            ended
        } else {
            connection.as_mut().graceful_shutdown();
            // A reader that does not take its answer is let go.
            timeout(LAST_ANSWER, connection).await.unwrap_or(Ok(()))
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a connection broke");
        }
    }
}

/// One connection in the count, until it ends, however it ends.
struct Open(Node);

impl Open {
    fn count(node: &Node) -> Self {
        node.traffic().http.connections.fetch_add(1, Relaxed);
        Self(node.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.traffic().http.connections.fetch_sub(1, Relaxed);
    }
}

/// Keeps a flood of refusals from becoming a flood of lines.
#[derive(Default)]
struct Remarks {
    unsaid: AtomicU64,
    last: std::sync::Mutex<Option<Instant>>,
}

impl Remarks {
    /// Says a line with how many it stands for, or keeps count for the next.
    fn say(&self, line: impl FnOnce(u64)) {
        let times = self.unsaid.fetch_add(1, Relaxed) + 1;
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_none_or(|last| last.elapsed() >= REMARK_INTERVAL) {
            *last = Some(Instant::now());
            self.unsaid.store(0, Relaxed);
            drop(last);
            line(times);
        }
    }
}
