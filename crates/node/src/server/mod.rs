//! The Unix socket: connections of this host's workers, served by a few threads.
//!
//! All threads wait on one epoll instance. Each connection is armed for one event at a time, so
//! one thread at a time serves it; that thread may wait for a tier while the others go on. A
//! client that says nothing costs a socket and its session, and wakes nobody.

mod accounts;
mod connection;
mod connections;
mod descriptors;
mod dispatch;
mod figures;
mod holds;
mod mapped;
mod refusals;
mod session;
mod waiters;
mod waiting;

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
use connection::{Connection, Next, Scratch};
use connections::Connections;
use refusals::Refusals;
pub use session::SessionFacts;
pub(crate) use session::Sessions;
use session::{Peer, Session};
use waiters::Waiters;
use waiting::Waiting;

use crate::tenants::Refusal;
use crate::{Node, NodeError};

const LISTENER: u64 = 0;
const WAKE: u64 = 1;
/// Connections are numbered from here on; the lowest bit tells a client's process from its socket.
const FIRST: u64 = 2;
const PROCESS: u64 = 1;

/// Threads at the start; more come while these are busy.
const THREADS_MIN: usize = 2;
/// Connections that are accepted in one go.
const ACCEPT_MAX: usize = 64;
/// How long nothing is accepted after that failed: what is missing is not there at once again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);
/// How long a connection may take to say hello. It is the first thing that a client does.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the server waits for its threads when it stops.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// The process ended because a store is broken: an internal error, as `sysexits.h` has it.
const EXIT_BROKEN: i32 = 70;

/// Serves a node's clients until it is stopped.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    node: Node,
    epoll: OwnedFd,
    wake: OwnedFd,
    listener: UnixListener,
    connections: Mutex<Connections>,
    refusals: Refusals,
    accounts: Accounts,
    own_user: u32,
    /// Sessions by the token of their process.
    processes: Mutex<HashMap<u64, Weak<Session>>>,
    waiters: Waiters,
    /// Bytes of unfinished messages and of answers not taken.
    waiting: Arc<Waiting>,
    next: AtomicU64,
    /// Threads that wait for events.
    idle: AtomicUsize,
    threads: Mutex<Vec<JoinHandle<()>>>,
    running: Mutex<usize>,
    /// One of them ended.
    stopped: Condvar,
    is_stopping: AtomicBool,
}

impl Server {
    /// Begins to serve a socket that listens.
    pub fn start(node: Node, listener: UnixListener) -> Result<Self, NodeError> {
        let failed = |source| NodeError::Server { operation: "serve the Unix socket", source };
        let shared = Self::prepare(node, listener).map_err(failed)?;
        for _ in 0..THREADS_MIN {
            shared.spawn().map_err(failed)?;
        }
        Ok(Self { shared })
    }

    fn prepare(node: Node, listener: UnixListener) -> io::Result<Arc<Shared>> {
        listener.set_nonblocking(true)?;
        let threads_max = node.config().limits.threads_max.max(2 * THREADS_MIN);
        let shared = Shared {
            node,
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            listener,
            connections: Mutex::default(),
            refusals: Refusals::default(),
            accounts: Accounts::default(),
            own_user: rustix::process::geteuid().as_raw(),
            processes: Mutex::default(),
            waiters: Waiters::new(threads_max - THREADS_MIN),
            waiting: Arc::default(),
            next: AtomicU64::new(FIRST),
            idle: AtomicUsize::new(0),
            threads: Mutex::default(),
            running: Mutex::new(0),
            stopped: Condvar::new(),
            is_stopping: AtomicBool::new(false),
        };
        shared.watch(shared.listener.as_fd(), LISTENER, epoll::EventFlags::IN)?;
        let data = epoll::EventData::new_u64(WAKE);
        epoll::add(&shared.epoll, &shared.wake, data, epoll::EventFlags::IN)?;
        Ok(Arc::new(shared))
    }

    /// Stops: no further call is taken. What clients hold stays theirs until the node is dropped.
    pub fn stop(&self) {
        let shared = &self.shared;
        shared.is_stopping.store(true, Ordering::Release);
        // The count stays above zero, so every thread sees it.
        if let Err(error) = rustix::io::write(&shared.wake, &1_u64.to_le_bytes()) {
            tracing::error!(%error, "cannot wake the server's threads");
        }
        let running = lock(&shared.running);
        let is_busy = |running: &mut usize| *running > 0;
        // Poisoned or late, what is to be done next is the same.
        drop(shared.stopped.wait_timeout_while(running, STOP_TIMEOUT, is_busy));
        let threads = std::mem::take(&mut *lock(&shared.threads));
        for thread in threads.into_iter().filter(JoinHandle::is_finished) {
            // A thread that panicked has said so; stopping goes on.
            drop(thread.join());
        }
        let connections = std::mem::take(&mut *lock(&shared.connections));
        for connection in connections.all() {
            connection.shut();
        }
        // Clients read on in what they hold: it goes back to no pool, and stays noted for the next
        // run, which asks the kernel whose process is gone.
        for session in shared.node.sessions().all() {
            session.keep_held();
        }
    }
}

/// A thread of the server, counted as long as it runs, however it ends.
struct Running(Arc<Shared>);

impl Drop for Running {
    fn drop(&mut self) {
        *lock(&self.0.running) -= 1;
        self.0.stopped.notify_all();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these guard changes in single steps.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn spawn(self: &Arc<Self>) -> io::Result<()> {
        let shared = Arc::clone(self);
        self.idle.fetch_add(1, Ordering::AcqRel);
        *lock(&self.running) += 1;
        let serve = move || Running(shared).0.run();
        let spawned = std::thread::Builder::new().name("cascade-serve".to_owned()).spawn(serve);
        if spawned.is_err() {
            self.idle.fetch_sub(1, Ordering::AcqRel);
            *lock(&self.running) -= 1;
        }
        lock(&self.threads).push(spawned?);
        Ok(())
    }

    /// One event for one thread, then not again until it is armed anew.
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

    fn run(self: &Arc<Self>) {
        let mut scratch = Scratch::new();
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
            // Somebody has to wait for the next event while this thread may be held up.
            if self.idle.fetch_sub(1, Ordering::AcqRel) == 1 {
                self.grow();
            }
            let (token, flags) = (events[0].data.u64(), events[0].flags);
            // What a call changes is behind locks that are asked below whether they are sound; the
            // buffers are emptied.
            let handle = AssertUnwindSafe(|| self.handle(token, flags, &mut scratch));
            if catch_unwind(handle).is_err() {
                scratch = Scratch::new();
                self.after_panic(token);
            }
            self.idle.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// A call panicked: its client has no answer to wait for, and the others go on, unless a store
    /// is no longer sound. Then the process ends, as killed: its supervisor starts another, and a
    /// pool with a name is found again.
    fn after_panic(&self, token: u64) {
        let tenants = self.node.tenants().all();
        if let Some(broken) = tenants.iter().find(|tenant| tenant.store().is_broken()) {
            tracing::error!(
                tenant = broken.name(),
                "the node ends: a thread panicked inside the tenant's store, and nothing can be \
                 said of its blocks any more; start it again"
            );
            std::process::exit(EXIT_BROKEN);
        }
        tracing::error!(token, "a call panicked: its connection is closed, the node goes on");
        if token == LISTENER {
            self.arm_listener();
        }
        let connection = lock(&self.connections).get(token);
        if let Some(connection) = connection {
            self.close(&connection);
        }
    }

    fn arm_listener(&self) {
        if let Err(error) = self.arm(self.listener.as_fd(), LISTENER, epoll::EventFlags::IN) {
            tracing::error!(%error, "no further connection can be accepted");
        }
    }

    fn grow(self: &Arc<Self>) {
        let most = self.node.config().limits.threads_max.max(2 * THREADS_MIN);
        if *lock(&self.running) >= most {
            return;
        }
        if let Err(error) = self.spawn() {
            tracing::warn!(%error, "cannot start another server thread; going on with those there");
        }
    }

    fn handle(&self, token: u64, flags: epoll::EventFlags, scratch: &mut Scratch) {
        if token == LISTENER {
            self.accept();
            self.arm_listener();
            return;
        }
        if token & PROCESS != 0 {
            // The process is gone; children that inherited its sockets do not stand for it.
            let session = lock(&self.processes).remove(&token);
            if let Some(session) = session.and_then(|session| session.upgrade()) {
                self.end_session(&session);
            }
            return;
        }
        let connection = lock(&self.connections).get(token);
        let Some(connection) = connection else { return };
        let next = connection.serve(self, flags, scratch);
        let armed = match next {
            Next::Read => self.arm(connection.fd(), token, epoll::EventFlags::IN),
            Next::Write => self.arm(connection.fd(), token, epoll::EventFlags::OUT),
            Next::Close => {
                self.close(&connection);
                return;
            }
        };
        if let Err(error) = armed {
            tracing::warn!(%error, "a connection is closed: it cannot be watched");
            // The client reads what was answered, closed or not: that stays granted.
            connection.keep_unseen();
            self.close(&connection);
        }
    }

    fn accept(&self) {
        let silent = lock(&self.connections).silent_for(HELLO_TIMEOUT);
        for connection in silent {
            self.close(&connection);
        }
        self.node.sessions().end_unmapped();
        for _ in 0..ACCEPT_MAX {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    // Out of descriptors, most likely: the others are served, this one waits.
                    tracing::warn!(%error, "cannot accept a connection");
                    std::thread::park_timeout(ACCEPT_PAUSE);
                    return;
                }
            };
            match Peer::of(&stream) {
                Ok(peer) => self.admit(stream, peer),
                Err(error) => tracing::warn!(%error, "a connection is closed: no credentials"),
            }
            if let Some(pause) = self.refusals.pause_after_accept() {
                // The next ones wait in the socket's queue; clients that are here are served.
                std::thread::park_timeout(pause);
                return;
            }
        }
    }

    /// Takes a connection in, or closes it.
    fn admit(&self, stream: UnixStream, peer: Peer) {
        let tenants = self.node.tenants();
        let is_tenants_user = tenants.has_user(peer.user);
        let refuse = |reason: &str| self.refusals.log((peer.process, peer.user), reason);
        if !is_tenants_user && !tenants.is_administrator(peer.user, peer.group) {
            if !tenants.have_tokens() {
                connection::refuse_unread(&stream, &Refusal::User { user: peer.user }.to_string());
                return refuse("its user is no tenant");
            }
            if self.refusals.are_too_many_of(peer.user) {
                return refuse("too many hellos of its user were just refused");
            }
        }
        let most = self.node.live().connections_max;
        let full = lock(&self.connections).is_full(peer, self.own_user, most);
        if let Some(full) = full {
            connection::refuse_unread(&stream, full.reason());
            return refuse(full.reason());
        }
        let id = self.next.fetch_add(2, Ordering::Relaxed);
        let connection = match Connection::new(id, stream, peer, &self.waiting) {
            Ok(connection) => Arc::new(connection),
            Err(error) => return refuse(&error.to_string()),
        };
        let evicted = lock(&self.connections).add(&connection, is_tenants_user);
        if let Some(evicted) = evicted {
            evicted.shut();
            let peer = evicted.peer();
            let reason = "it said no hello, and others need its place";
            self.refusals.log((peer.process, peer.user), reason);
        }
        if let Err(error) = self.watch(connection.fd(), id, epoll::EventFlags::IN) {
            tracing::warn!(%error, "a connection is closed: it cannot be watched");
            self.close(&connection);
        }
    }

    /// Watches the process of a new session, which came with this connection.
    fn watch_process(&self, connection: &Connection, session: &Arc<Session>) {
        let Some(process) = &session.process else { return };
        let token = connection.id | PROCESS;
        lock(&self.processes).insert(token, Arc::downgrade(session));
        if let Err(error) = self.watch(process.as_fd(), token, epoll::EventFlags::IN) {
            tracing::debug!(%error, "a client's death will be seen by its socket alone");
            return;
        }
        session.note_watched();
    }

    fn close(&self, connection: &Connection) {
        let removed = lock(&self.connections).remove(connection.id);
        if removed.is_some() {
            connection.shut();
            self.leave(connection);
        }
    }

    /// Ends the connection's part in its session, and with the last one the session, unless its
    /// process lives on and holds something.
    fn leave(&self, connection: &Connection) {
        let Some(session) = connection.session() else { return };
        if let Some(unseen) = connection.take_unseen() {
            session.release(&[unseen]);
        }
        if self.node.sessions().leave(&session) {
            // Its descriptor goes with it, and with that the kernel's interest in it.
            lock(&self.processes).retain(|_, known| known.strong_count() > 0);
        }
    }

    /// Ends a session at once, with all its connections.
    fn end_session(&self, session: &Session) {
        let all = lock(&self.connections).all();
        self.node.sessions().remove(session);
        for other in all {
            if other.session().is_some_and(|one| one.id == session.id) {
                self.close(&other);
            }
        }
    }
}
