//! Several streams to one peer: a large batch is divided among them, each with a thread of its own.
//!
//! One TCP stream has one processor at each end and one congestion window. Where the network is
//! faster than that, more streams are. Small batches take one stream.

mod lane;
mod parts;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};

use cascade_runtime::{Condvar, Deadline, Mutex, MutexGuard, SystemClock};

use self::lane::{Lane, Part};
use crate::TransportError;
use crate::connection::{Batch, Completion, Connection, Ticket, TransportKind};
use crate::limits::{NOTICE_BYTES_MAX, STREAMS_MAX, STRIPE_BYTES_MIN};
use crate::peer::Peer;
use crate::piece::Direction;
use crate::question::{Answer, AskLimit};
use crate::stream::StreamConnection;

/// Several streams to one peer. Batches that are divided are posted in the background: their pages
/// are read or written until the ticket has ended.
#[derive(Debug)]
pub(crate) struct StripedConnection {
    lanes: Vec<Lane>,
    /// Number of the next batch that is not divided.
    next: AtomicUsize,
}

impl StripedConnection {
    /// Takes connections to one peer.
    ///
    /// # Errors
    /// If they lead to different endpoints, as through a load balancer, or without a thread.
    pub(crate) fn new(streams: Vec<StreamConnection>) -> Result<Self, TransportError> {
        debug_assert!((1..=STREAMS_MAX).contains(&streams.len()), "checked by the endpoint");
        let first = streams.first().map(|stream| stream.peer().id);
        if let Some(other) = streams.iter().find(|stream| Some(stream.peer().id) != first) {
            let reason = "its address leads to different endpoints; connect with one stream";
            let peer = other.peer().address.clone();
            return Err(TransportError::Handshake { peer, reason: reason.to_owned() });
        }
        let lanes = streams.into_iter().map(Lane::start).collect::<Result<_, _>>()?;
        Ok(Self { lanes, next: AtomicUsize::new(0) })
    }

    /// The number of the stream that a batch that is not divided takes: each in turn, so that the
    /// batches of several threads run beside each other.
    fn next_stream(&self) -> usize {
        self.next.fetch_add(1, Ordering::Relaxed) % self.lanes.len()
    }

    /// Waits until cancelled writes of other streams are over. A stream keeps its own order, but
    /// what waits in one of them could arrive after a later write by another one.
    fn settle_others(&self, own: Option<usize>, deadline: Deadline) -> Result<(), TransportError> {
        let mut others = self.lanes.iter().zip(0..).filter(|(_, number)| Some(*number) != own);
        others.try_for_each(|(lane, _)| lane.stream().settle(deadline))
    }
}

impl Connection for StripedConnection {
    fn peer(&self) -> &Peer {
        self.lanes[0].stream().peer()
    }

    fn transport(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn post(&self, batch: &Batch<'_>, deadline: Deadline) -> Result<Ticket, TransportError> {
        let notice = batch.notice.unwrap_or_default();
        if notice.len() > NOTICE_BYTES_MAX {
            let (what, value) = ("a notice", notice.len());
            return Err(TransportError::TooLarge { what, value, limit: NOTICE_BYTES_MAX });
        }
        let parts = parts::divide(batch.pieces, self.lanes.len(), STRIPE_BYTES_MIN);
        let own = (parts.len() < 2).then(|| self.next_stream());
        if batch.direction == Direction::Write {
            self.settle_others(own, deadline)?;
        }
        if let Some(own) = own {
            return self.lanes[own].stream().post(batch, deadline);
        }
        let count = parts.len();
        let group = Arc::new(Group::new(count, batch.notice.map(Into::into)));
        let lanes = self.lanes.iter().map(Lane::shared).collect();
        let mut ticket = StripedTicket { group: Arc::clone(&group), lanes };
        for (number, (lane, pieces)) in self.lanes.iter().zip(parts).enumerate() {
            let part = Part { direction: batch.direction, pieces, group: Arc::clone(&group) };
            if let Err(error) = lane.push(part, deadline) {
                // This part and those after it have not been given to a thread.
                (number..count).for_each(|_| group.end_part());
                ticket.cancel(Deadline::after(&SystemClock, lane::CANCEL_TIMEOUT));
                return Err(error);
            }
        }
        Ok(Ticket::pending(ticket))
    }

    fn ask(
        &self,
        question: &[u8],
        targets: &mut [&mut [u8]],
        limit: AskLimit<'_>,
    ) -> Result<Answer, TransportError> {
        self.lanes[self.next_stream()].stream().ask(question, targets, limit)
    }

    fn is_open(&self) -> bool {
        self.lanes.iter().all(|lane| lane.stream().is_open())
    }

    fn close(&self) {
        for lane in &self.lanes {
            lane.stream().close();
        }
    }
}

/// The parts of one batch.
#[derive(Debug)]
struct Group {
    state: Mutex<GroupState>,
    changed: Condvar,
    /// Parts that are not posted yet are left out, others are cancelled.
    is_cancelled: AtomicBool,
    /// Sent by the thread whose part ends last, if none failed.
    notice: Option<Box<[u8]>>,
}

#[derive(Debug)]
struct GroupState {
    /// Parts whose bytes have not all moved.
    moving: usize,
    /// Parts whose threads still use the memory.
    parts_left: usize,
    failure: Option<TransportError>,
}

impl Group {
    fn new(parts: usize, notice: Option<Box<[u8]>>) -> Self {
        let state = GroupState { moving: parts, parts_left: parts, failure: None };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Self { state, changed, is_cancelled: AtomicBool::new(false), notice }
    }

    fn lock(&self) -> MutexGuard<'_, GroupState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Acquire)
    }

    fn fail(&self, error: TransportError) {
        self.lock().failure.get_or_insert(error);
    }

    /// Notes that the bytes of a part have moved. Returns the notice to the thread that moved the
    /// last ones, unless a part failed.
    fn moved(&self) -> Option<&[u8]> {
        let mut state = self.lock();
        state.moving -= 1;
        let is_due = state.moving == 0 && state.failure.is_none() && !self.is_cancelled();
        self.notice.as_deref().filter(|_| is_due)
    }

    fn end_part(&self) {
        let mut state = self.lock();
        state.parts_left -= 1;
        if state.parts_left == 0 {
            self.changed.notify_all();
        }
    }

    /// Waits until all parts have ended; false if they have not by the deadline.
    fn wait_for_parts(&self, deadline: Deadline) -> bool {
        let mut state = self.lock();
        while state.parts_left > 0 {
            let left = deadline.remaining(&SystemClock);
            if left.is_zero() {
                return false;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// A batch that was divided.
#[derive(Debug)]
struct StripedTicket {
    group: Arc<Group>,
    lanes: Vec<Arc<lane::Shared>>,
}

impl Completion for StripedTicket {
    fn wait(&mut self, deadline: Deadline) -> Result<(), TransportError> {
        if !self.group.wait_for_parts(deadline) {
            return Err(TransportError::Deadline { what: "a batch" });
        }
        self.group.lock().failure.clone().map_or(Ok(()), Err)
    }

    fn cancel(&mut self, deadline: Deadline) {
        self.group.is_cancelled.store(true, Ordering::Release);
        for lane in &self.lanes {
            lane.withdraw(&self.group);
        }
        // Threads that wait for an answer leave it at once, and only what they send is cut.
        let soon = Deadline::after(&SystemClock, lane::LEAVE_TIMEOUT);
        if self.group.wait_for_parts(deadline.max(soon)) {
            return;
        }
        for lane in &self.lanes {
            lane.close();
        }
        // The streams have ended, so their threads leave the memory at once.
        while !self.group.wait_for_parts(Deadline::after(&SystemClock, lane::LOOK)) {}
    }
}
