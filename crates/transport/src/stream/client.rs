//! The client's side of a connection: posts frames in the caller's thread; the threads that wait
//! for their batches receive the answers.

mod exchange;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use cascade_runtime::{Condvar, Deadline, LeafMutex, Mutex, MutexGuard, SystemClock};

use super::handshake;
use super::incoming::Incoming;
use super::outgoing::Outgoing;
use super::socket::{Patience, Socket};
use crate::connection::{Batch, Completion, Connection, Ticket};
use crate::limits::{
    FRAME_BYTES_MAX, FRAME_PIECES_MAX, FRAMES_IN_FLIGHT_MAX, NOTICE_BYTES_MAX, PIECE_BYTES_MAX,
};
use crate::peer::Peer;
use crate::piece::{Direction, Piece, Place, RegionId, plan};
use crate::region::Span;
use crate::regions::Snapshot;
use crate::state::EndpointState;
use crate::wire::{HEADER_BYTES, Header, Kind, write_entry};
use crate::{Refusal, TransportError};

/// How long a thread that cannot send waits for one more answer.
const ANSWER_WAIT: Duration = Duration::from_millis(5);
/// How often a cancelled batch looks whether the thread that receives has left its memory.
const LEAVE_WAIT: Duration = Duration::from_millis(50);

/// A connection over a stream socket.
#[derive(Debug)]
pub(crate) struct StreamConnection {
    link: Arc<Link>,
    endpoint: Arc<EndpointState>,
}

/// What posts, tickets and waiting threads share.
#[derive(Debug)]
pub(super) struct Link {
    socket: Socket,
    peer: Peer,
    stall: Duration,
    /// Held while a batch is sent, so that its frames follow each other.
    sender: Mutex<Sender>,
    state: Mutex<LinkState>,
    /// A frame was answered, the connection was lost, or no thread receives any more.
    changed: Condvar,
    /// Used by the one thread that receives.
    incoming: Mutex<Incoming>,
}

/// Buffers of the thread that sends.
#[derive(Debug, Default)]
struct Sender {
    frames: u64,
    planned: Vec<Piece>,
    spans: Vec<Span>,
    body: Vec<u8>,
    outgoing: Outgoing,
}

#[derive(Debug, Default)]
struct LinkState {
    /// Frames that wait for an answer, in the order in which they were sent.
    waiting: VecDeque<WaitingFrame>,
    /// The frame whose answer is being received.
    receiving: Option<Arc<Progress>>,
    has_receiver: bool,
    broken: Option<TransportError>,
}

#[derive(Debug)]
struct WaitingFrame {
    number: u64,
    progress: Arc<Progress>,
    expected: Expected,
}

/// The answer of success of a frame.
#[derive(Debug)]
struct Expected {
    kind: Kind,
    /// Where the bytes of a read go.
    targets: Vec<Span>,
    /// Keeps the memory of the targets.
    _regions: Option<Snapshot>,
}

/// How far a batch is.
#[derive(Debug, Default)]
struct Progress {
    frames_left: AtomicUsize,
    /// Arriving bytes are thrown away.
    is_cancelled: AtomicBool,
    failure: LeafMutex<Option<TransportError>>,
    descriptor: LeafMutex<Option<OwnedFd>>,
    /// The answer to a request for queue pairs: status and body.
    linked: LeafMutex<Option<(u8, Vec<u8>)>>,
}

impl Progress {
    fn has_ended(&self) -> bool {
        self.frames_left.load(Ordering::Acquire) == 0
    }

    fn fail(&self, error: TransportError) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }

    fn result(&self) -> Result<(), TransportError> {
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        failure.map_or(Ok(()), Err)
    }
}

impl StreamConnection {
    /// Makes the handshake over a connected socket.
    pub(crate) fn open(
        socket: Socket,
        endpoint: &Arc<EndpointState>,
        deadline: Deadline,
    ) -> Result<Self, TransportError> {
        let peer = handshake::as_client(&socket, endpoint, deadline)?;
        let link = Link {
            socket,
            peer,
            stall: endpoint.config.limits.stall_timeout,
            sender: Mutex::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
            incoming: Mutex::default(),
        };
        Ok(Self { link: Arc::new(link), endpoint: Arc::clone(endpoint) })
    }

    /// The regions of this process.
    pub(crate) fn regions(&self) -> Snapshot {
        self.endpoint.regions.snapshot()
    }

    /// Asks for the descriptor of a region. Only over a Unix socket.
    pub(crate) fn descriptor(
        &self,
        region: RegionId,
        deadline: Deadline,
    ) -> Result<OwnedFd, TransportError> {
        let progress = Arc::new(Progress::default());
        {
            let mut sender = self.link.lock_sender(deadline)?;
            let mut body = std::mem::take(&mut sender.body);
            body.clear();
            write_entry(Place { region, offset: 0 }, 0, &mut body);
            let header = Header { pieces: 1, ..Header::new(Kind::Map, 0).with_body(&body) };
            let expects = Expected { kind: Kind::Descriptor, targets: vec![], _regions: None };
            let sent = self.link.send_frame(
                &mut sender,
                header,
                (&body, &[]),
                Some(expects),
                (&progress, deadline),
            );
            sender.body = body;
            sent?;
        }
        self.link.drive(deadline, |_| progress.has_ended())?;
        progress.result()?;
        let descriptor = progress.descriptor.lock().unwrap_or_else(PoisonError::into_inner).take();
        let lost = || TransportError::lost(&self.link.peer.address, "it sent no descriptor");
        descriptor.ok_or_else(lost)
    }

    /// Whether the peer has closed the connection.
    pub(crate) fn is_closed_by_peer(&self) -> bool {
        self.link.socket.is_closed()
    }
}

impl Connection for StreamConnection {
    fn peer(&self) -> &Peer {
        &self.link.peer
    }

    fn post(&self, batch: &Batch<'_>, deadline: Deadline) -> Result<Ticket, TransportError> {
        let notice = batch.notice.unwrap_or_default();
        if notice.len() > NOTICE_BYTES_MAX {
            let (what, value) = ("a notice", notice.len());
            return Err(TransportError::TooLarge { what, value, limit: NOTICE_BYTES_MAX });
        }
        let regions = self.regions();
        let mut sender = self.link.lock_sender(deadline)?;
        let sender = &mut *sender;
        plan(batch.pieces, PIECE_BYTES_MAX, &mut sender.planned);
        sender.look_up(&regions)?;
        let progress = Arc::new(Progress::default());
        let mut planned = std::mem::take(&mut sender.planned);
        let posted = self.link.post(sender, &planned, batch, (&regions, &progress, deadline));
        planned.clear();
        sender.planned = planned;
        posted?;
        let ticket = StreamTicket { link: Arc::clone(&self.link), progress };
        Ok(Ticket::pending(ticket))
    }

    fn is_open(&self) -> bool {
        self.link.lock_state().broken.is_none() && !self.link.socket.is_closed()
    }

    fn close(&self) {
        let error = TransportError::lost(&self.link.peer.address, "it was closed here");
        self.link.end(&mut self.link.lock_state(), &error);
    }
}

impl Drop for StreamConnection {
    fn drop(&mut self) {
        self.close();
    }
}

impl Sender {
    /// Looks up the local memory of the planned pieces, into `spans`.
    fn look_up(&mut self, regions: &Snapshot) -> Result<(), TransportError> {
        self.spans.clear();
        for (index, piece) in self.planned.iter().enumerate() {
            let region = piece.local.region;
            let span = regions
                .local(piece.local, piece.bytes)
                .map_err(|refusal| TransportError::Local { piece: index, region, refusal })?;
            self.spans.push(span);
        }
        Ok(())
    }
}

impl Link {
    fn lock_state(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_sender(&self, deadline: Deadline) -> Result<MutexGuard<'_, Sender>, TransportError> {
        let late = TransportError::Deadline { what: "waiting for other batches" };
        let locked = self.sender.lock_until(deadline, &SystemClock).ok_or(late)?;
        Ok(locked.unwrap_or_else(PoisonError::into_inner))
    }

    /// Sends the frames of a batch.
    fn post(
        &self,
        sender: &mut Sender,
        planned: &[Piece],
        batch: &Batch<'_>,
        (regions, progress, deadline): (&Snapshot, &Arc<Progress>, Deadline),
    ) -> Result<(), TransportError> {
        let spans = std::mem::take(&mut sender.spans);
        let mut body = std::mem::take(&mut sender.body);
        let mut at = 0;
        let is_write = batch.direction == Direction::Write;
        let sent = loop {
            let end = at + frame_of(&planned[at..]);
            let is_last = end == planned.len();
            body.clear();
            for piece in &planned[at..end] {
                write_entry(piece.remote, piece.bytes, &mut body);
            }
            if is_last {
                body.extend_from_slice(batch.notice.unwrap_or_default());
            }
            let kind = if is_write { Kind::Write } else { Kind::Read };
            let bytes = planned[at..end].iter().map(|piece| piece.bytes).sum();
            let pieces = u32::try_from(end - at).expect("at most FRAME_PIECES_MAX");
            let header = Header {
                status: u8::from(is_write && !is_last),
                pieces,
                payload_bytes: if is_write { bytes } else { 0 },
                ..Header::new(kind, 0).with_body(&body)
            };
            let expected = if is_write {
                is_last.then(|| Expected { kind: Kind::Done, targets: vec![], _regions: None })
            } else {
                let targets = spans[at..end].to_vec();
                Some(Expected { kind: Kind::Data, targets, _regions: Some(regions.clone()) })
            };
            let sent = self.wait_for_room(deadline).and_then(|()| {
                let payload = if is_write { &spans[at..end] } else { &[] };
                self.send_frame(sender, header, (&body, payload), expected, (progress, deadline))
            });
            if sent.is_err() && at > 0 {
                // The peer waits for the rest of the batch.
                let error = TransportError::lost(&self.peer.address, "a batch was cut");
                self.end(&mut self.lock_state(), &error);
            }
            at = end;
            if is_last || sent.is_err() {
                break sent;
            }
        };
        (sender.spans, sender.body) = (spans, body);
        sent
    }

    /// Waits until the connection may have one more frame without an answer.
    fn wait_for_room(&self, deadline: Deadline) -> Result<(), TransportError> {
        self.drive(deadline, |state| {
            state.waiting.len() < FRAMES_IN_FLIGHT_MAX || state.broken.is_some()
        })
    }

    /// Sends one frame. If it is answered, `expected` says with what.
    fn send_frame(
        &self,
        sender: &mut Sender,
        header: Header,
        (body, payload): (&[u8], &[Span]),
        expected: Option<Expected>,
        (progress, deadline): (&Arc<Progress>, Deadline),
    ) -> Result<(), TransportError> {
        sender.frames += 1;
        let header = Header { frame: sender.frames, ..header };
        {
            let mut state = self.lock_state();
            if let Some(error) = &state.broken {
                return Err(error.clone());
            }
            if let Some(expected) = expected {
                progress.frames_left.fetch_add(1, Ordering::AcqRel);
                let progress = Arc::clone(progress);
                state.waiting.push_back(WaitingFrame { number: header.frame, progress, expected });
            }
        }
        let patience = Patience { deadline: Some(deadline), stall: self.stall };
        let mut receive = || self.receive_what_came();
        let sending: (_, &mut dyn FnMut() -> bool) = (patience, &mut receive);
        let sent = sender.outgoing.send(&self.socket, &header, body, payload, sending);
        if let Err(error) = &sent {
            // The peer has a part of the frame.
            let reason = format!("a frame was cut: {error}");
            let lost = TransportError::lost(&self.peer.address, reason);
            self.end(&mut self.lock_state(), &lost);
        }
        sent
    }

    /// Ends the connection: all frames that wait for an answer fail. The one whose answer is being
    /// received ends when its thread has left its memory.
    fn end(&self, state: &mut LinkState, error: &TransportError) {
        state.broken.get_or_insert_with(|| error.clone());
        for frame in state.waiting.drain(..) {
            frame.progress.fail(error.clone());
            frame.progress.frames_left.fetch_sub(1, Ordering::AcqRel);
        }
        self.socket.shutdown();
        self.changed.notify_all();
    }

    /// Receives answers, or waits for the thread that does, until the condition holds.
    fn drive(
        &self,
        deadline: Deadline,
        is_done: impl Fn(&LinkState) -> bool,
    ) -> Result<(), TransportError> {
        let mut state = self.lock_state();
        loop {
            if is_done(&state) {
                return Ok(());
            }
            let left = deadline.remaining(&SystemClock);
            if left.is_zero() {
                return Err(TransportError::Deadline { what: "a batch" });
            }
            if state.has_receiver {
                let waited = self.changed.wait_timeout(state, left);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            if let Some(error) = &state.broken {
                return Err(error.clone());
            }
            state = self.receive_with(state, deadline);
        }
    }

    /// Receives one answer, if one arrives by the deadline. No other thread receives now.
    fn receive_with<'a>(
        &'a self,
        mut state: MutexGuard<'a, LinkState>,
        deadline: Deadline,
    ) -> MutexGuard<'a, LinkState> {
        state.has_receiver = true;
        drop(state);
        let received = self.receive_one(deadline);
        let mut state = self.lock_state();
        state.has_receiver = false;
        if let Err(error) = received {
            self.end(&mut state, &error);
        }
        self.changed.notify_all();
        state
    }

    /// Receives the answers that have come, for a thread that sends: the peer takes no more frames
    /// while its answers are not received. False if none had come.
    fn receive_what_came(&self) -> bool {
        let mut state = self.lock_state();
        let mut has_received = false;
        while !state.has_receiver && !state.waiting.is_empty() {
            let waiting = state.waiting.len();
            state = self.receive_with(state, Deadline::after(&SystemClock, ANSWER_WAIT));
            if state.waiting.len() == waiting {
                break;
            }
            has_received = true;
        }
        has_received
    }

    /// Receives one answer, if one arrives by the deadline. Only one thread calls this at a time.
    fn receive_one(&self, deadline: Deadline) -> Result<(), TransportError> {
        if !self.socket.wait_readable(deadline)? {
            return Ok(());
        }
        let lost = |reason: &str| TransportError::lost(&self.peer.address, reason);
        let mut bytes = [0; HEADER_BYTES];
        let patience = Patience::of_frame(self.stall, 0);
        let descriptor = self.socket.receive_with_descriptor(&mut bytes, patience);
        let descriptor = descriptor.map_err(|error| self.too_slow(error))?;
        let header = Header::parse(&bytes).map_err(|error| lost(&error.to_string()))?;
        let frame = {
            let mut state = self.lock_state();
            let frame = state.waiting.pop_front();
            let frame = frame.ok_or_else(|| lost("it answered what nobody asked"))?;
            state.receiving = Some(Arc::clone(&frame.progress));
            frame
        };
        let answered = if frame.number == header.frame {
            let taken = self.take_answer(&header, &frame, descriptor);
            taken.map_err(|error| self.too_slow(error))
        } else {
            Err(lost("its answers are in the wrong order"))
        };
        if let Err(error) = &answered {
            frame.progress.fail(error.clone());
        }
        // The targets are not accessed after this.
        let mut state = self.lock_state();
        state.receiving = None;
        frame.progress.frames_left.fetch_sub(1, Ordering::AcqRel);
        answered
    }

    /// An answer that takes too long ends the connection: the next one could not be found.
    fn too_slow(&self, error: TransportError) -> TransportError {
        match error {
            TransportError::Deadline { .. } => {
                TransportError::lost(&self.peer.address, "an answer came too slowly")
            }
            other => other,
        }
    }

    /// Takes the answer of a frame. An error ends the connection; a refusal only the batch.
    fn take_answer(
        &self,
        header: &Header,
        frame: &WaitingFrame,
        descriptor: Option<OwnedFd>,
    ) -> Result<(), TransportError> {
        let lost = |reason: &str| TransportError::lost(&self.peer.address, reason);
        let (progress, expected) = (&frame.progress, &frame.expected);
        if header.kind == Kind::Done && header.status != 0 {
            let refusal = Refusal::of_code(header.status);
            let refusal = refusal.ok_or_else(|| lost("it refused with an unknown code"))?;
            progress.fail(self.refused(header.piece, refusal));
            return Ok(());
        }
        if header.kind != expected.kind {
            return Err(lost("its answer does not belong to the frame"));
        }
        if header.kind == Kind::Descriptor {
            *progress.descriptor.lock().unwrap_or_else(PoisonError::into_inner) = descriptor;
        }
        if header.kind == Kind::Linked {
            self.take_linked(header, progress)?;
        }
        if header.kind == Kind::Data {
            let bytes: usize = expected.targets.iter().map(|target| target.bytes()).sum();
            let is_whole = header.pieces as usize == expected.targets.len()
                && header.payload_bytes == bytes as u64;
            if !is_whole {
                return Err(lost("it sent other bytes than were asked for"));
            }
            let patience = Patience::of_frame(self.stall, header.payload_bytes);
            let mut incoming = self.incoming.lock().unwrap_or_else(PoisonError::into_inner);
            if progress.is_cancelled.load(Ordering::Acquire) {
                return incoming.discard(&self.socket, header, patience);
            }
            let damaged = incoming.payload(&self.socket, &expected.targets, patience)?;
            if let Some(piece) = damaged {
                progress.fail(self.refused(piece, Refusal::Damaged));
            }
        }
        Ok(())
    }

    fn refused(&self, piece: u32, refusal: Refusal) -> TransportError {
        TransportError::Refused { peer: self.peer.address.clone(), piece, refusal }
    }
}

/// How many of the pieces the next frame takes.
fn frame_of(pieces: &[Piece]) -> usize {
    let mut bytes = 0;
    let fits = |piece: &&Piece| {
        bytes += piece.bytes;
        bytes <= FRAME_BYTES_MAX
    };
    pieces.iter().take(FRAME_PIECES_MAX).take_while(fits).count()
}

/// A batch of this connection.
#[derive(Debug)]
struct StreamTicket {
    link: Arc<Link>,
    progress: Arc<Progress>,
}

impl Completion for StreamTicket {
    fn wait(&mut self, deadline: Deadline) -> Result<(), TransportError> {
        self.link.drive(deadline, |_| self.progress.has_ended())?;
        self.progress.result()
    }

    fn cancel(&mut self, deadline: Deadline) {
        {
            // Under the lock, so that the thread that receives either sees it or is seen here.
            let state = self.link.lock_state();
            let accesses = |frame: &WaitingFrame| {
                Arc::ptr_eq(&frame.progress, &self.progress) && !frame.expected.targets.is_empty()
            };
            self.progress.is_cancelled.store(true, Ordering::Release);
            let is_ours = |it: &Arc<Progress>| Arc::ptr_eq(it, &self.progress);
            let is_receiving = state.receiving.as_ref().is_some_and(is_ours);
            // The kernel has all bytes of a write already.
            if !is_receiving && !state.waiting.iter().any(accesses) {
                return;
            }
        }
        if self.link.drive(deadline, |_| self.progress.has_ended()).is_err() {
            let reason = "a cancelled read was not answered in time";
            let error = TransportError::lost(&self.link.peer.address, reason);
            self.link.end(&mut self.link.lock_state(), &error);
        }
        let mut state = self.link.lock_state();
        let is_ours = |it: &Arc<Progress>| Arc::ptr_eq(it, &self.progress);
        // The connection has ended, so the thread that receives leaves at once.
        while state.receiving.as_ref().is_some_and(is_ours) {
            let waited = self.link.changed.wait_timeout(state, LEAVE_WAIT);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
