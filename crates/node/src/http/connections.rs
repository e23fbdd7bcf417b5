//! HTTP connections on the TCP port and on the Unix socket, with a connection limit and a time-out
//! for each step.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::process::{Resource, getrlimit};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::{JoinSet, yield_now};
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt as _;

use crate::http::access::Caller;
use crate::http::slots::{ConnectionSlot, ConnectionSlots, SlotTaken};
use crate::http::{CONNECTIONS_MAX, HttpConfig, Listeners, ReloadableAccess, routes};
use crate::node::Node;

/// Pause after a failed accept, such as when the process has no descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Connections accepted in a row before the open ones are served.
const ACCEPT_MAX: usize = 16;
/// How long a response in progress may take after the time-out of its connection.
const LAST_RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Size limit of a request head. Also the buffer for a body, which is not read.
const BUFFER_BYTES: usize = 16 << 10;
/// Minimum time between two log lines about refused connections.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Minimum number of reserve slots. With fewer than [`ACCEPT_MAX`], a flood would replace a health
/// check before it is served.
const HEALTH_CONNECTIONS_MIN: usize = 2 * ACCEPT_MAX;
/// The port, the Unix socket and the reserve slots each take at most one in so many descriptors of
/// the process, so that the clients and files of the node have the others.
const DESCRIPTOR_SHARE: u64 = 16;
/// How long a connection must be idle before a new one may take its slot.
const IDLE_MIN: Duration = Duration::from_millis(250);
/// Time limit of a connection in a reserve slot.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(2);

/// `Some` with the time limit once the server stops.
type Stop = watch::Receiver<Option<Duration>>;

pub(super) async fn run(
    listeners: Listeners,
    node: Node,
    access: ReloadableAccess,
    config: HttpConfig,
    mut stop: Stop,
) {
    let Listeners { tcp, unix, file } = listeners;
    let share = descriptor_share();
    let connections_max = config.connections_max.min(share);
    let health_connections_max = CONNECTIONS_MAX.min(share).max(HEALTH_CONNECTIONS_MIN);
    let server = Arc::new(Server {
        app: routes::router(&node, &access),
        health: routes::health_router(&node),
        // Separate limits: a flood on the port must not lock out users of the Unix socket.
        tcp_slots: ConnectionSlots::new(connections_max, IDLE_MIN),
        unix_slots: ConnectionSlots::new(connections_max, IDLE_MIN),
        health_slots: ConnectionSlots::new(health_connections_max, Duration::ZERO),
        next_id: AtomicU64::new(0),
        node,
        access,
        config,
        stop: stop.clone(),
        logs: EventLogs::default(),
    });
    let tcp = async {
        match TcpListener::from_std(tcp) {
            Ok(listener) => server.accept_tcp(listener).await,
            Err(error) => tracing::error!(%error, "cannot serve HTTP on the TCP port"),
        }
    };
    let unix = async {
        match unix.map(UnixListener::from_std).transpose() {
            Ok(Some(listener)) => server.accept_unix(listener).await,
            Ok(None) => {}
            Err(error) => tracing::error!(%error, "cannot serve HTTP on the Unix socket"),
        }
    };
    tokio::join!(tcp, unix);
    // If both listeners failed, this still waits for the stop, so that the socket file stays.
    if stop.wait_for(Option::is_some).await.is_err() {
        tracing::debug!("the HTTP server was dropped");
    }
    drop(file);
}

fn descriptor_share() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit / DESCRIPTOR_SHARE).unwrap_or(usize::MAX)
}

struct Server {
    app: Router,
    health: Router,
    tcp_slots: Arc<ConnectionSlots>,
    unix_slots: Arc<ConnectionSlots>,
    health_slots: Arc<ConnectionSlots>,
    next_id: AtomicU64,
    node: Node,
    access: ReloadableAccess,
    config: HttpConfig,
    stop: Stop,
    logs: EventLogs,
}

/// The log of each kind of event, with its own count and its own time.
#[derive(Default)]
struct EventLogs {
    accept_failures: ThrottledLog,
    limit_reached: ThrottledLog,
    handshake_failures: ThrottledLog,
}

/// A connection's slot and the routes that it may use.
struct Admission {
    app: Router,
    slot: Arc<ConnectionSlot>,
    taken: SlotTaken,
    is_health_only: bool,
}

impl Server {
    async fn accept_tcp(self: &Arc<Self>, listener: TcpListener) {
        accept(
            self.stop.clone(),
            &self.logs.accept_failures,
            async || listener.accept().await,
            |connections, (stream, peer)| {
                let admission = self.admit(&self.tcp_slots, None);
                let server = Arc::clone(self);
                connections.spawn(async move { server.serve_tcp(stream, peer, admission).await });
            },
        )
        .await;
    }

    async fn accept_unix(self: &Arc<Self>, listener: UnixListener) {
        accept(
            self.stop.clone(),
            &self.logs.accept_failures,
            async || listener.accept().await,
            |connections, (stream, _)| {
                let (user, group) = match stream.peer_cred() {
                    Ok(credentials) => (credentials.uid(), credentials.gid()),
                    Err(error) => {
                        tracing::warn!(%error, "connection closed: cannot read its credentials");
                        return;
                    }
                };
                let own_user = rustix::process::geteuid().as_raw();
                let limited_user = Some(user).filter(|user| *user != 0 && *user != own_user);
                let admission = self.admit(&self.unix_slots, limited_user);
                let caller = Caller::Unix { user, group };
                let server = Arc::clone(self);
                connections
                    .spawn(async move { server.serve_unix(stream, caller, admission).await });
            },
        )
        .await;
    }

    /// Takes a slot for a connection, or else a reserve slot for health checks.
    fn admit(&self, slots: &Arc<ConnectionSlots>, user: Option<u32>) -> Option<Admission> {
        // Relaxed: the ids only have to differ.
        let id = self.next_id.fetch_add(1, Relaxed);
        if let Some((slot, taken)) = slots.take(id, user) {
            let (app, slot) = (self.app.clone(), Arc::new(slot));
            return Some(Admission { app, slot, taken, is_health_only: false });
        }
        self.node.traffic().http.turned_away.fetch_add(1, Relaxed);
        self.logs.limit_reached.log(|count| {
            tracing::warn!(
                count,
                "HTTP connection limit reached: new connections are limited to health checks"
            );
        });
        let (slot, taken) = self.health_slots.take(id, None)?;
        let (app, slot) = (self.health.clone(), Arc::new(slot));
        Some(Admission { app, slot, taken, is_health_only: true })
    }

    async fn serve_tcp(&self, stream: TcpStream, peer: SocketAddr, admission: Option<Admission>) {
        let Some(mut admission) = admission else { return };
        let _counted = CountedConnection::new(&self.node);
        let Some(tls) = self.access.current().tls() else {
            let caller = Caller::Tcp { has_certificate: false };
            return self.serve(stream, caller, admission).await;
        };
        let handshake =
            timeout(self.head_timeout(&admission), TlsAcceptor::from(tls).accept(stream));
        let mut stop = self.stop.clone();
        let handshake = tokio::select! {
            handshake = handshake => handshake,
            // There is no response in progress.
            _ = stop.wait_for(Option::is_some) => return,
            // During the handshake the connection counts as idle since it was accepted, so a new
            // one can take its slot.
            _ = &mut admission.taken => return,
        };
        let reason = match handshake {
            Ok(Ok(stream)) => {
                // The server requests a certificate only to verify it.
                let has_certificate = stream.get_ref().1.peer_certificates().is_some();
                let caller = Caller::Tcp { has_certificate };
                return self.serve(stream, caller, admission).await;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => "time-out".to_owned(),
        };
        self.node.traffic().http.handshake_failures.fetch_add(1, Relaxed);
        self.logs.handshake_failures.log(|count| {
            tracing::warn!(%peer, count, %reason, "TLS handshake failed");
        });
    }

    async fn serve_unix(&self, stream: UnixStream, caller: Caller, admission: Option<Admission>) {
        let Some(admission) = admission else { return };
        let _counted = CountedConnection::new(&self.node);
        self.serve(stream, caller, admission).await;
    }

    fn head_timeout(&self, admission: &Admission) -> Duration {
        let limit = self.config.head_timeout;
        if admission.is_health_only { limit.min(HEALTH_TIMEOUT) } else { limit }
    }

    /// Serves requests until the connection ends, its slot is taken, its time is over or the
    /// server stops. In the last two cases a response in progress is completed.
    async fn serve<S>(&self, stream: S, caller: Caller, admission: Admission)
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let head_timeout = self.head_timeout(&admission);
        let Admission { app, slot, mut taken, is_health_only } = admission;
        let service = service_fn(|mut request: hyper::Request<hyper::body::Incoming>| {
            request.extensions_mut().insert(caller);
            let (app, slot) = (app.clone(), Arc::clone(&slot));
            async move {
                // A reserve slot stays marked as idle, so that a new health check can always
                // take it.
                if !is_health_only {
                    slot.set_busy();
                }
                let response = app.oneshot(request).await;
                // The response is not sent yet; `idle_min` protects the slot for a moment longer.
                slot.set_idle();
                response
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .keep_alive(!is_health_only)
            .header_read_timeout(head_timeout)
            .max_buf_size(BUFFER_BYTES)
            .max_headers(64)
            .serve_connection(TokioIo::new(stream), service);
        let mut connection = std::pin::pin!(connection);
        let mut stop = self.stop.clone();
        let limit = self.config.connection_timeout;
        let limit = if is_health_only { limit.min(HEALTH_TIMEOUT) } else { limit };
        let result = tokio::select! {
            result = &mut connection => Some(result),
            // A new connection has taken the slot.
            _ = &mut taken => return,
            _ = stop.wait_for(Option::is_some) => None,
            () = sleep(limit) => None,
        };
        let result = if let Some(result) = result {
            result
        } else {
            // Ends the connection after the response in progress, or at once if there is none.
            connection.as_mut().graceful_shutdown();
            // A client that does not read its response is disconnected.
            timeout(LAST_RESPONSE_TIMEOUT, connection).await.unwrap_or(Ok(()))
        };
        if let Err(error) = result {
            tracing::debug!(%error, "connection failed");
        }
    }
}

/// Accepts connections until the server stops, then waits for open ones up to the time limit.
async fn accept<T>(
    mut stop: Stop,
    log: &ThrottledLog,
    mut next: impl AsyncFnMut() -> std::io::Result<T>,
    mut start: impl FnMut(&mut JoinSet<()>, T),
) {
    let mut connections = JoinSet::new();
    let mut in_a_row = 0;
    loop {
        tokio::select! {
            biased;
            // First in the biased order: a flood of connections does not delay the stop.
            _ = stop.wait_for(Option::is_some) => break,
            accepted = next() => match accepted {
                Ok(accepted) => {
                    start(&mut connections, accepted);
                    in_a_row += 1;
                    // The runtime has one thread: without this yield, a flood would delay the open
                    // connections. The branch below does not run during a flood, so tasks are
                    // removed here too.
                    if in_a_row == ACCEPT_MAX {
                        in_a_row = 0;
                        yield_now().await;
                        while connections.try_join_next().is_some() {}
                    }
                }
                Err(error) => {
                    log.log(|count| {
                        tracing::warn!(%error, count, "cannot accept a connection");
                    });
                    sleep(ACCEPT_PAUSE).await;
                }
            },
            // Removes tasks of connections that have ended.
            _ = connections.join_next(), if !connections.is_empty() => {}
        }
    }
    // No limit is set if the handle was lost: then nothing is waited for.
    let time_limit = stop.borrow().unwrap_or_default();
    let drained = async { while connections.join_next().await.is_some() {} };
    if timeout(time_limit, drained).await.is_err() {
        tracing::debug!(count = connections.len(), "connections closed by the shutdown");
    }
}

/// Counts a connection as open until it is dropped.
struct CountedConnection(Node);

impl CountedConnection {
    fn new(node: &Node) -> Self {
        node.traffic().http.connections.fetch_add(1, Relaxed);
        Self(node.clone())
    }
}

impl Drop for CountedConnection {
    fn drop(&mut self) {
        self.0.traffic().http.connections.fetch_sub(1, Relaxed);
    }
}

/// Limits the rate of log lines, so that a flood of refusals does not flood the log.
#[derive(Default)]
struct ThrottledLog {
    pending: AtomicU64,
    last: std::sync::Mutex<Option<Instant>>,
}

impl ThrottledLog {
    /// Writes a line with the number of events since the last one, at most once in
    /// [`LOG_INTERVAL`].
    fn log(&self, write: impl FnOnce(u64)) {
        let count = self.pending.fetch_add(1, Relaxed) + 1;
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_none_or(|last| last.elapsed() >= LOG_INTERVAL) {
            *last = Some(Instant::now());
            self.pending.store(0, Relaxed);
            drop(last);
            write(count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// While connections kept arriving, the tasks of closed ones were kept.
    #[test]
    fn a_flood_of_connections_does_not_keep_the_tasks_of_closed_ones() {
        let (stop, stopped) = watch::channel(None);
        let (mut accepted, mut tasks_max) = (0, 0);
        let start = |connections: &mut JoinSet<()>, ()| {
            connections.spawn(async {});
            tasks_max = tasks_max.max(connections.len());
            accepted += 1;
            if accepted == 1000 * ACCEPT_MAX {
                stop.send_replace(Some(Duration::from_secs(60)));
            }
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let log = ThrottledLog::default();
        // The next connection is always there, as in a flood.
        let flood = accept(stopped, &log, async || Ok(()), start);
        runtime.unwrap().block_on(flood);
        assert!(tasks_max <= 2 * ACCEPT_MAX, "{tasks_max} tasks of {accepted} connections");
    }
}
