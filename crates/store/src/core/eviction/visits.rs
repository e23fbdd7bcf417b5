//! How many blocks one hold of the store's lock may visit.

/// Most candidates that searches visit in one hold of the store's lock.
pub(super) const VISITS_PER_HOLD: usize = 256;

/// How many blocks searches and requests may still visit before the lock is released.
#[derive(Debug, Clone, Copy)]
pub struct Visits {
    pub(super) left: usize,
    /// Blocks visited since the start.
    pub(super) total: u64,
}

impl Default for Visits {
    fn default() -> Self {
        Self { left: VISITS_PER_HOLD, total: 0 }
    }
}

impl Visits {
    /// Counts some visits. False if fewer are left.
    pub fn take(&mut self, visits: usize) -> bool {
        let Some(left) = self.left.checked_sub(visits) else { return false };
        self.left = left;
        self.total += visits as u64;
        true
    }

    /// As many as a caller without a lock wants.
    pub(crate) fn unlimited() -> Self {
        Self { left: usize::MAX, total: 0 }
    }

    /// As many as a hold has left that did other work before.
    pub(crate) fn limited(left: usize) -> Self {
        Self { left, total: 0 }
    }

    /// Counts visits that were made already, also if fewer were left.
    pub(super) fn spend(&mut self, visits: usize) {
        self.left = self.left.saturating_sub(visits);
        self.total += visits as u64;
    }

    /// Blocks visited since the start.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }
}
