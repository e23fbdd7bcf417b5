//! Receives payloads straight into memory, and compares their checksums.

use super::socket::{Patience, SPANS_MAX, Socket};
use crate::TransportError;
use crate::limits::CHUNK_BYTES;
use crate::region::Span;
use crate::wire::{CHECKSUM_BYTES, HEADER_BYTES, Header};

/// Bytes that are thrown away at a time.
const DISCARD_BYTES: usize = 64 << 10;

/// Buffers that are used again for each frame.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    queue: Vec<Span>,
    computed: Vec<u8>,
    sums: Vec<u8>,
    discarded: Vec<u8>,
}

impl Incoming {
    /// Receives a payload and its checksums. Returns the first piece whose checksum differs.
    pub(super) fn payload(
        &mut self,
        socket: &Socket,
        payload: &[Span],
        patience: Patience,
    ) -> Result<Option<u32>, TransportError> {
        self.computed.clear();
        let mut rest = payload;
        while !rest.is_empty() {
            let (chunk, more) = rest.split_at(chunk_of(rest));
            self.queue.clear();
            self.queue.extend_from_slice(chunk);
            socket.receive(&mut self.queue, patience)?;
            // The bytes are still in the cache of the core that copied them.
            for piece in chunk {
                self.computed.extend_from_slice(&piece.checksum().to_le_bytes());
            }
            rest = more;
        }
        self.sums.resize(payload.len() * CHECKSUM_BYTES, 0);
        socket.receive(&mut [Span::of_buffer(&mut self.sums)], patience)?;
        let mut pairs = self.computed.chunks(CHECKSUM_BYTES).zip(self.sums.chunks(CHECKSUM_BYTES));
        let damaged = pairs.position(|(computed, sent)| computed != sent);
        Ok(damaged.map(|piece| u32::try_from(piece).expect("at most FRAME_PIECES_MAX")))
    }

    /// Throws away a payload and its checksums.
    pub(super) fn discard(
        &mut self,
        socket: &Socket,
        header: &Header,
        patience: Patience,
    ) -> Result<(), TransportError> {
        self.discarded.resize(DISCARD_BYTES, 0);
        let sums = u64::from(header.pieces) * CHECKSUM_BYTES as u64;
        let mut left = header.payload_bytes + sums;
        while left > 0 {
            let bytes = left.min(DISCARD_BYTES as u64);
            left -= bytes;
            let bytes = usize::try_from(bytes).expect("at most DISCARD_BYTES");
            let span = Span::of_buffer(&mut self.discarded[..bytes]);
            socket.receive(&mut [span], patience)?;
        }
        Ok(())
    }
}

/// Receives a header.
pub(super) fn receive_header(
    socket: &Socket,
    patience: Patience,
) -> Result<Header, TransportError> {
    let mut bytes = [0; HEADER_BYTES];
    socket.receive(&mut [Span::of_buffer(&mut bytes)], patience)?;
    Header::parse(&bytes).map_err(|error| TransportError::lost(socket.peer(), error))
}

/// How many of these pieces one system call receives.
fn chunk_of(pieces: &[Span]) -> usize {
    let mut bytes = 0;
    let is_room_left = |piece: &&Span| {
        let is_left = bytes < CHUNK_BYTES;
        bytes += piece.bytes();
        is_left
    };
    pieces.iter().take(SPANS_MAX).take_while(is_room_left).count()
}
