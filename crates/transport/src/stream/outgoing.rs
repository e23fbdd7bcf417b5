//! Sends frames: a header, a body, and a payload gathered from memory, with its checksums.

use super::byte_stream::SPANS_MAX;
use super::chunk::chunk_of;
use super::socket::{Patience, Socket};
use crate::TransportError;
use crate::region::Span;
use crate::wire::Header;

/// From this length on the kernel copies a piece before its checksum is computed.
const LONG_PIECE_BYTES: usize = 32 << 10;

/// How far ahead of the checksums pieces are brought into the cache.
const PIECES_AHEAD: usize = 2;

/// Buffers that are used again for each frame.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    queue: Vec<Span>,
    sums: Vec<u8>,
    /// What was not sent of frames whose deadline passed. It comes before the next frame.
    rest: Vec<u8>,
    /// Bytes of it that were sent.
    rest_sent: usize,
}

impl Outgoing {
    /// Sends one frame. When it returns, the kernel has all bytes and the memory may change.
    ///
    /// `receive` is called while the peer takes no bytes, as in `Socket::send_and`.
    ///
    /// After a deadline, this keeps a copy of what was not sent, which `send_rest` has to send
    /// next. After another error the connection cannot go on: the peer has a part of the frame.
    pub(super) fn send(
        &mut self,
        socket: &Socket,
        header: &Header,
        body: &[u8],
        payload: &[Span],
        (patience, receive): (&mut Patience<'_>, &mut dyn FnMut() -> bool),
    ) -> Result<(), TransportError> {
        let header = header.to_bytes();
        self.sums.clear();
        self.queue.clear();
        self.queue.extend([Span::of_bytes(&header), Span::of_bytes(body)]);
        let mut rest = payload;
        while !rest.is_empty() {
            let (chunk, more) = rest.split_at(chunk_of(rest, SPANS_MAX - self.queue.len()));
            // What comes first reads the bytes from memory, and leaves them in a cache of this core
            // for the other. The kernel's copy reads long pieces faster than a checksum does.
            let bytes: usize = chunk.iter().map(|piece| piece.bytes()).sum();
            let is_long = bytes >= chunk.len() * LONG_PIECE_BYTES;
            if !is_long {
                self.compute_sums(chunk);
            }
            self.queue.extend_from_slice(chunk);
            let sent = socket.send_and(&mut self.queue, patience, receive);
            if is_long {
                self.compute_sums(chunk);
            }
            if sent.is_err() {
                self.compute_sums(more);
                self.queue.extend_from_slice(more);
                self.queue.push(Span::of_bytes(&self.sums));
                return self.keep_rest(sent);
            }
            self.queue.clear();
            rest = more;
        }
        self.queue.push(Span::of_bytes(&self.sums));
        let sent = socket.send_and(&mut self.queue, patience, receive);
        self.keep_rest(sent)
    }

    /// Copies what a deadline left in the queue.
    fn keep_rest(&mut self, sent: Result<(), TransportError>) -> Result<(), TransportError> {
        if matches!(sent, Err(TransportError::Deadline { .. })) {
            for span in &self.queue {
                self.rest.extend_from_slice(span.as_slice());
            }
        }
        self.queue.clear();
        sent
    }

    /// Bytes that were not sent of earlier frames.
    pub(super) fn rest_bytes(&self) -> usize {
        self.rest.len() - self.rest_sent
    }

    /// Adds a frame without body and payload to the rest.
    pub(super) fn add_to_rest(&mut self, header: &Header) {
        self.rest.extend_from_slice(&header.to_bytes());
    }

    /// Sends the rest of earlier frames. After a deadline, another call goes on.
    pub(super) fn send_rest(
        &mut self,
        socket: &Socket,
        (patience, receive): (&mut Patience<'_>, &mut dyn FnMut() -> bool),
    ) -> Result<(), TransportError> {
        let mut spans = [Span::of_bytes(&self.rest[self.rest_sent..])];
        let sent = socket.send_and(&mut spans, patience, receive);
        self.rest_sent = self.rest.len() - spans[0].bytes();
        if spans[0].bytes() == 0 {
            (self.rest, self.rest_sent) = (vec![], 0);
        }
        sent
    }

    fn compute_sums(&mut self, pieces: &[Span]) {
        for (index, piece) in pieces.iter().enumerate() {
            // Blocks lie anywhere, so that the processor does not guess which one is next.
            if let Some(next) = pieces.get(index + PIECES_AHEAD) {
                next.prefetch();
            }
            self.sums.extend(piece.checksum().to_le_bytes());
        }
    }
}
