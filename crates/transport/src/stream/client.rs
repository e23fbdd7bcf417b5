//! The client's side of a connection: posts frames in the caller's thread; the threads that wait
//! for their batches receive the answers.

mod ask;
mod exchange;
mod heartbeat;
mod reception;
mod rest;
mod standing;
mod ticket;
mod until;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use cascade_runtime::{
    Condvar, Deadline, LeafMutex, Mutex, MutexGuard, Plant, SystemClock, is_planted,
};

use self::heartbeat::Pause;
use self::reception::Reception;
pub(crate) use self::standing::Standing;
use self::ticket::StreamTicket;
pub(crate) use self::until::Until;
use super::handshake;
use super::outgoing::Outgoing;
use super::socket::{Patience, Socket};
use crate::TransportError;
use crate::connection::{Batch, Connection, Ticket, TransportKind};
use crate::generations::Number;
use crate::limits::{
    FRAME_BYTES_MAX, FRAME_PIECES_MAX, FRAMES_IN_FLIGHT_MAX, NOTICE_BYTES_MAX, PIECE_BYTES_MAX,
};
use crate::peer::Peer;
use crate::piece::{Direction, Piece, Place, RegionId, plan};
use crate::question::{Answer, AskLimit};
use crate::region::Span;
use crate::regions::Snapshot;
use crate::state::EndpointState;
use crate::wire::{Header, Kind, write_entry};

/// How long a thread that cannot send waits for more of an answer.
const ANSWER_WAIT: Duration = Duration::from_millis(5);
/// How often a cancelled batch looks whether the thread that receives has left its memory.
const LEAVE_WAIT: Duration = Duration::from_millis(50);
/// How late the planted bug of a deadline is.
const LATE: Duration = Duration::from_secs(600);

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
    number: Number,
    stall: Duration,
    /// Held while a batch is sent, so that its frames follow each other.
    sender: Mutex<Sender>,
    state: Mutex<LinkState>,
    /// A frame was answered, the connection was lost, or no thread receives any more.
    changed: Condvar,
    /// Of the thread with the heartbeats.
    pause: Arc<Pause>,
}

/// Buffers of the thread that sends.
#[derive(Debug, Default)]
struct Sender {
    frames: u64,
    planned: Vec<Piece>,
    spans: Vec<Span>,
    body: Vec<u8>,
    outgoing: Outgoing,
    /// A thread sends the rest of a frame whose caller has gone.
    has_rest_thread: bool,
    /// The last frame of a write that was begun has not been sent.
    is_in_write: bool,
}

#[derive(Debug)]
struct LinkState {
    /// Frames that wait for an answer, in the order in which they were sent.
    waiting: VecDeque<WaitingFrame>,
    /// The answer that is being received; `None` while a thread receives.
    reception: Option<Box<Reception>>,
    /// The batch into whose memory a thread receives.
    receiving: Option<Arc<Progress>>,
    /// Writes and notices of which anything may have been sent, and that are not answered.
    unknown: usize,
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
    /// Ends a write, or tells of a notice.
    ends_unknown: bool,
    /// Where the bytes of a read go; nowhere once it was cancelled.
    targets: Vec<Span>,
    /// Keeps the memory of the targets.
    regions: Option<Snapshot>,
    /// Pieces of a read.
    pieces: u32,
    /// Bytes of a read.
    bytes: u64,
}

impl Expected {
    /// An answer without bytes of regions.
    fn of_kind(kind: Kind) -> Self {
        let ends_unknown = kind == Kind::Done;
        Self { kind, ends_unknown, targets: vec![], regions: None, pieces: 0, bytes: 0 }
    }
}

/// How far a batch is.
#[derive(Debug, Default)]
struct Progress {
    frames_left: AtomicUsize,
    /// Arriving bytes are thrown away.
    is_cancelled: AtomicBool,
    failure: LeafMutex<Option<TransportError>>,
    descriptor: LeafMutex<Option<OwnedFd>>,
    /// The body of an answer that has one, with its status.
    body: LeafMutex<Option<(u8, Vec<u8>)>>,
}

impl LinkState {
    /// Takes the answer that is being received, for a thread that receives.
    fn take_reception(&mut self) -> Option<Box<Reception>> {
        let mut reception = self.reception.take()?;
        self.receiving = reception.frame_mut().map(|frame| Arc::clone(&frame.progress));
        Some(reception)
    }

    /// Whether an answer has to come, or the rest of one that no thread receives.
    fn expects_answers(&self) -> bool {
        let has_begun = self.reception.as_ref().is_some_and(|reception| reception.has_frame());
        has_begun || !self.waiting.is_empty()
    }

    /// Leaves the memory of a batch, of those frames into which no thread receives. What is
    /// returned must be dropped without the lock.
    fn leave_memory(&mut self, progress: &Arc<Progress>) -> Vec<Snapshot> {
        let begun = self.reception.as_mut().and_then(|reception| reception.frame_mut());
        let frames = self.waiting.iter_mut().chain(begun);
        let ours = frames.filter(|frame| Arc::ptr_eq(&frame.progress, progress));
        ours.filter_map(WaitingFrame::leave_memory).collect()
    }
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
        let (peer, number) = handshake::as_client(&socket, endpoint, deadline)?;
        let link = Link {
            socket,
            peer,
            number,
            stall: endpoint.config.limits.stall_timeout,
            sender: Mutex::default(),
            state: Mutex::new(LinkState {
                waiting: VecDeque::new(),
                reception: Some(Box::default()),
                receiving: None,
                unknown: 0,
                broken: None,
            }),
            changed: Condvar::new(),
            pause: Arc::default(),
        };
        let link = Arc::new(link);
        if let Some(heartbeat) = endpoint.config.limits.heartbeat {
            heartbeat::start(&link, heartbeat)?;
        }
        Ok(Self { link, endpoint: Arc::clone(endpoint) })
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
            let until = Until::deadline(deadline);
            let mut sender = self.link.lock_sender(until)?;
            let mut body = std::mem::take(&mut sender.body);
            body.clear();
            write_entry(Place { region, offset: 0 }, 0, &mut body);
            let header = Header { pieces: 1, ..Header::new(Kind::Map, 0).with_body(&body) };
            let expects = Expected::of_kind(Kind::Descriptor);
            let sent = self.link.send_frame(
                &mut sender,
                header,
                (&body, &[]),
                Some(expects),
                (&progress, until),
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

    /// As `post`, until the deadline or the flag.
    pub(crate) fn post_until(
        &self,
        batch: &Batch<'_>,
        until: Until<'_>,
    ) -> Result<Ticket, TransportError> {
        let notice = batch.notice.unwrap_or_default();
        if notice.len() > NOTICE_BYTES_MAX {
            let (what, value) = ("a notice", notice.len());
            return Err(TransportError::TooLarge { what, value, limit: NOTICE_BYTES_MAX });
        }
        let regions = self.regions();
        let mut sender = self.link.lock_sender(until)?;
        let sender = &mut *sender;
        plan(batch.pieces, PIECE_BYTES_MAX, &mut sender.planned);
        sender.look_up(&regions)?;
        let progress = Arc::new(Progress::default());
        let mut planned = std::mem::take(&mut sender.planned);
        let posted = self.link.post(sender, &planned, batch, (&regions, &progress, until));
        planned.clear();
        sender.planned = planned;
        posted?;
        let ticket = StreamTicket { link: Arc::clone(&self.link), progress };
        Ok(Ticket::pending(ticket))
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

    fn transport(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn post(&self, batch: &Batch<'_>, deadline: Deadline) -> Result<Ticket, TransportError> {
        self.post_until(batch, Until::deadline(deadline))
    }

    fn ask(
        &self,
        question: &[u8],
        targets: &mut [&mut [u8]],
        limit: AskLimit<'_>,
    ) -> Result<Answer, TransportError> {
        self.ask_peer(question, targets, limit)
    }

    fn is_open(&self) -> bool {
        self.link.lock_state().broken.is_none() && !self.link.socket.is_closed()
    }

    fn close(&self) {
        let error = TransportError::lost(&self.link.peer.address, "it was closed here");
        self.link.end(&error);
    }
}

impl Drop for StreamConnection {
    fn drop(&mut self) {
        self.close();
    }
}

impl Sender {
    /// Whether a frame begins a write, or has the notice of a read.
    fn begins_unknown(&mut self, header: &Header) -> bool {
        if header.kind == Kind::Write {
            return !std::mem::replace(&mut self.is_in_write, header.status != 0);
        }
        header.kind == Kind::Read && header.notice_bytes() > 0
    }

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

    /// The sender, after the rest of earlier frames was sent.
    fn lock_sender(&self, until: Until<'_>) -> Result<MutexGuard<'_, Sender>, TransportError> {
        let locked = until.wait(|deadline| {
            let late = TransportError::Deadline { what: "waiting for other batches" };
            self.sender.lock_until(deadline, &SystemClock).ok_or(late)
        });
        let mut sender = locked?.unwrap_or_else(PoisonError::into_inner);
        let patience = Patience::until(until.deadline, self.stall).or_when(until.flag);
        self.send_rest(&mut sender, patience)?;
        Ok(sender)
    }

    /// Sends the frames of a batch.
    fn post(
        self: &Arc<Self>,
        sender: &mut Sender,
        planned: &[Piece],
        batch: &Batch<'_>,
        (regions, progress, until): (&Snapshot, &Arc<Progress>, Until<'_>),
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
                status: u8::from(!is_last),
                pieces,
                payload_bytes: if is_write { bytes } else { 0 },
                ..Header::new(kind, 0).with_body(&body)
            };
            let expected = if is_write {
                is_last.then(|| Expected::of_kind(Kind::Done))
            } else {
                let targets = spans[at..end].to_vec();
                let regions = Some(regions.clone());
                let ends_unknown = header.notice_bytes() > 0;
                Some(Expected { kind: Kind::Data, ends_unknown, targets, regions, pieces, bytes })
            };
            let sent = self.wait_for_room(until).and_then(|()| {
                let payload = if is_write { &spans[at..end] } else { &[] };
                self.send_frame(sender, header, (&body, payload), expected, (progress, until))
            });
            // Only a deadline leaves the connection open: in this frame, or before it.
            let is_whole = is_last && sender.outgoing.rest_bytes() > 0;
            let has_begun = at > 0 || sender.outgoing.rest_bytes() > 0;
            if sent.is_err() && has_begun && !is_whole {
                // The peer waits for the last frame of the batch.
                self.end_batch(sender, kind, progress);
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
    fn wait_for_room(&self, until: Until<'_>) -> Result<(), TransportError> {
        let has_room = |state: &LinkState| {
            state.waiting.len() < FRAMES_IN_FLIGHT_MAX || state.broken.is_some()
        };
        until.wait(|deadline| self.drive(deadline, has_room))
    }

    /// Sends one frame. If it is answered, `expected` says with what.
    ///
    /// After a deadline the rest of the frame follows, and its answer is thrown away.
    fn send_frame(
        self: &Arc<Self>,
        sender: &mut Sender,
        header: Header,
        (body, payload): (&[u8], &[Span]),
        expected: Option<Expected>,
        (progress, until): (&Arc<Progress>, Until<'_>),
    ) -> Result<(), TransportError> {
        sender.frames += 1;
        let header = Header { frame: sender.frames, ..header };
        {
            let mut state = self.lock_state();
            if let Some(error) = &state.broken {
                return Err(error.clone());
            }
            state.unknown += usize::from(sender.begins_unknown(&header));
            if let Some(expected) = expected {
                progress.frames_left.fetch_add(1, Ordering::AcqRel);
                let progress = Arc::clone(progress);
                state.waiting.push_back(WaitingFrame { number: header.frame, progress, expected });
            }
        }
        let mut patience = Patience::until(until.deadline, self.stall).or_when(until.flag);
        let mut receive = || self.receive_what_came(until.deadline);
        let sending: (_, &mut dyn FnMut() -> bool) = (&mut patience, &mut receive);
        let sent = sender.outgoing.send(&self.socket, &header, body, payload, sending);
        match sent {
            Err(error @ TransportError::Deadline { .. }) => {
                self.leave(progress);
                self.send_rest_later(sender);
                Err(error)
            }
            sent => sent.map_err(|error| self.end(&error)),
        }
    }

    /// Ends the connection: all frames that wait for an answer fail. The one whose answer a thread
    /// receives ends when that thread has left its memory. Returns why it ended: the first reason.
    fn end(&self, error: &TransportError) -> TransportError {
        let (ended, reason) = {
            let mut state = self.lock_state();
            let reason = state.broken.get_or_insert_with(|| error.clone()).clone();
            let mut ended = std::mem::take(&mut state.waiting);
            let begun = state.reception.as_mut().and_then(|reception| reception.give_up());
            ended.extend(begun);
            (ended, reason)
        };
        self.number.give_up();
        self.pause.end();
        for frame in &ended {
            frame.progress.fail(error.clone());
            frame.progress.frames_left.fetch_sub(1, Ordering::AcqRel);
        }
        self.socket.shutdown();
        // Under the lock, so that a thread that has just seen an unfinished batch is woken.
        drop(self.lock_state());
        self.changed.notify_all();
        // Without the lock: the owner of a region may be dropped here, whose code is not ours.
        drop(ended);
        reason
    }

    /// Receives answers, or waits for the thread that does, until the condition holds.
    fn drive(
        &self,
        deadline: Deadline,
        is_done: impl Fn(&LinkState) -> bool,
    ) -> Result<(), TransportError> {
        let deadline = if is_planted(Plant::LateDeadline) {
            Deadline::at(deadline.time() + LATE)
        } else {
            deadline
        };
        let mut state = self.lock_state();
        let mut has_looked = false;
        loop {
            if is_done(&state) {
                return Ok(());
            }
            let left = deadline.remaining(&SystemClock);
            // What has come is received without a time, too: a caller may ask again and again.
            if left.is_zero() && (has_looked || state.reception.is_none()) {
                return Err(TransportError::Deadline { what: "a batch" });
            }
            if state.reception.is_some()
                && let Some(error) = &state.broken
            {
                return Err(error.clone());
            }
            let Some(reception) = state.take_reception() else {
                let waited = self.changed.wait_timeout(state, left);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            };
            has_looked = true;
            state = self.receive_with(state, reception, deadline).0;
        }
    }

    /// Receives at most one answer, until the deadline. No other thread receives meanwhile. Returns
    /// whether any bytes came.
    fn receive_with<'a>(
        &'a self,
        state: MutexGuard<'a, LinkState>,
        mut reception: Box<Reception>,
        deadline: Deadline,
    ) -> (MutexGuard<'a, LinkState>, bool) {
        drop(state);
        let received = self.receive(&mut reception, deadline);
        if let Err(error) = &received {
            self.end(error);
        }
        let mut state = self.lock_state();
        if let Some(error) = state.broken.clone()
            && let Some(frame) = reception.give_up()
        {
            // It ended when only this thread could take the frame.
            drop(state);
            self.finish(frame, Some(&error));
            state = self.lock_state();
        }
        state.receiving = None;
        state.reception = Some(reception);
        self.changed.notify_all();
        (state, matches!(received, Ok(true)))
    }

    /// Receives what has come of answers, for a thread that sends by a deadline: the peer takes no
    /// more frames while its answers are not received. False if nothing had come.
    fn receive_what_came(&self, deadline: Deadline) -> bool {
        let mut state = self.lock_state();
        let mut has_received = false;
        while state.expects_answers() && !deadline.has_passed(&SystemClock) {
            let Some(reception) = state.take_reception() else { break };
            let soon = Deadline::after(&SystemClock, ANSWER_WAIT);
            let (after, has_moved) = self.receive_with(state, reception, soon);
            state = after;
            if !has_moved {
                break;
            }
            has_received = true;
        }
        has_received
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
