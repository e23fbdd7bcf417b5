//! Encoding of a store's outcomes and errors.

use std::sync::Arc;

use cascade_block::with_causes;
use cascade_tier::{DeclineReason, PutOutcome, StoreError};
use thiserror::Error;

use crate::WireError;
use crate::fields::{FieldReader, FieldWriter, cut};

/// The text of an error in the node.
#[derive(Debug, Error)]
#[error("{0}")]
struct RemoteCause(String);

/// Index: the reason's code in messages.
const DECLINE_REASONS: [DeclineReason; 5] = [
    DeclineReason::Partial,
    DeclineReason::TooLarge,
    DeclineReason::Full,
    DeclineReason::WorthLess,
    DeclineReason::Empty,
];

pub(crate) fn write_outcome(into: &mut FieldWriter<'_>, outcome: &PutOutcome) {
    match outcome {
        PutOutcome::Stored => into.u8(0),
        PutOutcome::Deduplicated => into.u8(1),
        PutOutcome::Present => into.u8(2),
        PutOutcome::Conflict => into.u8(3),
        PutOutcome::Declined(reason) => {
            into.u8(4);
            let code = DECLINE_REASONS.iter().position(|known| known == reason);
            let code = code.expect("every reason is in the list");
            into.u8(u8::try_from(code).expect("a handful of reasons"));
        }
        PutOutcome::Failed(error) => {
            into.u8(5);
            write_error(into, error);
        }
    }
}

pub(crate) fn read_outcome(from: &mut FieldReader<'_>) -> Result<PutOutcome, WireError> {
    Ok(match from.u8("outcome")? {
        0 => PutOutcome::Stored,
        1 => PutOutcome::Deduplicated,
        2 => PutOutcome::Present,
        3 => PutOutcome::Conflict,
        4 => {
            let code = usize::from(from.u8("reason")?);
            let reason = DECLINE_REASONS.get(code).ok_or(WireError::Field("reason"))?;
            PutOutcome::Declined(*reason)
        }
        5 => PutOutcome::Failed(read_error(from)?),
        _ => return Err(WireError::Field("outcome")),
    })
}

pub(crate) fn write_error(into: &mut FieldWriter<'_>, error: &StoreError) {
    match error {
        StoreError::Timeout { operation, timeout_ms } => {
            into.u8(0);
            into.text(operation);
            into.u64(*timeout_ms);
        }
        StoreError::Busy { tier, pending_bytes } => {
            into.u8(1);
            into.text(tier);
            into.u64(*pending_bytes);
        }
        StoreError::NoRoom { needed_bytes } => {
            into.u8(2);
            into.u64(*needed_bytes as u64);
        }
        StoreError::Tier { tier, operation, source } => {
            into.u8(3);
            into.text(tier);
            into.text(operation);
            into.text(cut(&with_causes(&**source), CAUSE_BYTES_MAX));
        }
        StoreError::Config { setting, reason } => {
            into.u8(4);
            into.text(setting);
            into.text(reason);
        }
        StoreError::Closed => into.u8(5),
        StoreError::Erasing => into.u8(6),
        StoreError::Limit { limit, most } => {
            into.u8(7);
            into.text(limit);
            into.u64(*most);
        }
        other => {
            into.u8(3);
            into.text("node");
            into.text("answer");
            into.text(cut(&with_causes(other), CAUSE_BYTES_MAX));
        }
    }
}

pub(crate) fn read_error(from: &mut FieldReader<'_>) -> Result<StoreError, WireError> {
    Ok(match from.u8("error")? {
        0 => StoreError::Timeout {
            operation: from.name("operation")?,
            timeout_ms: from.u64("timeout")?,
        },
        1 => StoreError::Busy { tier: from.name("tier")?, pending_bytes: from.u64("bytes")? },
        2 => {
            let needed = usize::try_from(from.u64("bytes")?);
            StoreError::NoRoom { needed_bytes: needed.map_err(|_| WireError::Field("bytes"))? }
        }
        3 => StoreError::Tier {
            tier: from.name("tier")?,
            operation: from.name("operation")?,
            source: Arc::new(RemoteCause(from.text("cause")?.to_owned())),
        },
        4 => StoreError::Config {
            setting: from.name("setting")?,
            reason: from.text("reason")?.to_owned(),
        },
        5 => StoreError::Closed,
        6 => StoreError::Erasing,
        7 => StoreError::Limit { limit: from.name("limit")?, most: from.u64("most")? },
        _ => return Err(WireError::Field("error")),
    })
}

/// Maximum length of a cause, so that an answer for [`crate::BLOCKS_MAX`] blocks fits a frame.
const CAUSE_BYTES_MAX: usize = 1024;
