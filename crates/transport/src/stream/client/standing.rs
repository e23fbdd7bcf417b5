//! How a connection stands: whether it was lost, and whether that leaves the end of a write or of a
//! notice unknown.

use cascade_runtime::Deadline;

use super::{LinkState, StreamConnection, WaitingFrame};
use crate::TransportError;

/// How a connection stands.
#[derive(Debug)]
pub(crate) enum Standing {
    /// Batches can be posted.
    Open,
    /// The peer has closed it, and answers may still be received.
    Ending {
        /// A write or a notice is not confirmed.
        leaves_unknown: bool,
    },
    /// It has ended.
    Lost {
        /// Why.
        error: TransportError,
        /// A write or a notice may or may not have arrived, or may still arrive. Otherwise nothing
        /// but reads was under way, which can be made again.
        leaves_unknown: bool,
    },
}

impl LinkState {
    /// Whether nothing is under way.
    fn is_idle(&self) -> bool {
        self.reception.is_some() && self.unknown == 0 && !self.expects_answers()
    }

    /// Whether the peer writes nothing of cancelled batches any more.
    fn is_settled(&self) -> bool {
        match &self.broken {
            Some(_) => self.unknown == 0,
            None => !self.waiting.iter().any(WaitingFrame::is_cancelled_write),
        }
    }
}

impl StreamConnection {
    /// Whether it is known to be lost.
    pub(crate) fn is_lost(&self) -> bool {
        self.link.lock_state().broken.is_some()
    }

    /// How it stands. One that the peer has closed while nothing was under way is lost.
    pub(crate) fn standing(&self) -> Standing {
        let is_closed = self.is_closed_by_peer();
        let (is_idle, leaves_unknown) = {
            let state = self.link.lock_state();
            let leaves_unknown = state.unknown > 0;
            if let Some(error) = &state.broken {
                return Standing::Lost { error: error.clone(), leaves_unknown };
            }
            (state.is_idle(), leaves_unknown)
        };
        if !is_closed {
            return Standing::Open;
        }
        if !is_idle {
            return Standing::Ending { leaves_unknown };
        }
        let error = TransportError::lost(&self.link.peer.address, "it closed the connection");
        let error = self.link.end(&error);
        let leaves_unknown = self.link.lock_state().unknown > 0;
        Standing::Lost { error, leaves_unknown }
    }

    /// Waits until the peer writes nothing of cancelled batches any more.
    ///
    /// # Errors
    /// If it still may at the deadline, or if the connection was lost with writes that are not
    /// confirmed: their bytes may still arrive.
    pub(crate) fn settle(&self, deadline: Deadline) -> Result<(), TransportError> {
        if self.link.lock_state().is_settled() {
            return Ok(());
        }
        self.link.drive(deadline, LinkState::is_settled)
    }
}
