//! When a put stops to copy.

use cascade_runtime::SystemClock;

use super::Batch;

/// Bytes that a put copies between two looks at the clock.
const CLOCK_BYTES: usize = 1 << 20;

/// Looks at the clock during the copies of a put: pages of the caller's memory may come from a
/// disk.
pub(super) struct Copies<'a> {
    on: &'a Batch,
    /// Bytes since the last look.
    bytes: usize,
    is_late: bool,
}

impl<'a> Copies<'a> {
    pub(super) fn new(on: &'a Batch) -> Self {
        Self { on, bytes: 0, is_late: false }
    }

    /// Whether the deadline has passed before the copy of these bytes.
    pub(super) fn are_late(&mut self, bytes: usize) -> bool {
        if self.bytes >= CLOCK_BYTES {
            self.bytes = 0;
            self.is_late = self.on.deadline.has_passed(&SystemClock);
        }
        self.bytes += bytes;
        self.is_late
    }
}
