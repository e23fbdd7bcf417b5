//! Tickets of batches over several streams.

use std::sync::Arc;

use cascade_runtime::{Deadline, SystemClock};

use super::group::Group;
use super::lane::{LEAVE_TIMEOUT, LOOK, Shared};
use super::streams::Streams;
use crate::TransportError;
use crate::connection::{Batch, Completion, Connection as _, Ticket};
use crate::piece::{Direction, Piece};

/// A batch that threads of streams move.
#[derive(Debug)]
pub(super) struct GroupTicket {
    pub(super) group: Arc<Group>,
    pub(super) streams: Arc<Streams>,
}

impl Completion for GroupTicket {
    fn wait(&mut self, deadline: Deadline) -> Result<(), TransportError> {
        if !self.group.wait_for_parts(deadline) {
            return Err(TransportError::Deadline { what: "a batch" });
        }
        self.group.result()
    }

    fn cancel(&mut self, deadline: Deadline) {
        self.group.cancel();
        // The threads of lost streams give their parts back at once.
        for lane in self.streams.all().unwrap_or_default() {
            lane.withdraw(&self.group);
        }
        // Threads that wait for an answer leave it at once, and only what they send is cut.
        let soon = Deadline::after(&SystemClock, LEAVE_TIMEOUT);
        if self.group.wait_for_parts(deadline.max(soon)) {
            return;
        }
        self.streams.close();
        // The streams have ended, so their threads leave the memory at once.
        while !self.group.wait_for_parts(Deadline::after(&SystemClock, LOOK)) {}
    }
}

/// A read over one stream. If the stream is lost, another one reads again.
#[derive(Debug)]
pub(super) struct ReadTicket {
    streams: Arc<Streams>,
    pieces: Vec<Piece>,
    /// `None` until it is posted again.
    posted: Option<(Ticket, Arc<Shared>)>,
}

impl ReadTicket {
    /// Posts a read without a notice.
    pub(super) fn post(
        streams: &Arc<Streams>,
        pieces: &[Piece],
        deadline: Deadline,
    ) -> Result<Self, TransportError> {
        let mut read = Self { streams: Arc::clone(streams), pieces: vec![], posted: None };
        read.post_again(pieces, deadline)?;
        read.pieces = pieces.to_vec();
        Ok(read)
    }

    fn post_again(&mut self, pieces: &[Piece], deadline: Deadline) -> Result<(), TransportError> {
        let batch = Batch { direction: Direction::Read, pieces, notice: None };
        loop {
            let lane = self.streams.next()?;
            match lane.stream().post(&batch, deadline) {
                Ok(ticket) => {
                    self.posted = Some((ticket, lane));
                    return Ok(());
                }
                Err(error @ TransportError::Lost { .. }) => self.streams.lost(&lane, error)?,
                Err(error) => return Err(error),
            }
        }
    }
}

impl Completion for ReadTicket {
    fn wait(&mut self, deadline: Deadline) -> Result<(), TransportError> {
        loop {
            if let Some((ticket, lane)) = &mut self.posted {
                match ticket.wait(deadline) {
                    Err(error @ TransportError::Lost { .. }) => self.streams.lost(lane, error)?,
                    ended => return ended,
                }
            }
            self.posted = None;
            let pieces = std::mem::take(&mut self.pieces);
            // After a deadline the next wait posts it.
            let posted = self.post_again(&pieces, deadline);
            self.pieces = pieces;
            posted?;
        }
    }

    fn cancel(&mut self, deadline: Deadline) {
        if let Some((ticket, _)) = self.posted.take() {
            ticket.cancel(deadline);
        }
    }
}
