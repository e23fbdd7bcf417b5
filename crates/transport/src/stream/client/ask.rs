//! Asks a question, and receives the blocks of its answer into the memory of the caller.

use std::sync::{Arc, PoisonError};

use cascade_runtime::Cancel;

use super::{Expected, Progress, StreamConnection, Until};
use crate::TransportError;
use crate::limits::FRAME_BYTES_MAX;
use crate::question::{ANSWER_BLOCKS_MAX, Answer, AskLimit, QUESTION_BYTES_MAX};
use crate::region::Span;
use crate::wire::{Header, Kind, read_numbered, write_numbered};

impl StreamConnection {
    /// See `Connection::ask`.
    pub(crate) fn ask_peer(
        &self,
        question: &[u8],
        targets: &mut [&mut [u8]],
        limit: AskLimit<'_>,
    ) -> Result<Answer, TransportError> {
        let lengths = check_lengths(question, targets)?;
        if !self.link.peer.answers_questions {
            let text = format!("{} answers no questions", self.link.peer.address);
            return Err(TransportError::Unavailable(text));
        }
        let progress = Arc::new(Progress::default());
        let spans = targets.iter_mut().map(|target| Span::of_buffer(target)).collect();
        let asked = self.ask_and_wait((question, &lengths, spans), &progress, limit);
        // Whatever has happened: when this returns, nobody writes into the targets.
        self.link.leave(&progress);
        asked
    }

    fn ask_and_wait(
        &self,
        (question, lengths, targets): (&[u8], &[u32], Vec<Span>),
        progress: &Arc<Progress>,
        limit: AskLimit<'_>,
    ) -> Result<Answer, TransportError> {
        let until = Until { deadline: limit.deadline, flag: limit.cancel.map(Cancel::flag) };
        {
            let mut sender = self.link.lock_sender(until)?;
            self.link.wait_for_room(until)?;
            let mut body = std::mem::take(&mut sender.body);
            write_numbered(lengths, question, &mut body);
            let header = Header::new(Kind::Ask, 0).with_body(&body);
            let expected = Expected { targets, ..Expected::of_kind(Kind::Answer) };
            let message = (&*body, &[][..]);
            let waits = (progress, until);
            let sent = self.link.send_frame(&mut sender, header, message, Some(expected), waits);
            sender.body = body;
            sent?;
        }
        until.wait(|deadline| self.link.drive(deadline, |_| progress.has_ended()))?;
        progress.result()?;
        let body = progress.body.lock().unwrap_or_else(PoisonError::into_inner).take();
        let read = body.as_ref().map(|(_, body)| read_numbered(body));
        let Some(Ok((filled, text))) = read else {
            return Err(TransportError::lost(&self.link.peer.address, "it sent no answer"));
        };
        Ok(Answer { text: text.to_vec(), filled })
    }
}

/// The lengths of the targets, if they and the question keep to their limits.
fn check_lengths(question: &[u8], targets: &[&mut [u8]]) -> Result<Vec<u32>, TransportError> {
    let most = usize::try_from(FRAME_BYTES_MAX).unwrap_or(usize::MAX);
    let longest = targets.iter().map(|target| target.len()).max().unwrap_or(0);
    let limits = [
        ("a question", question.len(), QUESTION_BYTES_MAX),
        ("the number of blocks of a question", targets.len(), ANSWER_BLOCKS_MAX),
        ("a block of a question", longest, most),
    ];
    if let Some((what, value, limit)) = limits.into_iter().find(|(_, value, limit)| value > limit) {
        return Err(TransportError::TooLarge { what, value, limit });
    }
    let length = |target: &&mut [u8]| u32::try_from(target.len()).expect("at most 8 MiB");
    Ok(targets.iter().map(length).collect())
}
