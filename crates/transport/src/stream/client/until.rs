//! How long a caller waits until its batch is sent.

use std::sync::atomic::{AtomicBool, Ordering};

use cascade_runtime::{Deadline, SystemClock};

use crate::TransportError;
use crate::stream::byte_stream::TICK;

/// When a batch that is not posted whole is given up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Until<'a> {
    /// At this time.
    pub(crate) deadline: Deadline,
    /// Once this is set.
    pub(crate) flag: Option<&'a AtomicBool>,
}

impl Until<'_> {
    /// At this time.
    pub(crate) const fn deadline(deadline: Deadline) -> Self {
        Self { deadline, flag: None }
    }

    /// Waits by a call that ends at a deadline, and looks at the flag in between.
    pub(super) fn wait<T>(
        self,
        mut call: impl FnMut(Deadline) -> Result<T, TransportError>,
    ) -> Result<T, TransportError> {
        let Some(flag) = self.flag else { return call(self.deadline) };
        loop {
            let soon = Deadline::after(&SystemClock, TICK).min(self.deadline);
            match call(soon) {
                Err(TransportError::Deadline { .. })
                    if soon < self.deadline && !flag.load(Ordering::Acquire) => {}
                ended => return ended,
            }
        }
    }
}
