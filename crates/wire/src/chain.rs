//! Encoding of a chain of blocks and its hints.

use std::time::Duration;

use cascade_block::BlockKey;
use cascade_tier::{Hints, Priority, Request, StopReason};

use crate::WireError;
use crate::fields::{FieldReader, FieldWriter};

/// A chain and its hints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChainRequest {
    /// The prompt's blocks, root first.
    pub keys: Vec<BlockKey>,
    /// Whether the last key is of a partial block.
    pub partial_tail: bool,
    /// Hints for the eviction policy.
    pub hints: Hints,
    /// Arrival time, on the caller's clock.
    pub at: Option<Duration>,
}

impl ChainRequest {
    /// Copies a store's request.
    pub fn of(request: &Request<'_>) -> Self {
        Self {
            keys: request.keys.to_vec(),
            partial_tail: request.partial_tail,
            hints: request.hints,
            at: request.at,
        }
    }

    /// Borrows it as a store's request.
    pub fn as_request(&self) -> Request<'_> {
        Request {
            keys: &self.keys,
            partial_tail: self.partial_tail,
            hints: self.hints,
            at: self.at,
        }
    }

    pub(crate) fn write(&self, into: &mut FieldWriter<'_>) {
        into.keys(&self.keys);
        into.u8(u8::from(self.partial_tail));
        let Hints { ends_session, stop, priority, workload, expected_within } = self.hints;
        into.u8(u8::from(ends_session));
        into.u8(match stop {
            None => 0,
            Some(StopReason::ToolUse) => 1,
            Some(StopReason::EndTurn) => 2,
            Some(StopReason::Length) => 3,
            Some(StopReason::Cancelled) => 4,
        });
        into.u8(match priority {
            Priority::Low => 0,
            Priority::Normal => 1,
            Priority::High => 2,
        });
        // A workload has 8 bits, so `u16::MAX` is free to mean none.
        into.u16(workload.map_or(u16::MAX, u16::from));
        into.maybe_u64(expected_within.map(nanos));
        into.maybe_u64(self.at.map(nanos));
    }

    pub(crate) fn read(from: &mut FieldReader<'_>) -> Result<Self, WireError> {
        let keys = from.keys()?;
        let partial_tail = from.flag("partial tail")?;
        let ends_session = from.flag("ends session")?;
        let stop = match from.u8("stop")? {
            0 => None,
            1 => Some(StopReason::ToolUse),
            2 => Some(StopReason::EndTurn),
            3 => Some(StopReason::Length),
            4 => Some(StopReason::Cancelled),
            _ => return Err(WireError::Field("stop")),
        };
        let priority = match from.u8("priority")? {
            0 => Priority::Low,
            1 => Priority::Normal,
            2 => Priority::High,
            _ => return Err(WireError::Field("priority")),
        };
        let workload = match from.u16("workload")? {
            u16::MAX => None,
            number => Some(u8::try_from(number).map_err(|_| WireError::Field("workload"))?),
        };
        let expected_within = from.maybe_u64("expected within")?.map(Duration::from_nanos);
        let at = from.maybe_u64("at")?.map(Duration::from_nanos);
        let hints = Hints { ends_session, stop, priority, workload, expected_within };
        Ok(Self { keys, partial_tail, hints, at })
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
