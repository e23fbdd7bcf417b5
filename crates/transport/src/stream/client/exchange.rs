//! Asks the peer for queue pairs, over the socket of a connection.

use std::sync::{Arc, PoisonError};

use cascade_runtime::Deadline;

use super::super::socket::Patience;
use super::{Expected, Link, Progress, StreamConnection};
use crate::TransportError;
use crate::region::Span;
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
            let mut sender = self.link.lock_sender(deadline)?;
            let header = Header::new(Kind::Link, 0).with_body(address);
            let expects = Expected { kind: Kind::Linked, targets: vec![], _regions: None };
            let body = (address, &[][..]);
            let waits = (&progress, deadline);
            self.link.send_frame(&mut sender, header, body, Some(expects), waits)?;
        }
        self.link.drive(deadline, |_| progress.has_ended())?;
        progress.result()?;
        let linked = progress.linked.lock().unwrap_or_else(PoisonError::into_inner).take();
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

impl Link {
    /// Receives the body of an answer that names queue pairs.
    pub(super) fn take_linked(
        &self,
        header: &Header,
        progress: &Progress,
    ) -> Result<(), TransportError> {
        let mut body = vec![0; header.body_bytes as usize];
        let patience = Patience::of_frame(self.stall, header.body_bytes.into());
        self.socket.receive(&mut [Span::of_buffer(&mut body)], patience)?;
        if cascade_block::checksum(&body) != header.body_checksum {
            let reason = "the checksum of a body does not match";
            return Err(TransportError::lost(&self.peer.address, reason));
        }
        let mut linked = progress.linked.lock().unwrap_or_else(PoisonError::into_inner);
        *linked = Some((header.status, body));
        Ok(())
    }
}
