//! The trait of a connection to a peer: post a batch, wait for its end.

use std::fmt;

use cascade_runtime::Deadline;

use crate::TransportError;
use crate::peer::Peer;
use crate::piece::{Direction, Piece};

/// Pieces that are moved together and confirmed together.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// Which way the bytes move.
    pub direction: Direction,
    /// What is moved. The order in which pieces are moved is not defined, so that two pieces with
    /// bytes of one target in common give an undefined result.
    pub pieces: &'a [Piece],
    /// Given to the peer after all bytes of a write have arrived, or after all bytes of a read have
    /// left; at most 4096 bytes.
    pub notice: Option<&'a [u8]>,
}

/// A connection to one peer. Many threads may use it at once.
///
/// Batches of one connection may run at the same time, and their notices may arrive in another
/// order than they were posted in.
pub trait Connection: fmt::Debug + Send + Sync {
    /// The peer, as it introduced itself.
    fn peer(&self) -> &Peer;

    /// Starts to move a batch. The pages of its local pieces must not be changed (of a write) or
    /// used (of a read) until the ticket has ended.
    fn post(&self, batch: &Batch<'_>, deadline: Deadline) -> Result<Ticket, TransportError>;

    /// Whether batches can be posted: false once the connection was lost or closed.
    fn is_open(&self) -> bool;

    /// Closes the connection. Batches that are not confirmed fail with [`TransportError::Lost`].
    fn close(&self);
}

/// What a transport implements for a posted batch.
pub trait Completion: fmt::Debug + Send {
    /// Waits until the batch has ended or the deadline passes. After [`TransportError::Deadline`]
    /// the batch goes on, and `wait` may be called again.
    fn wait(&mut self, deadline: Deadline) -> Result<(), TransportError>;

    /// Ends the batch: when this returns, its local memory is no longer accessed.
    ///
    /// If that is not so by the deadline, the connection is closed.
    fn cancel(&mut self, deadline: Deadline);
}

/// A posted batch. Dropping it before its end cancels it, which may close the connection.
#[derive(Debug)]
pub struct Ticket {
    completion: Option<Box<dyn Completion>>,
}

impl Ticket {
    /// A ticket of a batch that has ended.
    pub(crate) fn done() -> Self {
        Self { completion: None }
    }

    pub(crate) fn pending(completion: impl Completion + 'static) -> Self {
        Self { completion: Some(Box::new(completion)) }
    }

    /// Waits until the batch has ended. Of a write, all bytes are then at the peer with matching
    /// checksums; of a read, in the local regions.
    ///
    /// After [`TransportError::Deadline`] the batch goes on, and `wait` may be called again.
    pub fn wait(&mut self, deadline: Deadline) -> Result<(), TransportError> {
        let Some(completion) = &mut self.completion else {
            return Ok(());
        };
        let ended = completion.wait(deadline);
        if !matches!(ended, Err(TransportError::Deadline { .. })) {
            self.completion = None;
        }
        ended
    }

    /// Ends the batch without its result. When this returns, its local memory is no longer
    /// accessed. A connection that does not answer by the deadline is closed for that.
    pub fn cancel(mut self, deadline: Deadline) {
        if let Some(mut completion) = self.completion.take() {
            completion.cancel(deadline);
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(mut completion) = self.completion.take() {
            completion.cancel(Deadline::at(cascade_runtime::now()));
        }
    }
}
