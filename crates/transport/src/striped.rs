//! Several streams to one peer: a large batch is divided among them, each with a thread of its own.
//!
//! One TCP stream has one processor at each end and one congestion window. Where the network is
//! faster than that, more streams are. Small batches take one stream.

mod group;
mod lane;
mod parts;
mod streams;
mod tickets;

use std::sync::Arc;
use std::time::Duration;

use cascade_runtime::{Deadline, SystemClock};

use self::group::Group;
use self::lane::{Part, Shared};
use self::streams::Streams;
use self::tickets::{GroupTicket, ReadTicket};
use crate::TransportError;
use crate::connection::{Batch, Completion as _, Connection, Ticket, TransportKind};
use crate::limits::{NOTICE_BYTES_MAX, STREAMS_MAX, STRIPE_BYTES_MIN};
use crate::peer::Peer;
use crate::piece::{Direction, Piece};
use crate::question::{Answer, AskLimit};
use crate::stream::{Open, StreamConnection};

/// How batches are divided, and when a lost stream is opened again.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Division {
    /// The least bytes of a part.
    pub(crate) part_bytes_min: u64,
    /// Time until a lost stream is opened again.
    pub(crate) open_pause: Duration,
}

impl Default for Division {
    fn default() -> Self {
        Self { part_bytes_min: STRIPE_BYTES_MIN, open_pause: Duration::from_secs(10) }
    }
}

/// Several streams to one peer. Batches that are divided are posted in the background: their pages
/// are read or written until the ticket has ended.
#[derive(Debug)]
pub(crate) struct StripedConnection {
    streams: Arc<Streams>,
    part_bytes_min: u64,
}

impl StripedConnection {
    /// Takes connections to one peer, and what opens another one.
    ///
    /// # Errors
    /// If they lead to different endpoints, as through a load balancer, or without a thread.
    pub(crate) fn new(
        streams: Vec<StreamConnection>,
        division: Division,
        open: Arc<Open>,
    ) -> Result<Self, TransportError> {
        debug_assert!((1..=STREAMS_MAX).contains(&streams.len()), "checked by the endpoint");
        let first = streams.first().map(|stream| stream.peer().id);
        if let Some(other) = streams.iter().find(|stream| Some(stream.peer().id) != first) {
            let reason = "its address leads to different endpoints; connect with one stream";
            let peer = other.peer().address.clone();
            return Err(TransportError::Handshake { peer, reason: reason.to_owned() });
        }
        let Division { part_bytes_min, open_pause } = division;
        Ok(Self { streams: Streams::start(streams, (open, open_pause))?, part_bytes_min })
    }

    /// Waits until cancelled writes of other streams are over. A stream keeps its own order, but
    /// what waits in one of them could arrive after a later write by another one.
    fn settle_others(
        &self,
        own: Option<&Arc<Shared>>,
        deadline: Deadline,
    ) -> Result<(), TransportError> {
        for lane in self.streams.all()? {
            if own.is_some_and(|own| Arc::ptr_eq(own, &lane)) {
                continue;
            }
            match lane.stream().settle(deadline) {
                // A stream that was lost with nothing but reads writes nothing.
                Err(error @ TransportError::Lost { .. }) => self.streams.lost(&lane, error)?,
                settled => settled?,
            }
        }
        Ok(())
    }

    /// Posts a batch over one stream.
    fn post_whole(&self, batch: &Batch<'_>, deadline: Deadline) -> Result<Ticket, TransportError> {
        if batch.direction == Direction::Read && batch.notice.is_none() {
            return ReadTicket::post(&self.streams, batch.pieces, deadline).map(Ticket::pending);
        }
        loop {
            let lane = self.streams.next()?;
            if batch.direction == Direction::Write {
                self.settle_others(Some(&lane), deadline)?;
            }
            match lane.stream().post(batch, deadline) {
                // Nothing of it was sent, or the whole connection is lost.
                Err(error @ TransportError::Lost { .. }) => self.streams.lost(&lane, error)?,
                posted => return posted,
            }
        }
    }

    /// Gives the parts of a batch to the threads of these streams.
    fn post_parts(
        &self,
        batch: &Batch<'_>,
        (parts, lanes): (Vec<Vec<Piece>>, &[Arc<Shared>]),
        deadline: Deadline,
    ) -> Result<Ticket, TransportError> {
        let count = parts.len();
        let group = Arc::new(Group::new(count, batch.notice.map(Into::into)));
        let streams = Arc::clone(&self.streams);
        let mut ticket = GroupTicket { group: Arc::clone(&group), streams };
        for (number, (lane, pieces)) in lanes.iter().zip(parts).enumerate() {
            let mut part = Part::new(batch.direction, pieces, &group);
            let mut lane = Arc::clone(lane);
            let failed = loop {
                match lane.push(part, deadline) {
                    Ok(()) => break None,
                    Err((back, TransportError::Lost { .. })) => match self.streams.next() {
                        Ok(next) => (part, lane) = (back, next),
                        Err(error) => break Some(error),
                    },
                    Err((_, error)) => break Some(error),
                }
            };
            if let Some(error) = failed {
                // This part and those after it have not been given to a thread.
                (number..count).for_each(|_| group.end_part());
                ticket.cancel(Deadline::after(&SystemClock, lane::CANCEL_TIMEOUT));
                return Err(error);
            }
        }
        Ok(Ticket::pending(ticket))
    }
}

impl Connection for StripedConnection {
    fn peer(&self) -> &Peer {
        self.streams.peer()
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
        self.streams.open_again();
        let mut lanes = self.streams.living()?;
        // Its bytes can be read again, and its notice must not be given twice: the thread of a
        // stream sends the notice after the bytes.
        let is_in_steps = batch.direction == Direction::Read && batch.notice.is_some();
        let mut parts = parts::divide(batch.pieces, lanes.len(), self.part_bytes_min);
        if is_in_steps || !parts.is_empty() {
            lanes = self.streams.usable()?;
            parts = parts::divide(batch.pieces, lanes.len(), self.part_bytes_min);
        }
        if parts.is_empty() && is_in_steps && lanes.len() > 1 {
            parts = vec![batch.pieces.to_vec()];
        }
        if parts.is_empty() {
            return self.post_whole(batch, deadline);
        }
        if batch.direction == Direction::Write {
            self.settle_others(None, deadline)?;
        }
        self.post_parts(batch, (parts, &lanes), deadline)
    }

    fn ask(
        &self,
        question: &[u8],
        targets: &mut [&mut [u8]],
        limit: AskLimit<'_>,
    ) -> Result<Answer, TransportError> {
        // It has no effect at the peer, so that it can be asked again.
        loop {
            let lane = self.streams.next()?;
            match lane.stream().ask(question, targets, limit) {
                Err(error @ TransportError::Lost { .. }) => self.streams.lost(&lane, error)?,
                answered => return answered,
            }
        }
    }

    fn is_open(&self) -> bool {
        self.streams.is_open()
    }

    fn close(&self) {
        self.streams.close();
    }
}

impl Drop for StripedConnection {
    fn drop(&mut self) {
        // Tickets and a thread that opens a stream have a part of it.
        self.close();
    }
}

#[cfg(test)]
mod tests;
