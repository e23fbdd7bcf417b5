//! The summary of an answered call for the node's traffic counters.

use std::time::Duration;

use cascade_store::PutOutcome;
use cascade_wire::{Answer, Call, KeyQuestion, Lease, PreparedBlock};

use crate::traffic::{CompletedRequest, Operation};

/// The counts of a call. They are taken before it is answered, which consumes the call.
#[derive(Debug, Clone, Copy)]
pub(super) struct CallSummary {
    pub(super) operation: Operation,
    blocks: u64,
    bytes: u64,
}

impl CallSummary {
    pub(super) fn of(call: &Call) -> Self {
        let (operation, blocks, bytes) = match call {
            Call::Lookup(request) => (Operation::Lookup, request.keys.len(), 0),
            Call::Lease { keys, .. } => (Operation::View, keys.len(), 0),
            Call::Acquire { request, .. } => (Operation::View, request.keys.len(), 0),
            Call::Release { .. } => (Operation::Release, 0, 0),
            Call::Prepare { blocks, .. } => (Operation::Reserve, blocks.len(), 0),
            Call::Reserve { bytes, .. } => (Operation::Reserve, 1, *bytes),
            Call::Seal { blocks, .. } => {
                let bytes = blocks.iter().map(|block| u64::from(block.bytes)).sum();
                (Operation::Seal, blocks.len(), bytes)
            }
            Call::Ask { question, keys } => match question {
                KeyQuestion::Contains | KeyQuestion::Locate => (Operation::Query, keys.len(), 0),
                KeyQuestion::Pin
                | KeyQuestion::Unpin
                | KeyQuestion::Delete
                | KeyQuestion::Prefetch => (Operation::Advise, keys.len(), 0),
            },
            Call::Hint(request) => (Operation::Advise, request.keys.len(), 0),
            Call::Clear => (Operation::Advise, 0, 0),
            Call::Hello(_)
            | Call::Ping
            | Call::Settled { .. }
            | Call::Register { .. }
            | Call::Manifests { .. }
            | Call::Flush { .. }
            | Call::Admin { .. }
            | Call::Forget { .. }
            | Call::Changes { .. } => (Operation::Control, 0, 0),
        };
        Self { operation, blocks: blocks as u64, bytes }
    }

    /// The record of the call with its answer.
    pub(super) fn answered(self, answer: Option<&Answer>, duration: Duration) -> CompletedRequest {
        let Self { operation, blocks, mut bytes } = self;
        let mut failed = false;
        let hit_blocks = match answer {
            Some(Answer::Matched(tiers)) => tiers.len(),
            Some(Answer::Leases(leases)) => {
                let lengths = leases.iter().filter_map(|lease| match lease {
                    Lease::Hit { bytes, .. } => Some(u64::from(*bytes)),
                    Lease::Miss | Lease::Failed(_) => None,
                });
                // The lengths of leased blocks are known only from the answer.
                bytes = lengths.clone().sum();
                lengths.count()
            }
            Some(Answer::Prepared(blocks)) => {
                let is_slab = |block: &&PreparedBlock| matches!(block, PreparedBlock::Slab { .. });
                blocks.iter().filter(is_slab).count()
            }
            Some(Answer::Puts(outcomes)) => {
                let is_stored = |outcome: &&PutOutcome| matches!(outcome, PutOutcome::Stored);
                outcomes.iter().filter(is_stored).count()
            }
            Some(Answer::Failed(_) | Answer::Refused { .. }) => {
                failed = true;
                0
            }
            _ => 0,
        };
        CompletedRequest {
            operation,
            duration,
            blocks,
            hit_blocks: hit_blocks as u64,
            bytes,
            failed,
        }
    }
}
