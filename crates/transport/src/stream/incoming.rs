//! Receives payloads straight into memory, and compares their checksums. A caller may stop at any
//! byte, and go on later.

use super::byte_stream::SPANS_MAX;
use super::chunk::chunk_of;
use super::socket::{Patience, Pause, Socket};
use crate::TransportError;
use crate::region::Span;
use crate::wire::{CHECKSUM_BYTES, HEADER_BYTES, Header};

/// Bytes that are thrown away at a time.
const DISCARD_BYTES: usize = 64 << 10;

/// The payload of a frame and its checksums, as far as they have come. Its buffers are used again
/// for each frame.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    /// What is to be filled next: a chunk of the payload, or the checksums.
    queue: Vec<Span>,
    /// Pieces that were queued so far.
    queued: usize,
    /// Those of them whose bytes have come.
    whole: usize,
    has_queued_sums: bool,
    /// Bytes of the payload and its checksums that have not come.
    left: usize,
    computed: Vec<u8>,
    sums: Vec<u8>,
    discarded: Vec<u8>,
}

/// A payload that has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Whole {
    /// The first piece whose checksum differs.
    pub(super) damaged: Option<u32>,
}

impl Incoming {
    /// A payload comes.
    pub(super) fn begin(&mut self, header: &Header) {
        let sums = header.pieces as usize * CHECKSUM_BYTES;
        let bytes = usize::try_from(header.payload_bytes).expect("at most FRAME_BYTES_MAX");
        self.queue.clear();
        (self.queued, self.whole, self.has_queued_sums) = (0, 0, false);
        self.left = bytes + sums;
        self.computed.clear();
        self.sums.resize(sums, 0);
    }

    /// Receives a payload into these pieces, and its checksums. `None` if it pauses: the next call
    /// goes on, with the same pieces.
    pub(super) fn payload(
        &mut self,
        socket: &Socket,
        pieces: &[Span],
        (patience, pause): (&mut Patience<'_>, Pause<'_>),
    ) -> Result<Option<Whole>, TransportError> {
        loop {
            if self.queue.is_empty() {
                // The bytes are still in the cache of the core that copied them.
                for piece in &pieces[self.whole..self.queued] {
                    self.computed.extend_from_slice(&piece.checksum().to_le_bytes());
                }
                self.whole = self.queued;
                if self.has_queued_sums {
                    break;
                }
                self.queue_next(&pieces[self.whole..]);
            }
            let queued = bytes_of(&self.queue);
            let more = self.left - queued;
            let left = socket.receive_part(&mut self.queue, more, (patience, pause))?;
            self.queue.drain(..self.queue.len() - left);
            self.left -= queued - bytes_of(&self.queue);
            if left > 0 {
                return Ok(None);
            }
        }
        let mut pairs = self.computed.chunks(CHECKSUM_BYTES).zip(self.sums.chunks(CHECKSUM_BYTES));
        let damaged = pairs.position(|(computed, sent)| computed != sent);
        let number = |piece| u32::try_from(piece).expect("at most FRAME_PIECES_MAX");
        Ok(Some(Whole { damaged: damaged.map(number) }))
    }

    /// Queues the next of these pieces, or after the last one the checksums.
    fn queue_next(&mut self, pieces: &[Span]) {
        if pieces.is_empty() {
            self.has_queued_sums = true;
            self.queue.push(Span::of_buffer(&mut self.sums));
            return;
        }
        let chunk = &pieces[..chunk_of(pieces, SPANS_MAX)];
        self.queued += chunk.len();
        self.queue.extend_from_slice(chunk);
        // Blocks lie anywhere. The kernel's copy would wait for the memory of each in turn.
        for piece in chunk {
            piece.prefetch();
        }
    }

    /// Throws away what has not come of a payload and its checksums. False if it pauses: the next
    /// call goes on.
    pub(super) fn discard(
        &mut self,
        socket: &Socket,
        (patience, pause): (&mut Patience<'_>, Pause<'_>),
    ) -> Result<bool, TransportError> {
        self.discarded.resize(DISCARD_BYTES, 0);
        while self.left > 0 {
            let bytes = self.left.min(DISCARD_BYTES);
            let mut spans = [Span::of_buffer(&mut self.discarded[..bytes])];
            let left = socket.receive_part(&mut spans, 0, (patience, pause))?;
            self.left -= bytes - bytes_of(&spans[spans.len() - left..]);
            if left > 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

fn bytes_of(spans: &[Span]) -> usize {
    spans.iter().map(|span| span.bytes()).sum()
}

/// Receives a header.
pub(super) fn receive_header(
    socket: &Socket,
    patience: &mut Patience<'_>,
) -> Result<Header, TransportError> {
    let mut bytes = [0; HEADER_BYTES];
    socket.receive(&mut [Span::of_buffer(&mut bytes)], patience)?;
    Header::parse(&bytes).map_err(|error| TransportError::lost(socket.peer(), error))
}
