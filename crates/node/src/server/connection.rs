//! One connection: reads frames, answers calls, writes answers. It never blocks on the client.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cascade_memory::{Region, SharedDeviceMemory};
use cascade_runtime::{Clock, SystemClock};
use cascade_store::Process;
use cascade_wire::{
    Access, Answer, Call, Frame, FrameHeader, Hello, HoldRange, TraceContext, UNREAD_CALL, VERSION,
    VERSION_MIN, Welcome, WireError, frame_length,
};
use rustix::event::epoll::EventFlags;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::buffered_bytes::BufferedBytes;
use super::call_summary::CallSummary;
use super::dispatch::Dispatch;
use super::peer::Peer;
use super::refusals::{NO_DESCRIPTORS, is_exhausted};
use super::session::ClientSession;
use super::{Shared, descriptors, lock};
use crate::status::NodeState;
use crate::telemetry;

/// Maximum bytes of one read, and the capacity that a thread keeps for answers.
const THREAD_BUFFER_BYTES: usize = 64 << 10;

/// The buffers of a thread. It lends them to the connection that it serves, so that an idle
/// connection needs none.
#[derive(Debug)]
pub(super) struct ThreadBuffers {
    input: Vec<u8>,
    output: Vec<u8>,
}

impl ThreadBuffers {
    pub(super) fn new() -> Self {
        Self { input: vec![0; THREAD_BUFFER_BYTES], output: Vec::new() }
    }
}

/// Maximum length of a client's name, in characters.
const NAME_CHARS_MAX: usize = 128;
/// Maximum length of the first message, which an unauthenticated client sends.
const HELLO_BYTES_MAX: usize = 64 << 10;
/// Back-pressure: with more bytes of unread answers, no further call of the client is answered.
const OUTPUT_BYTES_MAX: usize = 1 << 20;
/// Consecutive reads on one connection before other connections are served; enough for a message of
/// maximum length.
const READS_MAX: usize = 160;

/// The next event to wait for on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NextStep {
    Read,
    Write,
    Close,
}

/// A client's socket with its input and output buffers.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) id: u64,
    stream: UnixStream,
    peer: Peer,
    opened: Duration,
    buffers: Mutex<ConnectionBuffers>,
    session: Mutex<Option<Arc<ClientSession>>>,
    /// The session no longer counts this connection.
    has_left: AtomicBool,
    /// The holds that the last call may have granted, until further input proves that the client
    /// read its answer.
    unconfirmed_grant: Mutex<Option<HoldRange>>,
    /// The buffered bytes of this connection as counted in `buffered_of_all`.
    buffered: AtomicUsize,
    buffered_of_all: Arc<BufferedBytes>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        let buffered = *self.buffered.get_mut();
        if buffered > 0 {
            self.buffered_of_all.update(self.peer.process, buffered, 0);
        }
    }
}

#[derive(Debug, Default)]
struct ConnectionBuffers {
    /// The beginning of an incomplete frame, or whole frames if `has_more`.
    input: Vec<u8>,
    /// Answers that the client has not read yet.
    output: Vec<u8>,
    /// Bytes of `output` that are written.
    written: usize,
    /// The input has whole frames that wait until the client reads its answers.
    has_more: bool,
}

/// Why a connection is closed.
enum CloseReason {
    /// The client closed it, or its process exited.
    Disconnected,
    /// The client violated the protocol.
    Protocol(WireError),
}

impl From<WireError> for CloseReason {
    fn from(error: WireError) -> Self {
        Self::Protocol(error)
    }
}

impl From<io::Error> for CloseReason {
    fn from(_: io::Error) -> Self {
        Self::Disconnected
    }
}

impl Connection {
    pub(super) fn new(
        id: u64,
        stream: UnixStream,
        peer: Peer,
        buffered_of_all: &Arc<BufferedBytes>,
    ) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self {
            id,
            stream,
            peer,
            opened: SystemClock.monotonic(),
            buffers: Mutex::default(),
            session: Mutex::default(),
            has_left: AtomicBool::new(false),
            unconfirmed_grant: Mutex::default(),
            buffered: AtomicUsize::new(0),
            buffered_of_all: Arc::clone(buffered_of_all),
        })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    pub(super) fn session(&self) -> Option<Arc<ClientSession>> {
        lock(&self.session).as_ref().map(Arc::clone)
    }

    /// The session, for the thread that removes this closed connection from it. None for a second
    /// thread, and without a session.
    pub(super) fn session_to_leave(&self) -> Option<Arc<ClientSession>> {
        // The flag is set only if there is a session: a connection that is closed before its hello
        // opens one leaves it afterwards.
        self.session().filter(|_| !self.has_left.swap(true, Ordering::AcqRel))
    }

    pub(super) fn age(&self) -> Duration {
        SystemClock.monotonic().saturating_sub(self.opened)
    }

    /// The holds of the last call, if no further message has followed it. The client may not have
    /// read the answer, so the caller releases them when the client closes the connection.
    pub(super) fn take_unconfirmed_grant(&self) -> Option<HoldRange> {
        lock(&self.unconfirmed_grant).take()
    }

    /// Keeps the holds of the last call. Used when the node closes the connection: the client can
    /// still read the answer.
    pub(super) fn confirm_grant(&self) {
        *lock(&self.unconfirmed_grant) = None;
    }

    pub(super) fn peer(&self) -> Peer {
        self.peer
    }

    pub(super) fn shut(&self) {
        if let Err(error) = self.stream.shutdown(std::net::Shutdown::Both) {
            tracing::trace!(%error, "the client already closed its connection");
        }
    }

    /// Answers the calls that have arrived, until the connection has to wait.
    pub(super) fn serve(
        &self,
        shared: &Shared,
        flags: EventFlags,
        thread: &mut ThreadBuffers,
    ) -> NextStep {
        // A hang-up is not checked here: the input may still have calls that the client sent before
        // it closed, such as releases. The read after them returns 0.
        if flags.intersects(EventFlags::ERR) {
            return NextStep::Close;
        }
        // Not contended: a connection is armed for one event at a time, so one thread serves it.
        let mut buffers = lock(&self.buffers);
        let ThreadBuffers { input, output } = thread;
        // Answers go into the thread's buffer; it stays here only if the client does not read all.
        if buffers.output.is_empty() {
            std::mem::swap(&mut buffers.output, output);
        }
        let next = self.read_and_answer(shared, &mut buffers, input);
        if buffers.output.is_empty() {
            std::mem::swap(&mut buffers.output, output);
            output.shrink_to(THREAD_BUFFER_BYTES);
        }
        let buffered = buffers.input.len() + buffers.output.len();
        let Peer { process, user, .. } = self.peer;
        match next {
            Ok(_) if self.exceeds_buffer_limit(buffered) => {
                tracing::warn!(
                    process,
                    user,
                    buffered,
                    "closing a connection: its process exceeds the limit of buffered bytes"
                );
                NextStep::Close
            }
            Ok(next) => next,
            Err(CloseReason::Disconnected) => NextStep::Close,
            Err(CloseReason::Protocol(error)) => {
                shared.refusals.log((process, user), &format!("protocol violation: {error}"));
                NextStep::Close
            }
        }
    }

    fn read_and_answer(
        &self,
        shared: &Shared,
        buffers: &mut ConnectionBuffers,
        thread_input: &mut [u8],
    ) -> Result<NextStep, CloseReason> {
        // Back-pressure: while the client does not read its answers, none of its calls is read.
        if !self.flush(buffers)? {
            return Ok(NextStep::Write);
        }
        for _ in 0..READS_MAX {
            // Whole frames wait in the input since the output was full: no read is needed first.
            if std::mem::take(&mut buffers.has_more) {
                self.process_input(shared, buffers, &[])?;
                if !self.flush(buffers)? {
                    return Ok(NextStep::Write);
                }
                continue;
            }
            let count = match (&self.stream).read(thread_input) {
                Ok(0) => return Err(CloseReason::Disconnected),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(NextStep::Read);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error.into()),
            };
            // A client sends the next message only after it read the last answer.
            *lock(&self.unconfirmed_grant) = None;
            let is_whole = self.process_input(shared, buffers, &thread_input[..count])?;
            if !self.flush(buffers)? {
                return Ok(NextStep::Write);
            }
            // After a full read of a long message, more of it has probably arrived: read again.
            if !buffers.has_more && (is_whole || count < thread_input.len()) {
                return Ok(NextStep::Read);
            }
        }
        // Other connections are served first. Frames that wait in the input need no further byte,
        // so this connection waits to be writable, which it is.
        Ok(if buffers.has_more { NextStep::Write } else { NextStep::Read })
    }

    /// Updates the count of buffered bytes. True if the process exceeds its limit.
    fn exceeds_buffer_limit(&self, buffered: usize) -> bool {
        // Relaxed: only one thread at a time serves a connection.
        // The new count stays even if it exceeds the limit: `drop` subtracts it from the totals.
        let before = self.buffered.swap(buffered, Ordering::Relaxed);
        // Most calls buffer nothing, and skip the lock.
        let is_same = before == buffered;
        // A connection with up to one read of input is kept even if its process is over the limit.
        !is_same
            && !self.buffered_of_all.update(self.peer.process, before, buffered)
            && buffered > THREAD_BUFFER_BYTES
    }

    /// Answers every whole frame of the input. True if no input is left.
    fn process_input(
        &self,
        shared: &Shared,
        buffers: &mut ConnectionBuffers,
        bytes: &[u8],
    ) -> Result<bool, CloseReason> {
        if buffers.input.is_empty() {
            // The usual case: only an incomplete frame is copied.
            let used = self.answer_frames(shared, buffers, bytes)?;
            buffers.input.extend_from_slice(&bytes[used..]);
        } else {
            buffers.input.extend_from_slice(bytes);
            let input = std::mem::take(&mut buffers.input);
            let used = self.answer_frames(shared, buffers, &input)?;
            if used < input.len() {
                buffers.input = input;
                buffers.input.drain(..used);
            }
        }
        Ok(buffers.input.is_empty())
    }

    /// Answers the whole frames in `bytes`. Returns the number of bytes used.
    fn answer_frames(
        &self,
        shared: &Shared,
        buffers: &mut ConnectionBuffers,
        bytes: &[u8],
    ) -> Result<usize, CloseReason> {
        let mut used = 0;
        while let Some(length) = frame_length(&bytes[used..])? {
            // Checked when only the header is there: before its hello is accepted, a client cannot
            // make the node buffer a message of maximum length.
            if length > HELLO_BYTES_MAX && lock(&self.session).is_none() {
                return Err(WireError::Field("first message").into());
            }
            let Some(frame) = bytes.get(used..used + length) else { break };
            // Checked between calls, so the output exceeds the limit by one answer at most.
            if buffers.output.len() > OUTPUT_BYTES_MAX {
                buffers.has_more = true;
                break;
            }
            let frame = Frame::read(frame)?;
            let call = Call::read(&frame)?;
            // Set before the call is answered: a panic closes the connection, which releases them.
            *lock(&self.unconfirmed_grant) = grantable_holds(&call);
            self.answer(shared, &mut buffers.output, &frame.header, call, frame.trace)?;
            used += length;
            // A pipelined message follows: the client does not depend on this answer.
            if used < bytes.len() {
                *lock(&self.unconfirmed_grant) = None;
            }
        }
        Ok(used)
    }

    fn answer(
        &self,
        shared: &Shared,
        output: &mut Vec<u8>,
        header: &FrameHeader,
        call: Call,
        trace: Option<TraceContext>,
    ) -> Result<(), CloseReason> {
        let Some(session) = self.session() else {
            return self.handshake(shared, header.call, call);
        };
        // The time of the call includes the wait for a tier, but not the wait in the input.
        let began = SystemClock.monotonic();
        session.record_call(began);
        let summary = CallSummary::of(&call);
        let span = shared.node.is_tracing().then(|| {
            telemetry::request_span(summary.operation.name(), session.tenant.name(), trace)
        });
        let entered = span.as_ref().map(tracing::Span::enter);
        let dispatch =
            Dispatch { node: &shared.node, session: &session, wait_permits: &shared.wait_permits };
        let answer = dispatch.answer(call);
        let duration = SystemClock.monotonic().saturating_sub(began);
        let record = summary.answered(answer.as_ref(), duration);
        if let Some(span) = &span {
            span.record("blocks", record.blocks).record("hit_blocks", record.hit_blocks);
        }
        drop(entered);
        shared.node.traffic().record(&record);
        if let Some(answer) = answer {
            answer.write(output, header.call);
        }
        Ok(())
    }

    /// Answers the first message: identifies the client and opens or joins its session.
    fn handshake(&self, shared: &Shared, number: u32, call: Call) -> Result<(), CloseReason> {
        let Call::Hello(hello) = call else { return Err(WireError::Field("first message").into()) };
        let mut message = Vec::new();
        match self.open_session(shared, &hello) {
            Ok((session, is_new)) => {
                if !lock(&shared.connections).set_authenticated(self.id) {
                    // The connection was evicted while its hello was processed. Eviction does not
                    // end a session, so it ends here.
                    shared.leave_session(self);
                    return Err(CloseReason::Disconnected);
                }
                let store = session.tenant.store();
                Self::welcome(shared, &session).write(&mut message, number);
                // The socket is non-blocking, but the send buffer of a new connection has room for
                // the whole message.
                // An administrator gets no pool; a further connection of a session already has it.
                if session.access == Access::Administer {
                    (&self.stream).write_all(&message)?;
                } else if is_new {
                    let pool = descriptors::pool_for_client(store.region(), session.access)?;
                    descriptors::send(self.fd(), &message, pool.as_fd())?;
                    shared.watch_process(self, &session);
                } else {
                    (&self.stream).write_all(&message)?;
                }
                Ok(())
            }
            Err(reason) => {
                let Peer { process, user, .. } = self.peer;
                shared.refusals.log((process, user), &reason);
                shared.refusals.record(user);
                Answer::Refused { reason }.write(&mut message, number);
                (&self.stream).write_all(&message)?;
                Err(CloseReason::Disconnected)
            }
        }
    }

    fn welcome(shared: &Shared, session: &ClientSession) -> Answer {
        let store = session.tenant.store();
        let timeout = store.config().timeout.as_millis();
        let shared_device = store.region().device().and_then(|device| device.shared());
        Answer::Welcome(Welcome {
            version: VERSION,
            epoch: shared.node.epoch(),
            session: session.id,
            pool_bytes: match session.access {
                Access::Administer => 0,
                Access::Read | Access::Write => store.region().bytes() as u64,
            },
            hold_bytes_max: session.hold_bytes_max,
            timeout_ms: u64::try_from(timeout).unwrap_or(u64::MAX),
            writes_through: store.config().write == cascade_store::WritePolicy::Through,
            tiers: store.tier_names().iter().map(|name| (*name).to_owned()).collect(),
            tenant: session.tenant.name().to_owned(),
            node_version: env!("CARGO_PKG_VERSION").to_owned(),
            device: shared_device.map(SharedDeviceMemory::device),
        })
    }

    /// Opens a session, or joins that of an earlier connection. Returns whether it is new.
    fn open_session(
        &self,
        shared: &Shared,
        hello: &Hello,
    ) -> Result<(Arc<ClientSession>, bool), String> {
        if hello.version_min > VERSION || hello.version_max < VERSION_MIN {
            return Err(format!(
                "the client supports protocol versions {} to {}, this node {VERSION_MIN} to \
                 {VERSION}; upgrade the older of the two",
                hello.version_min, hello.version_max
            ));
        }
        if let Some(id) = &hello.session {
            // Also while the node drains: the slabs of an open session can still be sealed.
            let session = shared.node.sessions().join(id, self.peer);
            let session = session.ok_or("the client's session has ended; connect again")?;
            *lock(&self.session) = Some(Arc::clone(&session));
            return Ok((session, false));
        }
        let is_administrator = hello.access == Access::Administer;
        if shared.node.state() == NodeState::Draining && !is_administrator {
            return Err("the node is draining and accepts no new clients; retry later".to_owned());
        }
        let (tenants, token) = (shared.node.tenants(), hello.token.as_deref());
        let tenant = if is_administrator {
            tenants.identify_administrator(self.peer.user, self.peer.group, token)
        } else {
            tenants.identify(self.peer.user, token)
        };
        let tenant = tenant.map_err(|refusal| refusal.to_string())?;
        if !is_administrator {
            check_mappable(tenant.store().region(), hello.access)?;
        }
        let share = u64::from(shared.node.live_settings().client_share_percent);
        // An administrator gets no pool, so its share is empty.
        let share = if is_administrator { 0 } else { share };
        // Divided before it is multiplied: the product stays below the size of DRAM.
        let hold_bytes_max = tenant.store().memory_bytes() / 100 * share;
        let account = shared.accounts.of(tenant.name(), self.peer);
        let id = crate::node::random_bytes().map_err(|error| error.to_string())?;
        let name = hello.name.chars().filter(|c| !c.is_control()).take(NAME_CHARS_MAX).collect();
        // Process id 0 (another process namespace) has no pidfd. Such a session is not watched and
        // ends with its last connection.
        let process = Pid::from_raw(self.peer.process)
            .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        // The ledger of a pool that outlives the node names the process of each hold. Without a
        // visible process, the next run could not check whether the hold is still in use.
        let holder = match u32::try_from(self.peer.process).ok().map(Process::of) {
            Some(Ok(holder)) => Some(holder),
            Some(Err(error)) if is_exhausted(&error) => return Err(NO_DESCRIPTORS.to_owned()),
            Some(Err(_)) | None => None,
        };
        if holder.is_none() && !is_administrator && tenant.store().config().pool_file.is_some() {
            return Err("the node cannot see the client's process, which its persistent pool \
                        requires; share the process namespace, or set keep_pool to \"never\""
                .to_owned());
        }
        let (process, facts) = ((process, holder), (name, hello.access));
        let share = (account, hold_bytes_max);
        let session = Arc::new(ClientSession::new(id, tenant, self.peer, process, facts, share));
        // The session is in the list before the client learns its id, with which further
        // connections join.
        shared.node.sessions().add(&session);
        *lock(&self.session) = Some(Arc::clone(&session));
        Ok((session, true))
    }

    /// Writes as much output as the socket accepts. False if some is left.
    fn flush(&self, buffers: &mut ConnectionBuffers) -> Result<bool, CloseReason> {
        while buffers.written < buffers.output.len() {
            match (&self.stream).write(&buffers.output[buffers.written..]) {
                Ok(count) => buffers.written += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        // Only here the output gets empty. `serve` then returns the buffer to its thread.
        buffers.written = 0;
        buffers.output.clear();
        Ok(true)
    }
}

/// Sends the reason for closing a connection before its hello is read. The send buffer of a new
/// connection has room for the message; an error is ignored.
pub(super) fn refuse_before_hello(stream: &UnixStream, reason: &str) {
    let mut message = Vec::new();
    Answer::Refused { reason: reason.to_owned() }.write(&mut message, UNREAD_CALL);
    let sent = stream.set_nonblocking(true).and_then(|()| (&*stream).write(&message));
    if let Err(error) = sent {
        tracing::trace!(%error, "a refused client already closed its connection");
    }
}

/// Refuses clients that cannot map a pool in device memory.
fn check_mappable(pool: &Region, access: Access) -> Result<(), String> {
    let reason = match (pool.device().map(|device| device.shared().is_some()), access) {
        (Some(false), _) => "which clients cannot map; serve a pipeline that begins with Dram",
        (Some(true), Access::Read) => {
            "which clients can only map for reading and writing; connect with the access \"write\""
        }
        (Some(true) | None, _) => return Ok(()),
    };
    Err(format!("the blocks of this node are in device memory, {reason}"))
}

/// The holds that a call may grant.
fn grantable_holds(call: &Call) -> Option<HoldRange> {
    let (first, count) = match call {
        Call::Prepare { first_hold, blocks, .. } => (*first_hold, blocks.len()),
        Call::Reserve { hold, .. } => (*hold, 1),
        Call::Lease { first_hold, keys, .. } => (*first_hold, keys.len()),
        Call::Acquire { first_hold, request, .. } => (*first_hold, request.keys.len()),
        _ => return None,
    };
    Some(HoldRange { first, count: u32::try_from(count).ok()? })
}
