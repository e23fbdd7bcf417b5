//! Answers of the node, as results of calls.

use std::sync::Arc;
use std::time::Duration;

use cascade_runtime::{Deadline, SystemClock};
use cascade_tier::StoreError;
use cascade_wire::{Answer, Call};

use super::{ClientInner, PROBE_TIMEOUT};
use crate::session::{CallError, Link, UNRESPONSIVE};

impl ClientInner {
    pub(crate) fn call_on(
        &self,
        link: &Arc<Link>,
        operation: &'static str,
        call: &Call,
        deadline: Deadline,
        time: Duration,
    ) -> Result<Answer, StoreError> {
        // Earlier calls of the same batch may have used most of the time.
        let left = deadline.remaining(&SystemClock);
        self.answer_or_error(link, operation, link.session.call(call, deadline), (left, time))
    }

    /// The answer to a call, or its error. `left` is the time that was left when the call began,
    /// and `time` the timeout of the batch.
    pub(crate) fn answer_or_error(
        &self,
        link: &Arc<Link>,
        operation: &'static str,
        answer: Result<Answer, CallError>,
        (left, time): (Duration, Duration),
    ) -> Result<Answer, StoreError> {
        let timeout_ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        match answer {
            Ok(Answer::Failed(error)) => Err(error),
            Ok(Answer::Refused { reason }) => {
                let socket = self.socket();
                Err(StoreError::Refused { socket, reason })
            }
            Ok(answer) => Ok(answer),
            // A running node answers by the deadline whatever its tiers do, unless the deadline is
            // very short.
            Err(CallError::Timeout) => {
                // So little time proves nothing; the probe of the background thread has enough.
                if left < PROBE_TIMEOUT {
                    self.tasks.mark_node_suspect();
                } else {
                    self.mark_unavailable(UNRESPONSIVE, link, false);
                }
                Err(StoreError::Timeout { operation, timeout_ms })
            }
            // This client is too busy, which says nothing about the node.
            Err(CallError::NoFreeConnection) => Err(StoreError::Timeout { operation, timeout_ms }),
            Err(CallError::TooLong(reason)) => {
                Err(StoreError::Config { setting: "request", reason })
            }
            Err(CallError::Broken(reason)) => {
                self.mark_unavailable(&reason, link, true);
                let socket = self.socket();
                Err(StoreError::Unavailable { socket, reason })
            }
        }
    }

    /// The error for an answer of the wrong kind.
    pub(crate) fn unexpected_answer(&self, answer: &Answer) -> StoreError {
        let reason = format!("the node sent an answer of the wrong kind: {answer:?}");
        StoreError::Unavailable { socket: self.socket(), reason }
    }
}
