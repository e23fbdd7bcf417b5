//! Seals of copied blocks, also while the client still copies others.
//!
//! The node takes about half a microsecond to publish a block. It does so while the client copies,
//! if the client seals the first blocks before it copies the last ones.

use std::time::Duration;

use cascade_runtime::SystemClock;
use cascade_tier::{PutOutcome, StoreError};
use cascade_wire::{Answer, Call, SealedBlock};

use super::Batch;
use crate::client::ClientInner;
use crate::session::CallInFlight;

const SEAL: &str = "seal a put";

/// Bytes that are left to be copied when blocks are sealed early. With fewer, the node would still
/// publish when the client has copied them.
const BYTES_LEFT_MIN: usize = 1 << 20;
/// Blocks that are sealed early: fewer take the node as long as a message takes the client.
const BLOCKS_MIN: usize = 64;

/// Blocks that are copied and not sealed yet, with their places in the batch.
#[derive(Debug, Default)]
pub(super) struct CopiedBlocks {
    pub(super) sealed: Vec<SealedBlock>,
    pub(super) placed: Vec<usize>,
    bytes: usize,
    bytes_left: usize,
    /// Some of the round are sealed early already.
    has_early: bool,
}

/// A seal without an answer yet.
#[derive(Debug)]
pub(super) struct SealInFlight {
    pub(super) call: CallInFlight,
    pub(super) holds: Vec<u64>,
    pub(super) placed: Vec<usize>,
    /// The time that was left when the call began.
    pub(super) left: Duration,
}

impl CopiedBlocks {
    /// None yet, of a round with so many blocks and bytes.
    pub(super) fn of_round(blocks: usize, bytes_left: usize) -> Self {
        let (sealed, placed) = (Vec::with_capacity(blocks), Vec::with_capacity(blocks));
        Self { sealed, placed, bytes: 0, bytes_left, has_early: false }
    }

    /// Adds a block. Returns whether the blocks are worth a seal of their own: once, with half of
    /// the bytes. A message takes the client up to 35 us, which is as much as more of them would
    /// save.
    pub(super) fn push(&mut self, place: usize, block: SealedBlock) -> bool {
        let bytes = block.bytes as usize;
        self.sealed.push(block);
        self.placed.push(place);
        self.bytes += bytes;
        self.bytes_left = self.bytes_left.saturating_sub(bytes);
        !self.has_early
            && self.bytes_left >= BYTES_LEFT_MIN
            && self.bytes >= self.bytes_left
            && self.sealed.len() >= BLOCKS_MIN
    }

    /// Takes the blocks that were added since the last call, and their places.
    pub(super) fn take(&mut self) -> (Vec<SealedBlock>, Vec<usize>) {
        self.has_early = true;
        (std::mem::take(&mut self.sealed), std::mem::take(&mut self.placed))
    }
}

impl ClientInner {
    /// Sends the seal of the first blocks of a round. If that fails, so do the blocks.
    pub(super) fn begin_early_seal(
        &self,
        on: &Batch,
        (blocks, placed): (Vec<SealedBlock>, Vec<usize>),
        outcomes: &mut [Option<PutOutcome>],
    ) -> Option<SealInFlight> {
        let left = on.deadline.remaining(&SystemClock);
        let holds: Vec<u64> = blocks.iter().map(|block| block.hold).collect();
        let call = Call::Seal { timeout_ms: on.node_timeout_ms(), blocks };
        match on.link.session.begin_call(&call, on.deadline) {
            Ok(call) => Some(SealInFlight { call, holds, placed, left }),
            Err(error) => {
                let answer = self.answer_or_error(&on.link, SEAL, Err(error), (left, on.time));
                settle(outcomes, &placed, self.sealed(on, &holds, answer));
                None
            }
        }
    }

    pub(super) fn end_early_seal(
        &self,
        on: &Batch,
        seal: Option<SealInFlight>,
        outcomes: &mut [Option<PutOutcome>],
    ) {
        let Some(SealInFlight { call, holds, placed, left }) = seal else { return };
        let answer = call.end(on.deadline);
        let answer = self.answer_or_error(&on.link, SEAL, answer, (left, on.time));
        settle(outcomes, &placed, self.sealed(on, &holds, answer));
    }

    pub(super) fn seal(&self, on: &Batch, blocks: Vec<SealedBlock>) -> Vec<PutOutcome> {
        let holds: Vec<u64> = blocks.iter().map(|block| block.hold).collect();
        let call = Call::Seal { timeout_ms: on.node_timeout_ms(), blocks };
        let answer = self.call_on(&on.link, SEAL, &call, on.deadline, on.time);
        self.sealed(on, &holds, answer)
    }

    /// The outcomes of a seal with this answer.
    fn sealed(
        &self,
        on: &Batch,
        holds: &[u64],
        answer: Result<Answer, StoreError>,
    ) -> Vec<PutOutcome> {
        let error = match answer {
            Ok(Answer::Puts(outcomes)) if outcomes.len() == holds.len() => return outcomes,
            Ok(other) => self.unexpected_answer(&other),
            Err(error) => error,
        };
        // Release what the node did not seal. Releasing a sealed hold has no effect.
        // Each by itself: the holds of one seal need not have consecutive numbers.
        for hold in holds {
            on.link.session.release_range(*hold, 1);
        }
        holds.iter().map(|_| PutOutcome::Failed(error.clone())).collect()
    }
}

/// Sets the outcomes of the blocks at these places.
pub(super) fn settle(all: &mut [Option<PutOutcome>], placed: &[usize], outcomes: Vec<PutOutcome>) {
    for (at, outcome) in placed.iter().zip(outcomes) {
        all[*at] = Some(outcome);
    }
}

#[cfg(test)]
mod tests {
    use cascade_block::{BlockKey, NamespaceId};

    use super::*;

    /// The numbers of blocks of the seals of a round of blocks of equal length.
    fn seals(blocks: usize, bytes: u32) -> Vec<usize> {
        let mut copied = CopiedBlocks::of_round(blocks, blocks * bytes as usize);
        let mut seals = Vec::new();
        for place in 0..blocks {
            let block = SealedBlock {
                hold: place as u64,
                bytes,
                key: BlockKey::from_bytes([0; 32]),
                parent: None,
                namespace: NamespaceId::default(),
                is_prefix: false,
                is_partial: false,
                ttl_ms: None,
            };
            if copied.push(place, block) {
                seals.push(copied.take().0.len());
            }
        }
        let (sealed, placed) = copied.take();
        assert_eq!(placed.last(), Some(&(blocks - 1)), "the last blocks are sealed last");
        seals.push(sealed.len());
        seals
    }

    #[test]
    fn a_seal_takes_half_of_what_is_left_if_that_is_worth_a_message() {
        assert_eq!(seals(256, 64), [256]);
        assert_eq!(seals(256, 4 << 10), [256]);
        assert_eq!(seals(256, 16 << 10), [128, 128]);
        assert_eq!(seals(64, 1 << 20), [64]);
        assert_eq!(seals(32, 2 << 20), [32]);
        assert_eq!(seals(1, 2 << 20), [1]);
    }
}
