//! Accepts connections, each with a thread of its own.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use cascade_runtime::thread::{Builder, JoinHandle};
use cascade_runtime::{Mutex, sleep};

use super::handshake;
use super::kernel::{KernelSocket, end, set_within_host};
use super::server::Served;
use super::socket::Socket;
use super::socket_file::{SocketFile, bind};
use super::tls::TlsStream;
use crate::TransportError;
use crate::places::HostAddress;
use crate::state::EndpointState;

/// Connections that may be in their handshake at a time. Those that never end it cannot use up the
/// descriptors and threads of the process.
const HANDSHAKES_MAX: usize = 64;
/// Pause after an error of `accept`, such as too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Accepts one connection. The outer error is one of the listener, the inner one of the connection.
pub(super) type Accept = dyn Fn() -> io::Result<io::Result<Socket>> + Send;
/// Makes a thread that accepts return.
pub(super) type End = dyn Fn() + Send + Sync;

/// A connection and its thread.
#[derive(Debug)]
struct Serving {
    /// The thread's: it is closed when the thread ends.
    socket: Weak<Socket>,
    /// Whether the peer has made its handshake.
    is_admitted: Arc<AtomicBool>,
    /// Its handshake was ended to make room for another one.
    is_cut: bool,
    /// Where it comes from.
    origin: Origin,
    thread: JoinHandle<()>,
}

impl Serving {
    fn is_admitted(&self) -> bool {
        self.is_admitted.load(Ordering::Acquire)
    }

    /// Ends the connection.
    fn shutdown(&self) {
        if let Some(socket) = self.socket.upgrade() {
            socket.shutdown();
        }
    }
}

/// The host that a connection comes from; none for a Unix socket.
type Origin = Option<HostAddress>;

/// The oldest handshake among those of the origin that has most of them.
fn first_of_most(serving: &mut [Serving]) -> Option<&mut Serving> {
    let is_waiting = |it: &Serving| !it.is_admitted() && !it.is_cut;
    let mut counts = BTreeMap::<Origin, usize>::new();
    for it in serving.iter().filter(|it| is_waiting(it)) {
        *counts.entry(it.origin).or_default() += 1;
    }
    let (most, _) = counts.into_iter().max_by_key(|(_, count)| *count)?;
    serving.iter_mut().find(|it| is_waiting(it) && it.origin == most)
}

#[derive(Debug)]
struct Shared {
    state: Arc<EndpointState>,
    is_closing: AtomicBool,
    serving: Mutex<Vec<Serving>>,
}

/// The thread that accepts connections.
pub(crate) struct Accepting {
    shared: Arc<Shared>,
    end: Box<End>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Listens on a TCP address. Returns the address with its port.
pub(crate) fn listen_tcp(
    state: &Arc<EndpointState>,
    address: SocketAddr,
) -> Result<(Accepting, SocketAddr), TransportError> {
    let refused = |error: io::Error| listen_error(&address.to_string(), &error);
    let listener = TcpListener::bind(address).map_err(refused)?;
    let address = listener.local_addr().map_err(refused)?;
    if address.ip().is_loopback() {
        // Its connections have what it has.
        set_within_host(&listener);
    }
    let listening = listener.try_clone().map_err(refused)?.into();
    let (tls, port) = (state.tls.clone(), address.port());
    let accept = move || {
        let (stream, peer) = listener.accept()?;
        Ok(KernelSocket::of_tcp(stream, peer.ip()).map(|socket| match &tls {
            Some(tls) => {
                Socket::over_tcp(TlsStream::of_server(socket, Arc::clone(tls)), peer, port)
            }
            None => Socket::over_tcp(socket, peer, port),
        }))
    };
    let end = end_of(listening);
    let accepting = Accepting::start(Arc::clone(state), end, Box::new(accept));
    Ok((accepting.map_err(refused)?, address))
}

/// Listens on a Unix socket that only this user can connect to. Returns its file.
pub(crate) fn listen_unix(
    state: &Arc<EndpointState>,
    path: &Path,
) -> Result<(Accepting, SocketFile), TransportError> {
    let name = path.display().to_string();
    let refused = |error: io::Error| listen_error(&name, &error);
    let listener = bind(path).map_err(refused)?;
    let file = SocketFile::at(path).map_err(refused)?;
    let listening = listener.try_clone().map_err(refused)?.into();
    let peer = name.clone();
    let accept = move || {
        let (stream, _) = listener.accept()?;
        Ok(KernelSocket::of_unix(stream.into()).map(|socket| Socket::over(socket, &peer)))
    };
    let accepting = Accepting::start(Arc::clone(state), end_of(listening), Box::new(accept));
    Ok((accepting.map_err(refused)?, file))
}

fn end_of(listening: OwnedFd) -> Box<End> {
    Box::new(move || end(&listening))
}

/// No listener could be made at this address.
pub(super) fn listen_error(address: &str, error: &io::Error) -> TransportError {
    TransportError::Listen { address: address.to_owned(), reason: error.to_string() }
}

impl fmt::Debug for Accepting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Accepting").field("shared", &self.shared).finish_non_exhaustive()
    }
}

impl Accepting {
    /// Starts the thread that accepts. `end` makes `accept` return.
    pub(super) fn start(
        state: Arc<EndpointState>,
        end: Box<End>,
        accept: Box<Accept>,
    ) -> io::Result<Self> {
        let serving = Mutex::new(vec![]);
        let shared = Arc::new(Shared { state, is_closing: AtomicBool::new(false), serving });
        let of_thread = Arc::clone(&shared);
        let builder = Builder::new().name("transport-accept".to_owned());
        let thread = builder.spawn(move || of_thread.accept_all(&accept))?;
        Ok(Self { shared, end, thread: Mutex::new(Some(thread)) })
    }

    /// Peers that are connected now.
    pub(crate) fn peer_count(&self) -> usize {
        let serving = self.shared.serving.lock().unwrap_or_else(PoisonError::into_inner);
        serving.iter().filter(|it| it.is_admitted() && !it.thread.is_finished()).count()
    }

    /// Ends all connections and waits for their threads.
    pub(crate) fn stop(&self) {
        self.shared.is_closing.store(true, Ordering::Release);
        (self.end)();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            join(thread);
        }
        let serving = {
            let mut serving = self.shared.serving.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *serving)
        };
        for one in &serving {
            one.shutdown();
        }
        for one in serving {
            join(one.thread);
        }
    }
}

fn join(thread: JoinHandle<()>) {
    // A panic was printed by the thread; its connection has ended like any other.
    drop(thread.join());
}

impl Shared {
    fn accept_all(self: &Arc<Self>, accept: &Accept) {
        while !self.is_closing.load(Ordering::Acquire) {
            match accept() {
                Ok(Ok(socket)) => self.start_serving(socket),
                // The connection is closed, which its peer sees. The listener works: no pause.
                Ok(Err(_)) => {}
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
                    ) => {}
                Err(_) if self.is_closing.load(Ordering::Acquire) => {}
                Err(_) => sleep(ACCEPT_PAUSE),
            }
        }
    }

    /// Serves a connection in a thread, which refuses peers beyond their limit. Without a thread,
    /// it is closed. Beyond the limit of handshakes, the oldest one of the host that has most of
    /// them is ended, so that connections that send nothing do not keep peers out.
    fn start_serving(self: &Arc<Self>, socket: Socket) {
        let mut serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner);
        serving.retain(|it| !it.thread.is_finished());
        let strangers = serving.iter().filter(|it| !it.is_admitted()).count();
        // Threads of handshakes that were ended end soon.
        if strangers >= 2 * HANDSHAKES_MAX {
            return;
        }
        if strangers >= HANDSHAKES_MAX
            && let Some(first) = first_of_most(&mut serving)
        {
            first.is_cut = true;
            first.shutdown();
        }
        let origin = socket.host().map(HostAddress::from);
        let of_thread = Arc::new(socket);
        let socket = Arc::downgrade(&of_thread);
        let is_admitted = Arc::new(AtomicBool::new(false));
        let state = Arc::clone(&self.state);
        let admitted = Arc::clone(&is_admitted);
        let builder = Builder::new().name("transport-peer".to_owned());
        let thread = builder.spawn(move || {
            // Held until nothing of this connection is written any more.
            let served = handshake::as_server(&of_thread, &state, &admitted);
            if let Ok(admitted) = served {
                Served::new(&of_thread, &state, admitted.peer).run();
            }
            of_thread.shutdown();
        });
        if let Ok(thread) = thread {
            serving.push(Serving { socket, is_admitted, is_cut: false, origin, thread });
        }
    }
}
