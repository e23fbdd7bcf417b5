//! The trait of a connection to a peer: post a batch, wait for its end.

use std::fmt;
use std::time::Duration;

use cascade_runtime::{Deadline, SystemClock};

use crate::TransportError;
use crate::peer::Peer;
use crate::piece::{Direction, Piece};
use crate::question::{Answer, AskLimit};

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

/// How the bytes of a connection move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TransportKind {
    /// Through a TCP socket.
    Tcp,
    /// Through a Unix socket: the peer has no region that could be mapped.
    Unix,
    /// Copied by this process, between memory that it has mapped.
    Shm,
    /// By RDMA. Notices, and regions of a later date, use a TCP socket.
    Rdma,
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Unix => "unix",
            Self::Shm => "shm",
            Self::Rdma => "rdma",
        })
    }
}

/// A connection to one peer. Many threads may use it at once.
///
/// Batches of one connection may run at the same time, and their notices may arrive in another
/// order than they were posted in.
pub trait Connection: fmt::Debug + Send + Sync {
    /// The peer, as it introduced itself.
    fn peer(&self) -> &Peer;

    /// How its bytes move.
    fn transport(&self) -> TransportKind;

    /// Starts to move a batch. The pages of its local pieces must not be changed (of a write) or
    /// used (of a read) until the ticket has ended.
    ///
    /// # Errors
    /// [`TransportError::Deadline`] if it was not sent whole by the deadline, as if it had been
    /// cancelled: its memory is not used any more, what was begun of it ends in the background, and
    /// nothing of it arrives after a later batch of this connection was confirmed.
    fn post(&self, batch: &Batch<'_>, deadline: Deadline) -> Result<Ticket, TransportError>;

    /// Asks the peer a question of at most [`crate::QUESTION_BYTES_MAX`] bytes, and waits for its
    /// answer. The peer fills some of the targets, of at most 8 MiB each; the bytes of the others
    /// are undefined. When this returns, nobody writes into them.
    ///
    /// # Errors
    /// [`TransportError::Unavailable`] if the peer answers no questions. After
    /// [`TransportError::Deadline`], also if the call was cancelled, the answer is thrown away when
    /// it comes.
    fn ask(
        &self,
        question: &[u8],
        targets: &mut [&mut [u8]],
        limit: AskLimit<'_>,
    ) -> Result<Answer, TransportError>;

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

/// A posted batch. Dropping it before its end cancels it, with [`Ticket::DROP_TIMEOUT`].
#[derive(Debug)]
pub struct Ticket {
    completion: Option<Box<dyn Completion>>,
    /// How the batch has ended, once `completion` is taken.
    ended: Result<(), TransportError>,
}

impl Ticket {
    /// How long a dropped ticket waits until its batch has left the memory.
    pub const DROP_TIMEOUT: Duration = Duration::from_secs(1);

    /// A ticket of a batch that has ended.
    pub(crate) fn done() -> Self {
        Self { completion: None, ended: Ok(()) }
    }

    pub(crate) fn pending(completion: impl Completion + 'static) -> Self {
        Self { completion: Some(Box::new(completion)), ended: Ok(()) }
    }

    /// Waits until the batch has ended. Of a write, all bytes are then at the peer with matching
    /// checksums; of a read, in the local regions.
    ///
    /// After [`TransportError::Deadline`] the batch goes on, and `wait` may be called again. After
    /// the end it returns the same result each time.
    pub fn wait(&mut self, deadline: Deadline) -> Result<(), TransportError> {
        let Some(completion) = &mut self.completion else {
            return self.ended.clone();
        };
        let ended = completion.wait(deadline);
        if !matches!(ended, Err(TransportError::Deadline { .. })) {
            self.completion = None;
            self.ended.clone_from(&ended);
        }
        ended
    }

    /// Ends the batch without its result. When this returns, its local memory is no longer
    /// accessed: within 0.2 s where this process receives its bytes itself. A connection that
    /// still accesses it then and at the deadline is closed.
    pub fn cancel(mut self, deadline: Deadline) {
        if let Some(mut completion) = self.completion.take() {
            completion.cancel(deadline);
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(mut completion) = self.completion.take() {
            completion.cancel(Deadline::after(&SystemClock, Self::DROP_TIMEOUT));
        }
    }
}
