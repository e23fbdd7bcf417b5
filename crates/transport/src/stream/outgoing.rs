//! Sends frames: a header, a body, and a payload gathered from memory, with its checksums.

use super::socket::{Patience, SPANS_MAX, Socket};
use crate::TransportError;
use crate::limits::CHUNK_BYTES;
use crate::region::Span;
use crate::wire::Header;

/// Buffers that are used again for each frame.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    queue: Vec<Span>,
    sums: Vec<u8>,
}

impl Outgoing {
    /// Sends one frame. When it returns, the kernel has all bytes and the memory may change.
    ///
    /// `receive` is called while the peer takes no bytes, as in `Socket::send_and`.
    ///
    /// After an error the peer has a part of the frame: the connection cannot go on.
    pub(super) fn send(
        &mut self,
        socket: &Socket,
        header: &Header,
        body: &[u8],
        payload: &[Span],
        (patience, receive): (Patience, &mut dyn FnMut() -> bool),
    ) -> Result<(), TransportError> {
        let header = header.to_bytes();
        self.sums.clear();
        self.queue.clear();
        self.queue.extend([Span::of_bytes(&header), Span::of_bytes(body)]);
        let mut queued_bytes = 0;
        for piece in payload {
            // Each piece is hashed just before the kernel copies it, so that it is read from
            // memory once.
            self.sums.extend_from_slice(&piece.checksum().to_le_bytes());
            self.queue.push(*piece);
            queued_bytes += piece.bytes();
            if queued_bytes >= CHUNK_BYTES || self.queue.len() >= SPANS_MAX {
                socket.send_and(&mut self.queue, patience, receive)?;
                self.queue.clear();
                queued_bytes = 0;
            }
        }
        self.queue.push(Span::of_bytes(&self.sums));
        socket.send_and(&mut self.queue, patience, receive)
    }
}
