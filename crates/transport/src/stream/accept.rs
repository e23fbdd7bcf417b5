//! Accepts connections, each with a thread of its own.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use cascade_runtime::thread::{Builder, JoinHandle};
use cascade_runtime::{Mutex, sleep};
use rustix::fs::{Mode, chmod};

use super::handshake;
use super::server::Served;
use super::socket::{Socket, end, set_up_tcp};
use crate::TransportError;
use crate::state::EndpointState;

/// Pause after an error of `accept`, such as too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Accepts one connection: the socket and the peer's address.
type Accept = dyn Fn() -> io::Result<(OwnedFd, String)> + Send;

/// A connection and its thread.
type Serving = (Arc<Socket>, JoinHandle<()>);

#[derive(Debug)]
struct Shared {
    state: Arc<EndpointState>,
    is_closing: AtomicBool,
    serving: Mutex<Vec<Serving>>,
}

/// The thread that accepts connections.
#[derive(Debug)]
pub(crate) struct Accepting {
    shared: Arc<Shared>,
    listening: OwnedFd,
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
    let listening = listener.try_clone().map_err(refused)?.into();
    let accept = move || {
        let (stream, peer) = listener.accept()?;
        set_up_tcp(&stream)?;
        Ok((stream.into(), peer.to_string()))
    };
    let accepting = Accepting::start(Arc::clone(state), listening, Box::new(accept));
    Ok((accepting.map_err(refused)?, address))
}

/// Listens on a Unix socket that only this user can connect to.
pub(crate) fn listen_unix(
    state: &Arc<EndpointState>,
    path: &Path,
) -> Result<Accepting, TransportError> {
    let name = path.display().to_string();
    let refused = |error: io::Error| listen_error(&name, &error);
    let listener = bind_unix(path).map_err(refused)?;
    chmod(path, Mode::RUSR | Mode::WUSR).map_err(|error| refused(error.into()))?;
    let listening = listener.try_clone().map_err(refused)?.into();
    let peer = name.clone();
    let accept = move || {
        let (stream, _) = listener.accept()?;
        Ok((stream.into(), peer.clone()))
    };
    Accepting::start(Arc::clone(state), listening, Box::new(accept)).map_err(refused)
}

/// Makes a Unix socket. Replaces one that a killed process left.
fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    let bound = UnixListener::bind(path);
    let is_taken = matches!(&bound, Err(error) if error.kind() == io::ErrorKind::AddrInUse);
    let is_left = || {
        let connected = UnixStream::connect(path);
        matches!(connected, Err(error) if error.kind() == io::ErrorKind::ConnectionRefused)
    };
    if !(is_taken && is_left()) {
        return bound;
    }
    std::fs::remove_file(path)?;
    UnixListener::bind(path)
}

fn listen_error(address: &str, error: &io::Error) -> TransportError {
    TransportError::Listen { address: address.to_owned(), reason: error.to_string() }
}

impl Accepting {
    fn start(
        state: Arc<EndpointState>,
        listening: OwnedFd,
        accept: Box<Accept>,
    ) -> io::Result<Self> {
        let serving = Mutex::new(vec![]);
        let shared = Arc::new(Shared { state, is_closing: AtomicBool::new(false), serving });
        let of_thread = Arc::clone(&shared);
        let builder = Builder::new().name("transport-accept".to_owned());
        let thread = builder.spawn(move || of_thread.accept_all(&accept))?;
        Ok(Self { shared, listening, thread: Mutex::new(Some(thread)) })
    }

    /// Peers that are connected now.
    pub(crate) fn peer_count(&self) -> usize {
        let serving = self.shared.serving.lock().unwrap_or_else(PoisonError::into_inner);
        serving.iter().filter(|(_, thread)| !thread.is_finished()).count()
    }

    /// Ends all connections and waits for their threads.
    pub(crate) fn stop(&self) {
        self.shared.is_closing.store(true, Ordering::Release);
        end(&self.listening);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            join(thread);
        }
        let serving = {
            let mut serving = self.shared.serving.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *serving)
        };
        for (socket, _) in &serving {
            socket.shutdown();
        }
        for (_, thread) in serving {
            join(thread);
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
                Ok((socket, peer)) => self.start_serving(socket, peer),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) if self.is_closing.load(Ordering::Acquire) => {}
                Err(_) => sleep(ACCEPT_PAUSE),
            }
        }
    }

    /// Serves a connection in a thread. Beyond the limit of peers, or without a thread, it is
    /// closed.
    fn start_serving(self: &Arc<Self>, socket: OwnedFd, peer: String) {
        let mut serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner);
        serving.retain(|(_, thread)| !thread.is_finished());
        if serving.len() >= self.state.config.limits.peers_max {
            return;
        }
        let Ok(socket) = Socket::of(socket, peer) else {
            return;
        };
        let socket = Arc::new(socket);
        let (state, of_thread) = (Arc::clone(&self.state), Arc::clone(&socket));
        let builder = Builder::new().name("transport-peer".to_owned());
        let thread = builder.spawn(move || {
            if let Ok(peer) = handshake::as_server(&of_thread, &state) {
                Served::new(&of_thread, &state, peer).run();
            }
            of_thread.shutdown();
        });
        if let Ok(thread) = thread {
            serving.push((socket, thread));
        }
    }
}
