//! The Unix socket server: serves the clients of this host with a pool of threads.
//!
//! All threads wait on one epoll instance. Each connection is armed for one event at a time, so one
//! thread at a time serves it. That thread may block on a tier while the others continue. An idle
//! client takes a socket and its session, and no CPU time.

mod accounts;
mod buffered_bytes;
mod call_errors;
mod call_summary;
mod connection;
mod connections;
mod descriptors;
mod dispatch;
mod holds;
mod manifest_limits;
mod mapped;
mod peer;
mod pinning;
mod refusals;
mod session;
mod sessions;
#[cfg(test)]
mod tests;
mod wait_permits;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, epoll, eventfd};

use accounts::Accounts;
use buffered_bytes::BufferedBytes;
use connection::{Connection, NextStep, ThreadBuffers};
use connections::Connections;
use peer::Peer;
pub(crate) use pinning::pinning_client;
use refusals::Refusals;
use session::ClientSession;
pub use session::ClientSnapshot;
pub(crate) use sessions::ClientSessions;
use wait_permits::WaitPermits;

use crate::tenants::Refusal;
use crate::{Node, NodeError};

/// Epoll tokens of the listener and of the eventfd that wakes all threads.
const LISTENER: u64 = 0;
const WAKE: u64 = 1;
/// The token of the first connection. Connections have even tokens; the pidfd of the client's
/// process has the same token with `PROCESS_BIT`.
const FIRST_CONNECTION: u64 = 2;
const PROCESS_BIT: u64 = 1;

/// Initial number of threads; more are started while all are busy.
const THREADS_MIN: usize = 2;
/// Maximum number of connections accepted for one event.
const ACCEPT_MAX: usize = 64;
/// Pause after a failed accept: most likely file descriptors are exhausted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);
/// Maximum time from connecting to hello, which is the first message of a client.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time to wait for the threads when the server stops.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// Exit status when a store is broken: `EX_SOFTWARE` of `sysexits.h`.
const EXIT_BROKEN: i32 = 70;

/// Serves a node's clients until it is stopped or dropped.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    node: Node,
    threads_max: usize,
    epoll: OwnedFd,
    wake: OwnedFd,
    listener: UnixListener,
    connections: Mutex<Connections>,
    refusals: Refusals,
    accounts: Accounts,
    own_user: u32,
    /// Sessions by the epoll token of their process.
    processes: Mutex<HashMap<u64, Weak<ClientSession>>>,
    wait_permits: WaitPermits,
    buffered: Arc<BufferedBytes>,
    next_connection: AtomicU64,
    /// Number of threads that wait for events.
    idle_threads: AtomicUsize,
    threads: Mutex<Vec<JoinHandle<()>>>,
    running_threads: Mutex<usize>,
    /// Notified when a thread ends.
    thread_ended: Condvar,
    is_stopping: AtomicBool,
}

impl Server {
    /// Starts to serve a listening socket.
    pub fn start(node: Node, listener: UnixListener) -> Result<Self, NodeError> {
        let failed = |source| NodeError::Server { operation: "serve the Unix socket", source };
        let shared = Self::create_shared(node, listener).map_err(failed)?;
        for _ in 0..THREADS_MIN {
            shared.spawn().map_err(failed)?;
        }
        Ok(Self { shared })
    }

    fn create_shared(node: Node, listener: UnixListener) -> io::Result<Arc<Shared>> {
        listener.set_nonblocking(true)?;
        let threads_max = node.config().limits.threads_max.max(2 * THREADS_MIN);
        let shared = Shared {
            node,
            threads_max,
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            listener,
            connections: Mutex::default(),
            refusals: Refusals::default(),
            accounts: Accounts::default(),
            own_user: rustix::process::geteuid().as_raw(),
            processes: Mutex::default(),
            // At least `THREADS_MIN` threads always serve calls that need not wait.
            wait_permits: WaitPermits::new(threads_max - THREADS_MIN),
            buffered: Arc::default(),
            next_connection: AtomicU64::new(FIRST_CONNECTION),
            idle_threads: AtomicUsize::new(0),
            threads: Mutex::default(),
            running_threads: Mutex::new(0),
            thread_ended: Condvar::new(),
            is_stopping: AtomicBool::new(false),
        };
        shared.watch(shared.listener.as_fd(), LISTENER, epoll::EventFlags::IN)?;
        let data = epoll::EventData::new_u64(WAKE);
        epoll::add(&shared.epoll, &shared.wake, data, epoll::EventFlags::IN)?;
        Ok(Arc::new(shared))
    }

    /// Stops: no further call is answered. Clients keep their holds until the node is dropped.
    pub fn stop(&self) {
        let shared = &self.shared;
        shared.is_stopping.store(true, Ordering::Release);
        // No thread reads the eventfd, so it stays readable and wakes all of them.
        if let Err(error) = rustix::io::write(&shared.wake, &1_u64.to_le_bytes()) {
            tracing::error!(%error, "cannot wake the server's threads");
        }
        let running = lock(&shared.running_threads);
        let is_running = |running: &mut usize| *running > 0;
        // After a time-out, or with a poisoned lock, the rest is done all the same.
        drop(shared.thread_ended.wait_timeout_while(running, STOP_TIMEOUT, is_running));
        // A thread that still blocks on a tier is not joined, because the join could take as long
        // as the tier.
        let threads = std::mem::take(&mut *lock(&shared.threads));
        for thread in threads.into_iter().filter(JoinHandle::is_finished) {
            // The panic hook has reported a panic of the thread already.
            drop(thread.join());
        }
        let connections = std::mem::take(&mut *lock(&shared.connections));
        for connection in connections.all() {
            connection.shut();
        }
        // Clients can still read their holds. So the memory is not returned to the pool, and its
        // ledger records stay: the next run releases those of processes that have exited.
        for session in shared.node.sessions().all() {
            session.retain_holds();
        }
    }
}

/// Counts a running thread. It is dropped however the thread ends, also by a panic.
struct ThreadGuard(Arc<Shared>);

impl Drop for ThreadGuard {
    fn drop(&mut self) {
        *lock(&self.0.running_threads) -= 1;
        self.0.thread_ended.notify_all();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Locks a mutex, ignoring poison: the data that these mutexes guard changes in single steps, so a
/// panic leaves it consistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn spawn(self: &Arc<Self>) -> io::Result<()> {
        let shared = Arc::clone(self);
        // Counted before the thread runs, so that other threads do not start one more meanwhile.
        self.idle_threads.fetch_add(1, Ordering::AcqRel);
        *lock(&self.running_threads) += 1;
        let serve = move || ThreadGuard(shared).0.run();
        let spawned = std::thread::Builder::new().name("cascade-serve".to_owned()).spawn(serve);
        if spawned.is_err() {
            self.idle_threads.fetch_sub(1, Ordering::AcqRel);
            *lock(&self.running_threads) -= 1;
        }
        lock(&self.threads).push(spawned?);
        Ok(())
    }

    /// Watches a descriptor. One event goes to one thread; the next needs [`Self::arm`].
    fn watch(&self, fd: BorrowedFd<'_>, token: u64, flags: epoll::EventFlags) -> io::Result<()> {
        let flags = flags | epoll::EventFlags::ONESHOT;
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), flags)?;
        Ok(())
    }

    fn arm(&self, fd: BorrowedFd<'_>, token: u64, flags: epoll::EventFlags) -> io::Result<()> {
        let flags = flags | epoll::EventFlags::ONESHOT;
        epoll::modify(&self.epoll, fd, epoll::EventData::new_u64(token), flags)?;
        Ok(())
    }

    /// The loop of a server thread.
    fn run(self: &Arc<Self>) {
        let mut buffers = ThreadBuffers::new();
        // One event at a time: further ones would wait while this thread blocks on the first, and
        // no other thread would get them.
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }];
        loop {
            let count = match epoll::wait(&self.epoll, &mut events, None) {
                Ok(count) => count,
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => {
                    tracing::error!(%error, "a server thread cannot wait for events");
                    return;
                }
            };
            if self.is_stopping.load(Ordering::Acquire) {
                return;
            }
            if count == 0 {
                continue;
            }
            // The event may block this thread, so another one has to wait for the next event.
            if self.idle_threads.fetch_sub(1, Ordering::AcqRel) == 1 {
                self.add_thread();
            }
            let (token, flags) = (events[0].data.u64(), events[0].flags);
            // Unwind safe: `handle_panic` checks whether the stores are broken, and the buffers are
            // replaced.
            let handle = AssertUnwindSafe(|| self.handle_event(token, flags, &mut buffers));
            if catch_unwind(handle).is_err() {
                buffers = ThreadBuffers::new();
                self.handle_panic(token);
            }
            self.idle_threads.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// After a panic in a call: closes its connection, so that the client does not wait for the
    /// answer. If a store is broken, exits the process without a clean shutdown: the service
    /// manager restarts the node, which recovers a pool file.
    fn handle_panic(&self, token: u64) {
        let tenants = self.node.tenants().all();
        if let Some(broken) = tenants.iter().find(|tenant| tenant.store().is_poisoned()) {
            tracing::error!(
                tenant = broken.name(),
                "the node exits: a thread panicked inside the tenant's store, so its state is \
                 unknown; restart the node"
            );
            std::process::exit(EXIT_BROKEN);
        }
        tracing::error!(token, "a call panicked; its connection is closed, the node continues");
        // The event was consumed by the panic. Without arming, no further client could connect.
        if token == LISTENER {
            self.arm_listener();
        }
        let connection = lock(&self.connections).get(token);
        if let Some(connection) = connection {
            self.close_connection(&connection);
        }
    }

    fn arm_listener(&self) {
        if let Err(error) = self.arm(self.listener.as_fd(), LISTENER, epoll::EventFlags::IN) {
            tracing::error!(%error, "cannot watch the Unix socket; no further client can connect");
        }
    }

    fn add_thread(self: &Arc<Self>) {
        // `spawn` counts under a lock of its own, so threads that pass this check together can
        // exceed the maximum by a few.
        if *lock(&self.running_threads) >= self.threads_max {
            return;
        }
        if let Err(error) = self.spawn() {
            tracing::warn!(%error, "cannot start another server thread; the node continues");
        }
    }

    fn handle_event(&self, token: u64, flags: epoll::EventFlags, buffers: &mut ThreadBuffers) {
        if token == LISTENER {
            self.accept_connections();
            self.arm_listener();
            return;
        }
        if token & PROCESS_BIT != 0 {
            // The process exited. Children may have inherited its sockets, so these stay open.
            let session = lock(&self.processes).remove(&token);
            if let Some(session) = session.and_then(|session| session.upgrade()) {
                self.end_session(&session);
            }
            return;
        }
        // Ids are never reused, so an event of a closed connection finds none.
        let connection = lock(&self.connections).get(token);
        let Some(connection) = connection else { return };
        let next = connection.serve(self, flags, buffers);
        let armed = match next {
            NextStep::Read => self.arm(connection.fd(), token, epoll::EventFlags::IN),
            NextStep::Write => self.arm(connection.fd(), token, epoll::EventFlags::OUT),
            NextStep::Close => {
                self.close_connection(&connection);
                return;
            }
        };
        if let Err(error) = armed {
            tracing::warn!(%error, "cannot watch a connection; it is closed");
            // The client can read the last answer after the close, so its holds stay granted.
            connection.confirm_grant();
            self.close_connection(&connection);
        }
    }

    fn accept_connections(&self) {
        // There is no timer: expired connections are closed when the next one arrives.
        let expired = lock(&self.connections).unauthenticated_for(HELLO_TIMEOUT);
        for connection in expired {
            self.close_connection(&connection);
        }
        self.node.sessions().close_unmapped();
        for _ in 0..ACCEPT_MAX {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    // Most likely descriptors are exhausted. The other threads continue to serve.
                    self.refusals.log_failed_accept(&error);
                    std::thread::park_timeout(ACCEPT_PAUSE);
                    return;
                }
            };
            match Peer::of(&stream) {
                Ok(peer) => self.add_connection(stream, peer),
                Err(error) => {
                    tracing::warn!(%error, "refused a client: cannot read its credentials");
                }
            }
            if let Some(pause) = self.refusals.pause_after_accept() {
                // Further connections wait in the accept queue. Connected clients are served.
                std::thread::park_timeout(pause);
                return;
            }
        }
    }

    /// Adds a connection, or refuses it and closes it.
    fn add_connection(&self, stream: UnixStream, peer: Peer) {
        let tenants = self.node.tenants();
        let is_tenants_user = tenants.has_user(peer.user);
        let refuse = |reason: &str| self.refusals.log((peer.process, peer.user), reason);
        if !is_tenants_user && !tenants.is_administrator(peer.user, peer.group) {
            if !tenants.has_tokens() {
                let refusal = Refusal::User { user: peer.user }.to_string();
                connection::refuse_before_hello(&stream, &refusal);
                return refuse("its user belongs to no tenant");
            }
            if self.refusals.limit_reached(peer.user) {
                return refuse("its user reached the limit of refused hellos");
            }
        }
        // Check and addition take the lock separately. No other thread adds a connection in
        // between: the listener is armed for one thread at a time.
        let connections_max = self.node.live_settings().connections_max;
        let limit = lock(&self.connections).reached_limit(peer, self.own_user, connections_max);
        if let Some(limit) = limit {
            connection::refuse_before_hello(&stream, limit.reason());
            return refuse(limit.reason());
        }
        // Even numbers: the lowest bit marks the token of the pidfd.
        let id = self.next_connection.fetch_add(2, Ordering::Relaxed);
        let connection = match Connection::new(id, stream, peer, &self.buffered) {
            Ok(connection) => Arc::new(connection),
            Err(error) => return refuse(&error.to_string()),
        };
        let evicted = lock(&self.connections).add(&connection, is_tenants_user);
        if let Some(evicted) = evicted {
            evicted.shut();
            let peer = evicted.peer();
            let reason = "it sent no hello, and unauthenticated connections are at their limit";
            self.refusals.log((peer.process, peer.user), reason);
        }
        // Watched last: an event finds the connection in the list.
        if let Err(error) = self.watch(connection.fd(), id, epoll::EventFlags::IN) {
            tracing::warn!(%error, "cannot watch a connection; it is closed");
            self.close_connection(&connection);
        }
    }

    /// Watches the process of a new session, so that the session ends when the process exits.
    fn watch_process(&self, connection: &Connection, session: &Arc<ClientSession>) {
        let Some(process) = &session.process else { return };
        let token = connection.id | PROCESS_BIT;
        // Inserted before it is watched: the process may have exited already. A weak reference,
        // because the session owns the pidfd and closes it when it ends.
        lock(&self.processes).insert(token, Arc::downgrade(session));
        if let Err(error) = self.watch(process.as_fd(), token, epoll::EventFlags::IN) {
            tracing::debug!(%error, "cannot watch a client's process; its session ends with its \
                                     last connection");
            return;
        }
        // Only from here on the session may outlive its connections: its end will be noticed.
        session.set_watched();
    }

    fn close_connection(&self, connection: &Connection) {
        // Several threads may close a connection at once, for example after a time-out and an
        // event. Only the one that removes it from the list continues.
        let removed = lock(&self.connections).remove(connection.id);
        if removed.is_some() {
            connection.shut();
            self.leave_session(connection);
        }
    }

    /// Removes a closed connection from its session, which ends with its last connection unless its
    /// process can still access its holds.
    fn leave_session(&self, connection: &Connection) {
        // A connection that another thread closes during its hello gets here twice.
        let Some(session) = connection.session_to_leave() else { return };
        // Before `leave`: an unconfirmed hold must not keep the session open.
        if let Some(unconfirmed) = connection.take_unconfirmed_grant() {
            session.release(&[unconfirmed]);
        }
        if self.node.sessions().leave(&session) {
            // The session's pidfd is closed with it, which removes it from epoll.
            lock(&self.processes).retain(|_, session| session.strong_count() > 0);
        }
    }

    /// Ends a session and closes all its connections.
    fn end_session(&self, session: &ClientSession) {
        let all = lock(&self.connections).all();
        // The session closes first, so that its connections cannot get holds meanwhile. Leaving it
        // with the last connection closes it again, which finds nothing left.
        self.node.sessions().remove(session);
        for other in all {
            if other.session().is_some_and(|one| one.id == session.id) {
                self.close_connection(&other);
            }
        }
    }
}
