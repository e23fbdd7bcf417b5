//! Answers the questions of a peer.

use super::Served;
use crate::limits::{FRAME_BYTES_MAX, FRAME_PIECES_MAX};
use crate::question::{QUESTION_BYTES_MAX, Reply};
use crate::region::Span;
use crate::wire::{Header, Kind, pieces_of, read_numbered, write_numbered};
use crate::{Refusal, TransportError};

impl Served<'_> {
    /// Bytes of the targets of a question: its answer has no more.
    pub(super) fn offered_bytes(&self) -> u64 {
        let targets = read_numbered(&self.body).map_or_else(|_| vec![], |(targets, _)| targets);
        targets.into_iter().map(u64::from).sum::<u64>().min(FRAME_BYTES_MAX)
    }

    pub(super) fn ask(&mut self, header: &Header) -> Result<(), TransportError> {
        let Some(answers) = &self.state.config.answers else {
            return self.answer(header, Some((Refusal::NotAllowed, 0)));
        };
        let read = read_numbered(&self.body).map_err(|error| error.to_string());
        let (targets, question) = read.map_err(|reason| self.malformed(&reason))?;
        let reply = answers.answer(self.peer, question, &targets);
        let (numbers, spans) = sendable(&reply, &targets);
        let text = &reply.text[..reply.text.len().min(QUESTION_BYTES_MAX)];
        let mut body = vec![];
        write_numbered(&numbers, text, &mut body);
        let answer = Header {
            pieces: u32::try_from(spans.len()).expect("at most FRAME_PIECES_MAX"),
            payload_bytes: spans.iter().map(|span| span.bytes() as u64).sum(),
            ..Header::new(Kind::Answer, header.frame).with_body(&body)
        };
        // The client receives without a question from here.
        let mut receive = || false;
        let sending: (_, &mut dyn FnMut() -> bool) = (&mut self.patience, &mut receive);
        self.outgoing.send(self.socket, &answer, &body, &spans, sending)
    }
}

/// The targets of the blocks that one frame carries, and the pieces of those. The reply keeps their
/// memory.
fn sendable(reply: &Reply, targets: &[u32]) -> (Vec<u32>, Vec<Span>) {
    let (mut numbers, mut spans, mut left) = (vec![], vec![], FRAME_BYTES_MAX);
    for (number, block) in &reply.blocks {
        let bytes = block.bytes();
        let is_after = numbers.last().is_none_or(|last| last < number);
        let target = targets.get(*number as usize);
        if !is_after || target.is_none_or(|target| *target as usize != bytes.len()) {
            // A block for no target is a fault of the program: the peer does without it.
            continue;
        }
        let pieces = spans.len() + pieces_of(bytes.len()).count();
        if bytes.len() as u64 > left || pieces > FRAME_PIECES_MAX {
            break;
        }
        left -= bytes.len() as u64;
        numbers.push(*number);
        let piece = |(at, length)| Span::of_bytes(&bytes[at..at + length]);
        spans.extend(pieces_of(bytes.len()).map(piece));
    }
    (numbers, spans)
}
