//! One connection: bytes in, frames, answers, bytes out; never waiting for the client.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cascade_block::{Clock, SystemClock};
use cascade_store::Process;
use cascade_wire::{
    Access, Answer, Call, Frame, Header, Hello, HoldRange, TraceContext, UNREAD, VERSION,
    VERSION_MIN, Welcome, WireError, frame_length,
};
use rustix::event::epoll::EventFlags;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::dispatch::Dispatch;
use super::figures::Asked;
use super::session::{Peer, Session};
use super::waiting::Waiting;
use super::{Shared, descriptors, lock};
use crate::status::NodeState;
use crate::telemetry;

/// What a thread reads at a time, and what it keeps for its next answers.
const SCRATCH_BYTES: usize = 64 << 10;

/// A thread's buffers: connections that rest have none.
#[derive(Debug)]
pub(super) struct Scratch {
    input: Vec<u8>,
    output: Vec<u8>,
}

impl Scratch {
    pub(super) fn new() -> Self {
        Self { input: vec![0; SCRATCH_BYTES], output: Vec::new() }
    }
}
/// Longest name of a client, in characters.
const NAME_MAX: usize = 128;
/// Longest first message: nobody has said yet who it is.
const HELLO_BYTES_MAX: usize = 64 << 10;
/// Answers that may wait for a client to take them before its next call is looked at.
const OUTPUT_BYTES_MAX: usize = 1 << 20;
/// Reads in a row on one connection before the others have their turn: one longest message.
const READS_MAX: usize = 160;

/// What a connection waits for next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    Read,
    Write,
    Close,
}

/// A client's socket and what was read or is still to be written.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) id: u64,
    stream: UnixStream,
    peer: Peer,
    since: Duration,
    state: Mutex<State>,
    session: Mutex<Option<Arc<Session>>>,
    /// What the last call may have granted, until a byte of another shows that its answer came.
    granted: Mutex<Option<HoldRange>>,
    /// Bytes that wait in the input and output, as they count in the sum of all connections.
    waiting: AtomicUsize,
    waiting_of_all: Arc<Waiting>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        let waiting = *self.waiting.get_mut();
        if waiting > 0 {
            self.waiting_of_all.change(self.peer.process, waiting, 0);
        }
    }
}

#[derive(Debug, Default)]
struct State {
    /// The beginning of a frame that is not here as a whole.
    input: Vec<u8>,
    /// Answers that the client has not taken yet.
    output: Vec<u8>,
    written: usize,
    /// Whole messages are in the input: the client was to take its answers first.
    has_more: bool,
}

/// Why a connection ends.
enum End {
    /// The client closed it, or is gone.
    Gone,
    /// It does not keep to the protocol.
    Wire(WireError),
}

impl From<WireError> for End {
    fn from(error: WireError) -> Self {
        Self::Wire(error)
    }
}

impl From<io::Error> for End {
    fn from(_: io::Error) -> Self {
        Self::Gone
    }
}

impl Connection {
    pub(super) fn new(
        id: u64,
        stream: UnixStream,
        peer: Peer,
        waiting_of_all: &Arc<Waiting>,
    ) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        let session = Mutex::default();
        let since = SystemClock.monotonic();
        Ok(Self {
            id,
            stream,
            peer,
            since,
            state: Mutex::default(),
            session,
            granted: Mutex::default(),
            waiting: AtomicUsize::new(0),
            waiting_of_all: Arc::clone(waiting_of_all),
        })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    pub(super) fn session(&self) -> Option<Arc<Session>> {
        lock(&self.session).as_ref().map(Arc::clone)
    }

    pub(super) fn age(&self) -> Duration {
        SystemClock.monotonic().saturating_sub(self.since)
    }

    /// What its last call granted and nobody will use, now that it is closed: had the client read
    /// the answer, another message would have followed, or the session would end.
    pub(super) fn take_unseen(&self) -> Option<HoldRange> {
        lock(&self.granted).take()
    }

    /// What its last call granted stays so: the node closes it, and the client may read the answer.
    pub(super) fn keep_unseen(&self) {
        *lock(&self.granted) = None;
    }

    pub(super) fn peer(&self) -> Peer {
        self.peer
    }

    pub(super) fn shut(&self) {
        if let Err(error) = self.stream.shutdown(std::net::Shutdown::Both) {
            tracing::trace!(%error, "the connection was closed at the other end");
        }
    }

    /// Does what can be done now.
    pub(super) fn serve(&self, shared: &Shared, flags: EventFlags, scratch: &mut Scratch) -> Next {
        if flags.intersects(EventFlags::ERR) {
            return Next::Close;
        }
        let mut state = lock(&self.state);
        let Scratch { input, output } = scratch;
        if state.output.is_empty() {
            std::mem::swap(&mut state.output, output);
        }
        let turn = self.turn(shared, &mut state, input);
        if state.output.is_empty() {
            std::mem::swap(&mut state.output, output);
            output.shrink_to(SCRATCH_BYTES);
        }
        let waiting = state.input.len() + state.output.len();
        match turn {
            Ok(_) if self.is_too_much(waiting) => {
                let Peer { process, user, .. } = self.peer;
                tracing::warn!(process, user, waiting, "a connection is closed: too much waits");
                Next::Close
            }
            Ok(next) => next,
            Err(End::Gone) => Next::Close,
            Err(End::Wire(error)) => {
                let Peer { process, user, .. } = self.peer;
                shared.refusals.log((process, user), &format!("no such protocol: {error}"));
                Next::Close
            }
        }
    }

    fn turn(&self, shared: &Shared, state: &mut State, scratch: &mut [u8]) -> Result<Next, End> {
        if !self.flush(state)? {
            return Ok(Next::Write);
        }
        for _ in 0..READS_MAX {
            if std::mem::take(&mut state.has_more) {
                self.take(shared, state, &[])?;
                if !self.flush(state)? {
                    return Ok(Next::Write);
                }
                continue;
            }
            let count = match (&self.stream).read(scratch) {
                Ok(0) => return Err(End::Gone),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Next::Read),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error.into()),
            };
            // A byte of a further message: the last answer came, and what it granted is in use.
            *lock(&self.granted) = None;
            let is_whole = self.take(shared, state, &scratch[..count])?;
            if !self.flush(state)? {
                return Ok(Next::Write);
            }
            // More of a long message is there already, most likely.
            if !state.has_more && (is_whole || count < scratch.len()) {
                return Ok(Next::Read);
            }
        }
        // The others have their turn; what is left here needs no further byte to go on.
        Ok(if state.has_more { Next::Write } else { Next::Read })
    }

    /// Notes what waits here. True if that is more than its process may have.
    fn is_too_much(&self, waiting: usize) -> bool {
        // Relaxed: one thread at a time is here.
        let before = self.waiting.swap(waiting, Ordering::Relaxed);
        // Most calls leave nothing, and need no lock for that.
        let is_same = before == waiting;
        !is_same
            && !self.waiting_of_all.change(self.peer.process, before, waiting)
            && waiting > SCRATCH_BYTES
    }

    /// Answers every whole frame of what came. True if nothing is left over.
    fn take(&self, shared: &Shared, state: &mut State, bytes: &[u8]) -> Result<bool, End> {
        if state.input.is_empty() {
            let used = self.answer_all(shared, state, bytes)?;
            state.input.extend_from_slice(&bytes[used..]);
        } else {
            state.input.extend_from_slice(bytes);
            let input = std::mem::take(&mut state.input);
            let used = self.answer_all(shared, state, &input)?;
            if used < input.len() {
                state.input = input;
                state.input.drain(..used);
            }
        }
        Ok(state.input.is_empty())
    }

    fn answer_all(&self, shared: &Shared, state: &mut State, bytes: &[u8]) -> Result<usize, End> {
        let mut used = 0;
        while let Some(length) = frame_length(&bytes[used..])? {
            if length > HELLO_BYTES_MAX && lock(&self.session).is_none() {
                return Err(WireError::Field("first message").into());
            }
            let Some(frame) = bytes.get(used..used + length) else { break };
            if state.output.len() > OUTPUT_BYTES_MAX {
                state.has_more = true;
                break;
            }
            let frame = Frame::read(frame)?;
            let call = Call::read(&frame)?;
            *lock(&self.granted) = granted(&call);
            self.answer(shared, &mut state.output, &frame.header, call, frame.trace)?;
            used += length;
            if used < bytes.len() {
                *lock(&self.granted) = None;
            }
        }
        Ok(used)
    }

    fn answer(
        &self,
        shared: &Shared,
        output: &mut Vec<u8>,
        header: &Header,
        call: Call,
        trace: Option<TraceContext>,
    ) -> Result<(), End> {
        let Some(session) = self.session() else {
            return self.greet(shared, header.call, call);
        };
        let began = SystemClock.monotonic();
        session.note_call(began);
        let asked = Asked::of(&call);
        let span = shared
            .node
            .is_tracing()
            .then(|| telemetry::request_span(asked.operation.name(), session.tenant.name(), trace));
        let entered = span.as_ref().map(tracing::Span::enter);
        let dispatch = Dispatch { node: &shared.node, session: &session, waiters: &shared.waiters };
        let answer = dispatch.answer(call);
        let took = SystemClock.monotonic().saturating_sub(began);
        let answered = asked.answered(answer.as_ref(), took);
        if let Some(span) = &span {
            span.record("blocks", answered.blocks).record("hit_blocks", answered.hit_blocks);
        }
        drop(entered);
        shared.node.traffic().record(&answered);
        if let Some(answer) = answer {
            answer.write(output, header.call);
        }
        Ok(())
    }

    /// The first message: who is it, and what may it do?
    fn greet(&self, shared: &Shared, number: u32, call: Call) -> Result<(), End> {
        let Call::Hello(hello) = call else { return Err(WireError::Field("first message").into()) };
        let mut message = Vec::new();
        match self.admit(shared, &hello) {
            Ok((session, is_new)) => {
                if !lock(&shared.connections).note_authenticated(self.id) {
                    // Closed to make room while its hello was read: nobody else ends its session.
                    shared.leave(self);
                    return Err(End::Gone);
                }
                let store = session.tenant.store();
                Self::welcome(shared, &session).write(&mut message, number);
                let file = store.region().file();
                if session.access == Access::Administer {
                    (&self.stream).write_all(&message)?;
                } else if is_new {
                    let pool = descriptors::for_client(file, session.access)?;
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
                shared.refusals.note(user);
                Answer::Refused { reason }.write(&mut message, number);
                (&self.stream).write_all(&message)?;
                Err(End::Gone)
            }
        }
    }

    fn welcome(shared: &Shared, session: &Session) -> Answer {
        let store = session.tenant.store();
        let timeout = store.config().timeout.as_millis();
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
        })
    }

    /// The session of a client, new or joined.
    fn admit(&self, shared: &Shared, hello: &Hello) -> Result<(Arc<Session>, bool), String> {
        if hello.version_min > VERSION || hello.version_max < VERSION_MIN {
            return Err(format!(
                "it speaks versions {} to {} of the protocol, this node {VERSION_MIN} to \
                 {VERSION}; upgrade the older of the two",
                hello.version_min, hello.version_max
            ));
        }
        if let Some(id) = &hello.session {
            let session = shared.node.sessions().find(id, self.peer);
            let session = session.ok_or("its session is over; connect anew")?;
            *lock(&self.session) = Some(Arc::clone(&session));
            return Ok((session, false));
        }
        let is_administrator = hello.access == Access::Administer;
        if shared.node.state() == NodeState::Draining && !is_administrator {
            return Err("it is draining: it takes no new clients".to_owned());
        }
        let (tenants, token) = (shared.node.tenants(), hello.token.as_deref());
        let tenant = if is_administrator {
            tenants.identify_administrator(self.peer.user, self.peer.group, token)
        } else {
            tenants.identify(self.peer.user, token)
        };
        let tenant = tenant.map_err(|refusal| refusal.to_string())?;
        let share = u64::from(shared.node.live().client_share_percent);
        let share = if is_administrator { 0 } else { share };
        let hold_bytes_max = tenant.store().region().bytes() as u64 / 100 * share;
        let account = shared.accounts.of(tenant.name(), self.peer);
        let id = crate::node::random().map_err(|error| error.to_string())?;
        let name = hello.name.chars().filter(|c| !c.is_control()).take(NAME_MAX).collect();
        let process = Pid::from_raw(self.peer.process)
            .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        let holder = u32::try_from(self.peer.process).ok().and_then(|pid| Process::of(pid).ok());
        if holder.is_none() && !is_administrator && tenant.store().config().pool_file.is_some() {
            return Err(
                "this node cannot see the client's process, and its pool outlives the node: \
                        share the process namespace, or set keep_pool to \"never\""
                    .to_owned(),
            );
        }
        let (process, facts) = ((process, holder), (name, hello.access));
        let share = (account, hold_bytes_max);
        let session = Arc::new(Session::new(id, tenant, self.peer, process, facts, share));
        shared.node.sessions().add(&session);
        *lock(&self.session) = Some(Arc::clone(&session));
        Ok((session, true))
    }

    /// Writes what the client takes. False if it does not take all now.
    fn flush(&self, state: &mut State) -> Result<bool, End> {
        while state.written < state.output.len() {
            match (&self.stream).write(&state.output[state.written..]) {
                Ok(count) => state.written += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        state.written = 0;
        state.output.clear();
        Ok(true)
    }
}

/// Says why a connection is closed before anything of it was read. Who does not listen learns
/// nothing; a fresh connection has room for it.
pub(super) fn refuse_unread(stream: &UnixStream, reason: &str) {
    let mut message = Vec::new();
    Answer::Refused { reason: reason.to_owned() }.write(&mut message, UNREAD);
    let sent = stream.set_nonblocking(true).and_then(|()| (&*stream).write(&message));
    if let Err(error) = sent {
        tracing::trace!(%error, "a client that is refused is gone");
    }
}

/// What a call may grant.
fn granted(call: &Call) -> Option<HoldRange> {
    let (first, count) = match call {
        Call::Prepare { first_hold, blocks, .. } => (*first_hold, blocks.len()),
        Call::Reserve { hold, .. } => (*hold, 1),
        Call::Lease { first_hold, keys, .. } => (*first_hold, keys.len()),
        Call::Acquire { first_hold, request, .. } => (*first_hold, request.keys.len()),
        _ => return None,
    };
    Some(HoldRange { first, count: u32::try_from(count).ok()? })
}
