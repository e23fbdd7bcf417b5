//! The part of a payload that one system call moves.

use crate::limits::CHUNK_BYTES;
use crate::region::Span;

/// How many of these pieces the next system call moves, at most `most`; at least one.
pub(super) fn chunk_of(pieces: &[Span], most: usize) -> usize {
    let mut bytes = 0;
    let is_room_left = |piece: &&Span| {
        let is_left = bytes < CHUNK_BYTES;
        bytes += piece.bytes();
        is_left
    };
    pieces.iter().take(most).take_while(is_room_left).count()
}
