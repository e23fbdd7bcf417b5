//! Connections to the TCP port and to the Unix socket for HTTP: so many at a time, each with a
//! limit on all that it may wait for.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::{JoinSet, yield_now};
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt as _;

use crate::http::access::{Access, Caller};
use crate::http::places::{Ended, Place, Places};
use crate::http::{HttpConfig, Listeners, routes};
use crate::node::Node;

/// How long to wait when the kernel has no descriptor left for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Connections that are accepted before those that are there are looked after.
const ACCEPT_MAX: usize = 16;
/// How long an answer that is under way may take once its connection's time is over.
const LAST_ANSWER: Duration = Duration::from_secs(2);
/// The longest head of a request, and what is buffered of a body that nobody reads.
const BUFFER_BYTES: usize = 16 << 10;
/// One line about refused connections in so much time.
const REMARK_INTERVAL: Duration = Duration::from_secs(10);
/// Places for health checks alone, when all others are busy. The newest always gets one.
const HEALTH_PLACES: usize = 256;
/// How long a connection is idle before a newcomer may have its place.
const PATIENCE: Duration = Duration::from_millis(250);
/// How long a connection in one of them may last.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(2);

type Current<T> = Arc<RwLock<Arc<T>>>;
type Stop = watch::Receiver<Option<Duration>>;

pub(super) async fn run(
    listeners: Listeners,
    node: Node,
    access: Current<Access>,
    config: HttpConfig,
    mut stop: Stop,
) {
    let Listeners { tcp, unix, file } = listeners;
    let server = Arc::new(Server {
        app: routes::router(&node, &access),
        health: routes::health_router(&node),
        // Who floods the port does not keep users of the socket out.
        tcp_places: Places::new(config.connections_max, PATIENCE),
        unix_places: Places::new(config.connections_max, PATIENCE),
        health_places: Places::new(HEALTH_PLACES, Duration::ZERO),
        next: AtomicU64::new(0),
        node,
        access,
        config,
        stop: stop.clone(),
        remarks: Remarks::default(),
    });
    let tcp = async {
        match TcpListener::from_std(tcp) {
            Ok(listener) => server.accept_tcp(listener).await,
            Err(error) => tracing::error!(%error, "the TCP port cannot be served"),
        }
    };
    let unix = async {
        match unix.map(UnixListener::from_std).transpose() {
            Ok(Some(listener)) => server.accept_unix(listener).await,
            Ok(None) => {}
            Err(error) => tracing::error!(%error, "the Unix socket for HTTP cannot be served"),
        }
    };
    tokio::join!(tcp, unix);
    // Both ended because they were told to, or cannot be served at all.
    if stop.wait_for(Option::is_some).await.is_err() {
        tracing::debug!("the node is gone");
    }
    drop(file);
}

struct Server {
    app: Router,
    health: Router,
    tcp_places: Arc<Places>,
    unix_places: Arc<Places>,
    health_places: Arc<Places>,
    next: AtomicU64,
    node: Node,
    access: Current<Access>,
    config: HttpConfig,
    stop: Stop,
    remarks: Remarks,
}

/// What a connection was given.
struct Seat {
    app: Router,
    place: Arc<Place>,
    ended: Ended,
    is_health_alone: bool,
}

impl Server {
    async fn accept_tcp(self: &Arc<Self>, listener: TcpListener) {
        self.accept(
            async || listener.accept().await,
            |connections, (stream, peer)| {
                let seat = self.seat(&self.tcp_places, None);
                let server = Arc::clone(self);
                connections.spawn(async move { server.serve_tcp(stream, peer, seat).await });
            },
        )
        .await;
    }

    async fn accept_unix(self: &Arc<Self>, listener: UnixListener) {
        self.accept(
            async || listener.accept().await,
            |connections, (stream, _)| {
                let user = match stream.peer_cred() {
                    Ok(credentials) => credentials.uid(),
                    Err(error) => {
                        tracing::warn!(%error, "a connection is closed: it has no credentials");
                        return;
                    }
                };
                let own = rustix::process::geteuid().as_raw();
                let seat = self
                    .seat(&self.unix_places, Some(user).filter(|user| *user != 0 && *user != own));
                let server = Arc::clone(self);
                connections.spawn(async move { server.serve_unix(stream, user, seat).await });
            },
        )
        .await;
    }

    /// Takes connections until the node stops, then lets those end that are under way.
    async fn accept<T>(
        &self,
        mut next: impl AsyncFnMut() -> std::io::Result<T>,
        mut admit: impl FnMut(&mut JoinSet<()>, T),
    ) {
        let mut stopped = self.stop.clone();
        let mut connections = JoinSet::new();
        let mut in_a_row = 0;
        loop {
            tokio::select! {
                biased;
                _ = stopped.wait_for(Option::is_some) => break,
                accepted = next() => match accepted {
                    Ok(accepted) => {
                        admit(&mut connections, accepted);
                        in_a_row += 1;
                        if in_a_row == ACCEPT_MAX {
                            in_a_row = 0;
                            yield_now().await;
                        }
                    }
                    Err(error) => {
                        self.remarks.say(|times| {
                            tracing::warn!(%error, times, "a connection could not be accepted");
                        });
                        sleep(ACCEPT_PAUSE).await;
                    }
                },
                // Only so that what has ended is not kept.
                _ = connections.join_next(), if !connections.is_empty() => {}
            }
        }
        let patience = self.stop.borrow().unwrap_or_default();
        let drained = async { while connections.join_next().await.is_some() {} };
        if timeout(patience, drained).await.is_err() {
            tracing::debug!(left = connections.len(), "requests were cut off by the shutdown");
        }
    }

    /// A place among all, or one for health checks alone.
    fn seat(&self, places: &Arc<Places>, user: Option<u32>) -> Option<Seat> {
        let id = self.next.fetch_add(1, Relaxed);
        if let Some((place, ended)) = places.take(id, user) {
            let (app, place) = (self.app.clone(), Arc::new(place));
            return Some(Seat { app, place, ended, is_health_alone: false });
        }
        self.node.traffic().http.turned_away.fetch_add(1, Relaxed);
        self.remarks.say(|times| {
            tracing::warn!(times, "all connections are busy: another one gets health alone");
        });
        let (place, ended) = self.health_places.take(id, None)?;
        let (app, place) = (self.health.clone(), Arc::new(place));
        Some(Seat { app, place, ended, is_health_alone: true })
    }

    async fn serve_tcp(&self, stream: TcpStream, peer: SocketAddr, seat: Option<Seat>) {
        let Some(mut seat) = seat else { return };
        let _open = Open::count(&self.node);
        let tls = self.access.read().unwrap_or_else(PoisonError::into_inner).tls();
        let Some(tls) = tls else { return self.answer(stream, Caller::Tcp, seat).await };
        let handshake = timeout(self.head_timeout(&seat), TlsAcceptor::from(tls).accept(stream));
        let handshake = tokio::select! {
            handshake = handshake => handshake,
            _ = &mut seat.ended => return,
        };
        let failed = match handshake {
            Ok(Ok(stream)) => return self.answer(stream, Caller::Tcp, seat).await,
            Ok(Err(error)) => error.to_string(),
            Err(_) => "it took too long".to_owned(),
        };
        self.node.traffic().http.handshake_failures.fetch_add(1, Relaxed);
        self.remarks.say(|times| {
            tracing::warn!(%peer, times, reason = %failed, "a TLS handshake failed");
        });
    }

    async fn serve_unix(&self, stream: UnixStream, user: u32, seat: Option<Seat>) {
        let Some(seat) = seat else { return };
        let _open = Open::count(&self.node);
        self.answer(stream, Caller::Unix { user }, seat).await;
    }

    fn head_timeout(&self, seat: &Seat) -> Duration {
        let most = self.config.head_timeout;
        if seat.is_health_alone { most.min(HEALTH_TIMEOUT) } else { most }
    }

    async fn answer<S>(&self, stream: S, caller: Caller, seat: Seat)
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let head_timeout = self.head_timeout(&seat);
        let Seat { app, place, mut ended, is_health_alone } = seat;
        let service = service_fn(|mut request: hyper::Request<hyper::body::Incoming>| {
            request.extensions_mut().insert(caller);
            let (app, place) = (app.clone(), Arc::clone(&place));
            async move {
                // Health checks are quick; the next one may always have their place.
                if !is_health_alone {
                    place.note_busy();
                }
                let response = app.oneshot(request).await;
                place.note_idle();
                response
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .keep_alive(!is_health_alone)
            .header_read_timeout(head_timeout)
            .max_buf_size(BUFFER_BYTES)
            .max_headers(64)
            .serve_connection(TokioIo::new(stream), service);
        let mut connection = std::pin::pin!(connection);
        let mut stop = self.stop.clone();
        let most = self.config.connection_timeout;
        let most = if is_health_alone { most.min(HEALTH_TIMEOUT) } else { most };
        let over = tokio::select! {
            over = &mut connection => Some(over),
            // A newcomer has its place.
            _ = &mut ended => return,
            _ = stop.wait_for(Option::is_some) => None,
            () = sleep(most) => None,
        };
        let over = if let Some(over) = over {
            over
        } else {
            connection.as_mut().graceful_shutdown();
            // A reader that does not take its answer is let go.
            timeout(LAST_ANSWER, connection).await.unwrap_or(Ok(()))
        };
        if let Err(error) = over {
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
