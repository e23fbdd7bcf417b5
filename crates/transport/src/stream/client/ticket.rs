//! The ticket of a batch: waits for its answers, or leaves its memory.

use std::sync::Arc;

use cascade_runtime::{Deadline, Plant, is_planted};

use super::{Link, Progress};
use crate::TransportError;
use crate::connection::Completion;

/// A batch of this connection.
#[derive(Debug)]
pub(super) struct StreamTicket {
    pub(super) link: Arc<Link>,
    pub(super) progress: Arc<Progress>,
}

impl Completion for StreamTicket {
    fn wait(&mut self, deadline: Deadline) -> Result<(), TransportError> {
        self.link.drive(deadline, |_| self.progress.has_ended())?;
        self.progress.result()
    }

    /// Does not wait for the peer: what it has not sent yet is thrown away when it comes.
    fn cancel(&mut self, _deadline: Deadline) {
        if is_planted(Plant::EarlyCancel) {
            return;
        }
        self.link.leave(&self.progress);
    }
}
