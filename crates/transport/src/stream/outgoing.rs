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
        (patience, receive): (&mut Patience, &mut dyn FnMut() -> bool),
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
            socket.send_and(&mut self.queue, patience, receive)?;
            self.queue.clear();
            if is_long {
                self.compute_sums(chunk);
            }
            rest = more;
        }
        self.queue.push(Span::of_bytes(&self.sums));
        socket.send_and(&mut self.queue, patience, receive)
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
