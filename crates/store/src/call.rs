//! One call's time: when it gives up, and what it says then.

use std::time::Duration;

use cascade_block::{Clock, Deadline};

use crate::{StoreError, Writer};

/// The deadline of one call, shared by all its steps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    pub(crate) deadline: Deadline,
    timeout: Duration,
    pub(crate) writer: Option<Writer>,
}

impl Call {
    pub(crate) fn new(clock: &dyn Clock, timeout: Duration, writer: Option<Writer>) -> Self {
        Self { deadline: Deadline::after(clock, timeout), timeout, writer }
    }

    /// The same call for a step that may take half of the time that is left.
    pub(crate) fn half(self, clock: &dyn Clock) -> Self {
        Self { deadline: Deadline::after(clock, self.deadline.remaining(clock) / 2), ..self }
    }

    pub(crate) fn timeout_error(self, operation: &'static str) -> StoreError {
        let timeout_ms = u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX);
        StoreError::Timeout { operation, timeout_ms }
    }
}
