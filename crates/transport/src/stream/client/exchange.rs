//! Asks the peer for queue pairs, over the socket of a connection.

use std::sync::{Arc, PoisonError};

use cascade_runtime::Deadline;

use super::{Expected, Progress, StreamConnection, Until};
use crate::TransportError;
use crate::wire::{Header, Kind};

impl StreamConnection {
    /// Sends the address of this side's queue pairs; returns the peer's answer.
    pub(crate) fn exchange(
        &self,
        address: &[u8],
        deadline: Deadline,
    ) -> Result<Vec<u8>, TransportError> {
        let progress = Arc::new(Progress::default());
        {
            let until = Until::deadline(deadline);
            let mut sender = self.link.lock_sender(until)?;
            let header = Header::new(Kind::Link, 0).with_body(address);
            let expects = Expected::of_kind(Kind::Linked);
            let body = (address, &[][..]);
            let waits = (&progress, until);
            self.link.send_frame(&mut sender, header, body, Some(expects), waits)?;
        }
        self.link.drive(deadline, |_| progress.has_ended())?;
        progress.result()?;
        let linked = progress.body.lock().unwrap_or_else(PoisonError::into_inner).take();
        match linked {
            Some((0, body)) => Ok(body),
            Some((_, reason)) => {
                let reason = String::from_utf8_lossy(&reason);
                let plain: String =
                    reason.chars().filter(|it| !it.is_control()).take(500).collect();
                let peer = &self.link.peer.address;
                Err(TransportError::Unavailable(format!("{peer} has no RDMA: {plain}")))
            }
            None => Err(TransportError::lost(&self.link.peer.address, "it sent no queue pairs")),
        }
    }
}
