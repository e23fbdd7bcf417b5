//! The deadline of one call, and the error when it passes.

use std::time::Duration;

use cascade_runtime::{Clock, Deadline};
use cascade_tier::{StoreError, WriterId};

/// Deadline and writer of one call, shared by all its steps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CallContext {
    pub(crate) deadline: Deadline,
    timeout: Duration,
    pub(crate) writer: Option<WriterId>,
}

impl CallContext {
    pub(crate) fn new(clock: &dyn Clock, timeout: Duration, writer: Option<WriterId>) -> Self {
        Self { deadline: Deadline::after(clock, timeout), timeout, writer }
    }

    /// The same call for a step that may take half of the remaining time.
    pub(crate) fn half(self, clock: &dyn Clock) -> Self {
        Self { deadline: Deadline::after(clock, self.deadline.remaining(clock) / 2), ..self }
    }

    /// Whether the timeout is zero.
    pub(crate) fn is_immediate(self) -> bool {
        self.timeout.is_zero()
    }

    /// Whether to stop before the rest of a batch. Always false for a timeout of zero: such a call
    /// does everything that needs no waiting, and its caller limits the batch.
    pub(crate) fn has_timed_out(&self, clock: &dyn Clock) -> bool {
        !self.is_immediate() && self.deadline.has_passed(clock)
    }

    pub(crate) fn timeout_error(self, operation: &'static str) -> StoreError {
        let timeout_ms = u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX);
        StoreError::Timeout { operation, timeout_ms }
    }
}
