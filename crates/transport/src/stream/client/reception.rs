//! The answer that is being received. Whoever waits for a batch receives until its deadline, and
//! leaves the rest of an answer, at any byte, to whoever waits next.

use std::os::fd::OwnedFd;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cascade_block::checksum;
use cascade_runtime::{Deadline, now};

use super::super::incoming::{Incoming, Whole};
use super::super::socket::{Patience, Pause};
use super::{Link, WaitingFrame};
use crate::region::Span;
use crate::regions::Snapshot;
use crate::wire::{HEADER_BYTES, Header, Kind, pieces_of, read_numbered};
use crate::{Refusal, TransportError};

/// The next answer of a connection, as far as it has come.
#[derive(Debug)]
pub(super) struct Reception {
    header: [u8; HEADER_BYTES],
    /// Bytes of the header that have come.
    filled: usize,
    descriptor: Option<OwnedFd>,
    answer: Option<Answer>,
    incoming: Incoming,
    /// Of the answer; `None` while none has begun.
    patience: Option<Patience<'static>>,
    /// When the latest thread stopped receiving it.
    paused: Duration,
}

/// An answer whose header has come, and its frame.
#[derive(Debug)]
struct Answer {
    frame: WaitingFrame,
    header: Header,
    body: Vec<u8>,
    /// Whether the body has come, if a payload follows it.
    has_body: bool,
}

impl Default for Reception {
    fn default() -> Self {
        Self {
            header: [0; HEADER_BYTES],
            filled: 0,
            descriptor: None,
            answer: None,
            incoming: Incoming::default(),
            patience: None,
            paused: Duration::ZERO,
        }
    }
}

impl Reception {
    /// Takes the frame whose answer has begun, because the connection has ended.
    pub(super) fn give_up(&mut self) -> Option<WaitingFrame> {
        self.answer.take().map(|answer| answer.frame)
    }

    /// Whether the header of an answer has come.
    pub(super) fn has_frame(&self) -> bool {
        self.answer.is_some()
    }

    /// The frame whose answer has begun.
    pub(super) fn frame_mut(&mut self) -> Option<&mut WaitingFrame> {
        self.answer.as_mut().map(|answer| &mut answer.frame)
    }
}

impl WaitingFrame {
    /// Uses its memory no more. What is returned must be dropped without a lock: the owner of a
    /// region may be dropped with it, whose code is not ours.
    pub(super) fn leave_memory(&mut self) -> Option<Snapshot> {
        self.expected.targets.clear();
        self.expected.regions.take()
    }

    fn is_cancelled(&self) -> bool {
        self.progress.is_cancelled.load(Ordering::Acquire)
    }

    pub(super) fn is_cancelled_write(&self) -> bool {
        self.expected.kind == Kind::Done && self.is_cancelled()
    }
}

impl Link {
    /// Receives at most one answer until the deadline, and in any case a part of what has come.
    /// Only the thread that has taken the reception calls this. Returns whether any bytes came.
    pub(super) fn receive(
        &self,
        reception: &mut Reception,
        deadline: Deadline,
    ) -> Result<bool, TransportError> {
        let mut patience = match reception.patience {
            Some(mut patience) => {
                patience.resume(reception.paused);
                patience
            }
            None if !self.socket.wait_readable(deadline)? => return Ok(false),
            None => Patience::of_frame(self.stall, 0),
        };
        let before = self.socket.received();
        let received = self.receive_rest(reception, (&mut patience, deadline));
        let has_moved = self.socket.received() > before;
        let ended = match received {
            Ok(false) => {
                let has_begun = reception.filled > 0;
                reception.patience = has_begun.then_some(patience);
                reception.paused = now();
                return Ok(has_moved);
            }
            Ok(true) => Ok(has_moved),
            Err(error) => Err(self.too_slow(error)),
        };
        (reception.filled, reception.descriptor, reception.patience) = (0, None, None);
        if let Some(Answer { frame, .. }) = reception.answer.take() {
            self.finish(frame, ended.as_ref().err());
        }
        ended
    }

    /// Receives the rest of an answer. False if it pauses before its end.
    fn receive_rest(
        &self,
        reception: &mut Reception,
        (patience, at): (&mut Patience<'_>, Deadline),
    ) -> Result<bool, TransportError> {
        if reception.answer.is_none() {
            let into = (&mut reception.filled, &mut reception.descriptor);
            let waits = (&mut *patience, Pause { at, flag: None });
            self.socket.receive_with_descriptor(&mut reception.header, into, waits)?;
            if reception.filled < HEADER_BYTES {
                return Ok(false);
            }
            self.begin_answer(reception, patience)?;
        }
        let Reception { answer, descriptor, incoming, .. } = reception;
        let Some(answer) = answer else { return Ok(false) };
        let waits = (patience, at);
        let is_whole = match answer.header.kind {
            Kind::Data => self.receive_payload(&mut answer.frame, incoming, waits)?,
            Kind::Linked => self.receive_body(&mut answer.body, incoming, waits)?,
            Kind::Answer => self.receive_answer(answer, incoming, waits)?,
            _ => true,
        };
        if is_whole {
            self.deliver(answer, descriptor.take())?;
        }
        Ok(is_whole)
    }

    /// The header has come: finds its frame, and prepares for what follows.
    fn begin_answer(
        &self,
        reception: &mut Reception,
        patience: &mut Patience<'_>,
    ) -> Result<(), TransportError> {
        let lost = |reason: &str| TransportError::lost(&self.peer.address, reason);
        let header = Header::parse(&reception.header).map_err(|error| lost(&error.to_string()))?;
        let frame = {
            let mut state = self.lock_state();
            let frame = state.waiting.pop_front();
            let frame = frame.ok_or_else(|| lost("it answered what nobody asked"))?;
            state.receiving = Some(frame.progress.clone());
            frame
        };
        let answer =
            reception.answer.insert(Answer { frame, header, body: vec![], has_body: false });
        let expected = &answer.frame.expected;
        if answer.frame.number != header.frame {
            return Err(lost("its answers are in the wrong order"));
        }
        let is_refused = header.kind == Kind::Done && header.status != 0;
        if !is_refused && header.kind != expected.kind {
            return Err(lost("its answer does not belong to the frame"));
        }
        match header.kind {
            Kind::Data => {
                if (header.pieces, header.payload_bytes) != (expected.pieces, expected.bytes) {
                    return Err(lost("it sent other bytes than were asked for"));
                }
                patience.add_bytes(header.payload_bytes);
                reception.incoming.begin(&header);
            }
            Kind::Linked | Kind::Answer => {
                patience.add_bytes(u64::from(header.body_bytes) + header.payload_bytes);
                answer.body.resize(header.body_bytes as usize, 0);
                let bytes = u64::from(header.body_bytes);
                reception.incoming.begin(&Header { pieces: 0, payload_bytes: bytes, ..header });
            }
            _ => {}
        }
        Ok(())
    }

    /// Receives the rest of the bytes of a read, or throws it away if the batch was cancelled.
    /// False if it pauses.
    fn receive_payload(
        &self,
        frame: &mut WaitingFrame,
        incoming: &mut Incoming,
        (patience, at): (&mut Patience<'_>, Deadline),
    ) -> Result<bool, TransportError> {
        if !frame.is_cancelled() {
            let flag = Some(&frame.progress.is_cancelled);
            let waits = (&mut *patience, Pause { at, flag });
            let targets = &frame.expected.targets;
            if let Some(Whole { damaged }) = incoming.payload(&self.socket, targets, waits)? {
                if let Some(piece) = damaged {
                    frame.progress.fail(self.refused(piece, Refusal::Damaged));
                }
                return Ok(true);
            }
            if !frame.is_cancelled() {
                return Ok(false);
            }
        }
        let left = frame.leave_memory();
        self.lock_state().receiving = None;
        self.changed.notify_all();
        drop(left);
        incoming.discard(&self.socket, (patience, Pause { at, flag: None }))
    }

    /// Receives the rest of the body of an answer. False if it pauses.
    fn receive_body(
        &self,
        body: &mut [u8],
        incoming: &mut Incoming,
        (patience, at): (&mut Patience<'_>, Deadline),
    ) -> Result<bool, TransportError> {
        let target = [Span::of_buffer(body)];
        let waits = (patience, Pause { at, flag: None });
        incoming.payload(&self.socket, &target, waits).map(|whole| whole.is_some())
    }

    /// Receives the rest of the answer to a question: its body, and then its blocks into their
    /// targets. False if it pauses.
    fn receive_answer(
        &self,
        answer: &mut Answer,
        incoming: &mut Incoming,
        (patience, at): (&mut Patience<'_>, Deadline),
    ) -> Result<bool, TransportError> {
        let Answer { frame, header, body, has_body } = answer;
        if !*has_body {
            if !self.receive_body(body, incoming, (&mut *patience, at))? {
                return Ok(false);
            }
            let targets = &mut frame.expected.targets;
            // Nothing is received into the memory of a caller that has gone.
            if !frame.progress.is_cancelled.load(Ordering::Acquire) {
                let planned = targets_of(header, body, targets);
                *targets =
                    planned.map_err(|reason| TransportError::lost(&self.peer.address, reason))?;
            }
            incoming.begin(header);
            *has_body = true;
        }
        self.receive_payload(frame, incoming, (patience, at))
    }

    /// An answer has come: hands over what it says.
    fn deliver(
        &self,
        answer: &mut Answer,
        descriptor: Option<OwnedFd>,
    ) -> Result<(), TransportError> {
        let lost = |reason: &str| TransportError::lost(&self.peer.address, reason);
        let Answer { frame, header, body, .. } = answer;
        let progress = &frame.progress;
        match header.kind {
            Kind::Done if header.status != 0 => {
                let refusal = Refusal::of_code(header.status);
                let refusal = refusal.ok_or_else(|| lost("it refused with an unknown code"))?;
                progress.fail(self.refused(header.piece, refusal));
            }
            Kind::Descriptor => {
                *progress.descriptor.lock().unwrap_or_else(PoisonError::into_inner) = descriptor;
            }
            Kind::Linked | Kind::Answer => {
                if checksum(body) != header.body_checksum {
                    return Err(lost("the checksum of a body does not match"));
                }
                let answer = (header.status, std::mem::take(body));
                *progress.body.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
            }
            _ => {}
        }
        if frame.expected.ends_unknown {
            self.lock_state().unknown -= 1;
        }
        Ok(())
    }

    /// The answer of a frame has come, or the connection has ended in it. Its memory is not
    /// accessed any more.
    pub(super) fn finish(&self, frame: WaitingFrame, error: Option<&TransportError>) {
        if let Some(error) = error {
            // The connection may have been closed here, which this thread notices late.
            let first = self.lock_state().broken.clone();
            frame.progress.fail(first.unwrap_or_else(|| error.clone()));
        }
        {
            // Under the lock, so that a thread that has just seen an unfinished batch is woken.
            let _state = self.lock_state();
            frame.progress.frames_left.fetch_sub(1, Ordering::AcqRel);
        }
        // Without the lock: the owner of a region may be dropped here, whose code is not ours.
        drop(frame);
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

    fn refused(&self, piece: u32, refusal: Refusal) -> TransportError {
        TransportError::Refused { peer: self.peer.address.clone(), piece, refusal }
    }
}

/// Where the pieces of the blocks of an answer go, or what is wrong with it.
fn targets_of(header: &Header, body: &[u8], targets: &[Span]) -> Result<Vec<Span>, &'static str> {
    const WRONG: &str = "it answered with other blocks than were asked for";
    if checksum(body) != header.body_checksum {
        return Err("the checksum of a body does not match");
    }
    let (numbers, _) = read_numbered(body).map_err(|_| "the body of an answer is invalid")?;
    if !numbers.is_sorted_by(|one, next| one < next) {
        return Err(WRONG);
    }
    let mut planned = vec![];
    for number in numbers {
        let target = targets.get(number as usize).ok_or(WRONG)?;
        planned.extend(pieces_of(target.bytes()).map(|(at, bytes)| target.part(at, bytes)));
    }
    let bytes: u64 = planned.iter().map(|piece| piece.bytes() as u64).sum();
    let is_whole = planned.len() == header.pieces as usize && bytes == header.payload_bytes;
    is_whole.then_some(planned).ok_or(WRONG)
}
