//! A session with one run of a node: its connections, hold numbers and pending releases.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_memory::{Attachment, DeviceImporter, Lender, process_mark};
use cascade_runtime::{Clock, Deadline, SystemClock};
use cascade_tier::{StoreError, TierName, intern};
use cascade_wire::{
    Access, Answer, BLOCKS_MAX, Call, Hello, HoldRange, KEYS_MAX, SessionId, VERSION, VERSION_MIN,
    Welcome,
};

use crate::connection::{Connection, ConnectionError};
use crate::live_sessions::LiveSession;
use crate::tasks::BackgroundTasks;

/// Connections of one session, so calls in flight at a time. Further calls wait.
const CONNECTIONS_MAX: usize = 32;

/// After so long without a call, the next call first checks whether the node closed the connection.
const IDLE_CHECK_MS: u64 = 10;

/// Reason while the node does not answer in time.
pub(crate) const UNRESPONSIVE: &str = "the node does not answer; check whether it is stopped";

/// How a client identifies itself to its node.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    pub(crate) socket: PathBuf,
    pub(crate) access: Access,
    pub(crate) token: Option<Vec<u8>>,
    pub(crate) name: String,
    /// Maps the pool of a node whose blocks are in the memory of a device.
    pub(crate) devices: Option<Arc<dyn DeviceImporter>>,
}

/// The connections of a session. Slabs that the node lent keep it alive: the node releases what a
/// client holds once its last connection is closed.
#[derive(Debug)]
pub(crate) struct Session {
    id: SessionId,
    pub(crate) epoch: u64,
    identity: Identity,
    connections: Mutex<ConnectionPool>,
    connection_returned: Condvar,
    next_hold: AtomicU64,
    /// When the last call began, in milliseconds of the monotonic clock.
    last_used_ms: AtomicU64,
    releases: Mutex<Vec<HoldRange>>,
    tasks: Arc<BackgroundTasks>,
    /// The process that opened it; a forked child has a copy of it.
    process: u64,
    /// Dropped before the background thread is notified of the session's end.
    registration: Option<LiveSession>,
}

#[derive(Debug, Default)]
struct ConnectionPool {
    idle: Vec<Connection>,
    open: usize,
    /// Connections on which a late answer may still arrive. They stay open until another one is
    /// open, so that the session does not end while slabs are held.
    retired: Vec<Connection>,
}

impl ConnectionPool {
    /// Closes the retired connections; another one is open.
    fn close_retired(&mut self) {
        self.retired.drain(..).for_each(Connection::shutdown);
    }
}

/// A session and the pool that it mapped.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) session: Arc<Session>,
    pub(crate) attachment: Arc<Attachment>,
    pub(crate) tiers: Vec<TierName>,
    pub(crate) welcome: Welcome,
}

/// Why a call has no answer, by what that means for the session.
#[derive(Debug)]
pub(crate) enum CallError {
    /// The deadline passed.
    Timeout,
    /// The deadline passed before one of the session's connections was free.
    NoFreeConnection,
    /// The call is longer than a message may be.
    TooLong(String),
    /// The session has failed.
    Broken(String),
}

impl Link {
    /// Opens a session.
    pub(crate) fn open(
        identity: &Identity,
        tasks: &Arc<BackgroundTasks>,
        deadline: Deadline,
    ) -> Result<Self, StoreError> {
        let socket = || identity.socket.display().to_string();
        let unavailable = |reason: String| StoreError::Unavailable { socket: socket(), reason };
        let failed = |error: ConnectionError| match error {
            ConnectionError::Timeout | ConnectionError::NotSent | ConnectionError::SendBlocked => {
                unavailable(UNRESPONSIVE.to_owned())
            }
            ConnectionError::TooLong(reason) | ConnectionError::Broken(reason) => {
                unavailable(reason)
            }
        };
        let mut connection = Connection::connect(&identity.socket, deadline).map_err(failed)?;
        let (answer, pool) =
            connection.handshake(&hello(identity, None), deadline).map_err(failed)?;
        let welcome = match answer {
            Answer::Welcome(welcome) => welcome,
            Answer::Refused { reason } => {
                return Err(StoreError::Refused { socket: socket(), reason });
            }
            other => {
                return Err(unavailable(format!("the node answered the handshake with {other:?}")));
            }
        };
        let pool = pool
            .ok_or_else(|| unavailable("the node did not send its pool's descriptor".to_owned()))?;
        let session = Arc::new(Session::new(identity, connection, &welcome, tasks));
        let bytes = usize::try_from(welcome.pool_bytes).map_err(|_| {
            unavailable("the node's pool does not fit this process's address space".to_owned())
        })?;
        let lender = Arc::clone(&session) as Arc<dyn Lender>;
        let is_writable = identity.access == Access::Write;
        let attachment = if let Some(device) = welcome.device {
            let importer = identity.devices.as_ref().ok_or_else(|| StoreError::Refused {
                socket: socket(),
                reason: "the blocks of this node are in the memory of a GPU; connect with a GPU \
                         that can reach it"
                    .to_owned(),
            })?;
            let memory = importer.import(pool, bytes, device).map_err(StoreError::Device)?;
            Attachment::of_device(memory, is_writable, lender)
        } else {
            Attachment::map(pool, bytes, is_writable, lender)
                .map_err(|error| StoreError::Memory(Arc::new(error)))?
        };
        let tiers = welcome.tiers.iter().map(|tier| intern(tier)).collect();
        Ok(Self { session, attachment, tiers, welcome })
    }
}

fn hello(identity: &Identity, session: Option<SessionId>) -> Call {
    Call::Hello(Hello {
        version_min: VERSION_MIN,
        version_max: VERSION,
        access: identity.access,
        session,
        token: identity.token.clone(),
        name: identity.name.clone(),
    })
}

impl Session {
    /// A session over one connection, without a node.
    #[cfg(test)]
    pub(crate) fn over(
        stream: std::os::unix::net::UnixStream,
        epoch: u64,
        tasks: &Arc<BackgroundTasks>,
    ) -> Self {
        let identity = Identity {
            socket: PathBuf::from("/nonexistent"),
            access: Access::Write,
            token: None,
            name: String::new(),
            devices: None,
        };
        let welcome = Welcome {
            version: VERSION,
            epoch,
            session: SessionId::default(),
            pool_bytes: 0,
            hold_bytes_max: 0,
            timeout_ms: 0,
            writes_through: false,
            tiers: Vec::new(),
            tenant: "of-a-test".to_owned(),
            node_version: String::new(),
            device: None,
        };
        Self::new(&identity, Connection::over(stream), &welcome, tasks)
    }

    fn new(
        identity: &Identity,
        connection: Connection,
        welcome: &Welcome,
        tasks: &Arc<BackgroundTasks>,
    ) -> Self {
        Self {
            id: welcome.session,
            epoch: welcome.epoch,
            identity: identity.clone(),
            connections: Mutex::new(ConnectionPool {
                idle: vec![connection],
                open: 1,
                retired: Vec::new(),
            }),
            connection_returned: Condvar::new(),
            next_hold: AtomicU64::new(1),
            last_used_ms: AtomicU64::new(0),
            releases: Mutex::default(),
            tasks: Arc::clone(tasks),
            process: process_mark(),
            registration: Some(LiveSession::register(&welcome.tenant, welcome.epoch)),
        }
    }

    fn connections(&self) -> MutexGuard<'_, ConnectionPool> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn releases(&self) -> MutexGuard<'_, Vec<HoldRange>> {
        self.releases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Numbers for `count` new holds. A number is never used twice.
    pub(crate) fn allocate_holds(&self, count: usize) -> u64 {
        // Relaxed: the numbers only have to differ.
        self.next_hold.fetch_add(count as u64, Ordering::Relaxed)
    }

    /// Whether this process is a forked child of the one that opened the session. It shares the
    /// sockets: if both used them, each could read the other's answers. The holds are the parent's.
    pub(crate) fn is_forked(&self) -> bool {
        process_mark() != self.process
    }

    /// Sends a call with pending releases ahead of it, and waits for its answer.
    pub(crate) fn call(&self, call: &Call, deadline: Deadline) -> Result<Answer, CallError> {
        let mut connection = self.acquire_connection(deadline)?;
        // Taken only with a connection: until then another call can carry them.
        let ahead = self.take_releases();
        let answer = connection.call(ahead.as_slice(), call, deadline);
        self.requeue_unsent(ahead, answer.is_err());
        self.finish_call(connection, answer)
    }

    /// Sends a call as [`Self::call`] does. The caller does other work before
    /// [`CallInFlight::end`].
    pub(crate) fn begin_call(
        self: &Arc<Self>,
        call: &Call,
        deadline: Deadline,
    ) -> Result<CallInFlight, CallError> {
        let mut connection = self.acquire_connection(deadline)?;
        let ahead = self.take_releases();
        match connection.begin_call(ahead.as_slice(), call, deadline) {
            Ok(sent_bytes) => {
                let (session, connection) = (Arc::clone(self), Some(connection));
                Ok(CallInFlight { session, connection, ahead, sent_bytes })
            }
            Err(error) => {
                self.requeue_unsent(ahead, true);
                self.finish_call(connection, Err(error))
            }
        }
    }

    /// Sends pending releases, unless a call has carried them along.
    pub(crate) fn send_releases(&self, deadline: Deadline) -> Result<(), CallError> {
        if self.releases().is_empty() { Ok(()) } else { self.send(Vec::new(), deadline) }
    }

    /// Sends pending releases and calls that have no answer.
    pub(crate) fn send(&self, calls: Vec<Call>, deadline: Deadline) -> Result<(), CallError> {
        let mut connection = self.acquire_connection(deadline)?;
        let ahead = self.take_releases();
        let all: Vec<Call> = ahead.iter().cloned().chain(calls).collect();
        let sent = connection.send(&all, deadline);
        self.requeue_unsent(ahead, sent.is_err());
        self.finish_call(connection, sent)
    }

    /// Queues the releases of a failed call again, since they may not have arrived. Hold numbers
    /// are never reused, so releasing one twice is harmless.
    fn requeue_unsent(&self, ahead: Option<Call>, has_failed: bool) {
        if let (Some(Call::Release { holds }), true) = (ahead, has_failed) {
            for range in holds {
                self.queue_release(range);
            }
        }
    }

    /// Whether the node has closed a connection of this session that was idle. A busy session is
    /// not checked: that saves a system call, and its next call detects a closed connection.
    pub(crate) fn is_closed_by_node(&self) -> bool {
        let now = SystemClock.monotonic();
        let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        // Relaxed: a heuristic that decides only whether to poll.
        let was_idle =
            now.saturating_sub(self.last_used_ms.load(Ordering::Relaxed)) >= IDLE_CHECK_MS;
        // The last idle connection is the one that the next call takes.
        if was_idle && self.connections().idle.last().is_some_and(Connection::is_closed) {
            // The time stays as it is, so that calls of other threads check too.
            return true;
        }
        self.last_used_ms.store(now, Ordering::Relaxed);
        false
    }

    /// Tries whether the node still has this session: on an idle connection, then on a new one.
    pub(crate) fn reconnect(&self, deadline: Deadline) -> Result<(), CallError> {
        // The lock is not held during the call, for which other calls would wait.
        let idle = self.connections().idle.pop();
        if let Some(mut connection) = idle {
            let answer = connection.call(&[], &Call::Ping, deadline);
            if self.finish_call(connection, answer).is_ok() {
                return Ok(());
            }
        }
        let connection = self.open_connection(deadline)?;
        let mut connections = self.connections();
        connections.close_retired();
        connections.open += 1;
        connections.idle.push(connection);
        drop(connections);
        self.connection_returned.notify_one();
        Ok(())
    }

    fn finish_call<T>(
        &self,
        connection: Connection,
        result: Result<T, ConnectionError>,
    ) -> Result<T, CallError> {
        let mut connections = self.connections();
        let result = match result {
            Ok(answer) => {
                connections.idle.push(connection);
                Ok(answer)
            }
            // Nothing was sent, so the connection can be used again. Closing it would make the node
            // assume that its previous answer was not received, and release what that granted.
            Err(ConnectionError::NotSent) => {
                connections.idle.push(connection);
                Err(CallError::NoFreeConnection)
            }
            Err(ConnectionError::SendBlocked) => {
                connections.idle.push(connection);
                Err(CallError::Timeout)
            }
            Err(ConnectionError::TooLong(reason)) => {
                connections.idle.push(connection);
                Err(CallError::TooLong(reason))
            }
            Err(ConnectionError::Timeout) => {
                connections.open -= 1;
                // Shutting it down makes the node release what the call granted. With no other
                // connection open that could end the session, and with it the holds of other calls.
                if connections.open > 0 {
                    connection.shutdown();
                } else {
                    connections.retired.push(connection);
                }
                Err(CallError::Timeout)
            }
            Err(ConnectionError::Broken(reason)) => {
                connections.open -= 1;
                Err(CallError::Broken(reason))
            }
        };
        let is_last = connections.open == 0;
        drop(connections);
        // No connection will be returned any more: every waiting call has to open one or fail.
        if is_last {
            self.connection_returned.notify_all();
        } else {
            self.connection_returned.notify_one();
        }
        result
    }

    /// An idle connection, or a new one if all are busy. If the node refuses a further connection,
    /// the call waits for one of the open ones.
    fn acquire_connection(&self, deadline: Deadline) -> Result<Connection, CallError> {
        let mut refusal = None;
        let mut connections = self.connections();
        loop {
            if let Some(connection) = connections.idle.pop() {
                return Ok(connection);
            }
            if refusal.is_none() && connections.open < CONNECTIONS_MAX {
                // Counted before the lock is released, so that concurrent calls keep to the limit.
                connections.open += 1;
                drop(connections);
                let joined = self.open_connection(deadline);
                connections = self.connections();
                match joined {
                    Ok(connection) => {
                        connections.close_retired();
                        return Ok(connection);
                    }
                    Err(error) => refusal = Some(error),
                }
                // The place is free again, so the calls that wait for one can try.
                connections.open -= 1;
                self.connection_returned.notify_all();
                continue;
            }
            let left = deadline.remaining(&SystemClock);
            match refusal {
                // Without an open connection none will be returned, so waiting is of no use. After
                // a time-out no time is left.
                Some(error) if connections.open == 0 || matches!(error, CallError::Timeout) => {
                    return Err(error);
                }
                _ if left.is_zero() => return Err(CallError::NoFreeConnection),
                _ => {}
            }
            let waited = self.connection_returned.wait_timeout(connections, left);
            connections = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn open_connection(&self, deadline: Deadline) -> Result<Connection, CallError> {
        let failed = |error| match error {
            ConnectionError::Timeout | ConnectionError::NotSent | ConnectionError::SendBlocked => {
                CallError::Timeout
            }
            ConnectionError::TooLong(reason) => CallError::TooLong(reason),
            ConnectionError::Broken(reason) => CallError::Broken(reason),
        };
        let mut connection =
            Connection::connect(&self.identity.socket, deadline).map_err(failed)?;
        let hello = hello(&self.identity, Some(self.id));
        match connection.handshake(&hello, deadline).map_err(failed)?.0 {
            // Another run of the node does not know the holds of this session.
            Answer::Welcome(welcome) if welcome.epoch == self.epoch => Ok(connection),
            Answer::Welcome(_) => Err(CallError::Broken("the node was restarted".to_owned())),
            Answer::Refused { reason } => Err(CallError::Broken(reason)),
            other => {
                Err(CallError::Broken(format!("the node answered the handshake with {other:?}")))
            }
        }
    }

    fn take_releases(&self) -> Option<Call> {
        let mut releases = self.releases();
        // At most `BLOCKS_MAX` ranges go ahead of a call. The newest go first, which needs no copy
        // of the others.
        let kept = releases.len().saturating_sub(BLOCKS_MAX);
        let holds = releases.split_off(kept);
        drop(releases);
        if kept > 0 {
            // The background thread is woken when the queue becomes non-empty. It is not empty now,
            // so the rest needs a wake-up of its own.
            self.tasks.schedule_release();
        }
        (!holds.is_empty()).then_some(Call::Release { holds })
    }

    /// Releases holds that a failed call requested: the node may have granted them.
    pub(crate) fn release_range(&self, first: u64, count: usize) {
        let count = u32::try_from(count).expect("batches are small");
        self.queue_release(HoldRange { first, count });
    }

    fn queue_release(&self, range: HoldRange) {
        let mut releases = self.releases();
        match releases.last_mut() {
            // Views are mostly dropped in order: one range covers all of them.
            Some(last) if is_adjacent(*last, range) => last.count += range.count,
            Some(_) => releases.push(range),
            None => {
                releases.push(range);
                drop(releases);
                self.tasks.schedule_release();
            }
        }
    }
}

/// A call that was sent, and whose answer is not read yet.
#[derive(Debug)]
pub(crate) struct CallInFlight {
    session: Arc<Session>,
    /// `None` only once the call has ended.
    connection: Option<Connection>,
    ahead: Option<Call>,
    sent_bytes: usize,
}

impl CallInFlight {
    /// Waits for the answer.
    pub(crate) fn end(mut self, deadline: Deadline) -> Result<Answer, CallError> {
        let mut connection = self.connection.take().expect("only this ends the call");
        let answer = connection.end_call(self.sent_bytes, deadline);
        self.session.requeue_unsent(self.ahead.take(), answer.is_err());
        self.session.finish_call(connection, answer)
    }
}

impl Drop for CallInFlight {
    /// After a panic of the caller: the answer may still arrive, so that the connection cannot be
    /// used again.
    fn drop(&mut self) {
        if let Some(connection) = self.connection.take() {
            self.session.requeue_unsent(self.ahead.take(), true);
            // The error is that of the call, which has no caller any more.
            drop(self.session.finish_call::<()>(connection, Err(ConnectionError::Timeout)));
        }
    }
}

/// Whether `next` continues `last`, and the message format can hold both as one range.
fn is_adjacent(last: HoldRange, next: HoldRange) -> bool {
    // Ascending order only: a range that is dropped in reverse order is queued hold by hold.
    let is_next = last.first + u64::from(last.count) == next.first;
    is_next && (last.count as usize).saturating_add(next.count as usize) <= KEYS_MAX
}

impl Lender for Session {
    fn release_hold(&self, hold: u64) {
        // The holds are the parent's: a release by the child would free memory that the parent
        // still uses.
        if self.is_forked() {
            return;
        }
        self.queue_release(HoldRange { first: hold, count: 1 });
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.is_forked() {
            // Another thread may have held the lock when the process was forked.
            let _never_dropped = std::mem::ManuallyDrop::new(self.registration.take());
            return;
        }
        // A session with holds outlives its connections, so the last holds are released here. If
        // that fails, the node releases them when the process ends.
        let deadline = Deadline::after(&SystemClock, CLOSE_TIMEOUT);
        while !self.releases().is_empty() {
            if self.send(Vec::new(), deadline).is_err() {
                break;
            }
        }
        // Before the notification: the background thread counts the remaining sessions.
        drop(self.registration.take());
        self.tasks.session_ended(self.epoch);
    }
}

/// How long the end of a session may wait until its releases are sent.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(200);

/// The shortest timeout of a call.
pub(crate) const CALL_TIMEOUT_MIN: Duration = Duration::from_millis(1);
