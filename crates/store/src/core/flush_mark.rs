//! Write failures at one time, for a caller of flush.

use crate::core::catalog::LOWER_STAGES_MAX;

/// The number of failed writes of each stage at one time. A caller that keeps a mark learns of
/// every failure since its own last flush, even if other callers flush meanwhile.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FlushMark([u64; LOWER_STAGES_MAX]);

impl FlushMark {
    /// Counts failed writes of a stage.
    pub(crate) fn count(&mut self, stage: usize, blocks: u64) {
        self.0[stage] += blocks;
    }

    /// The later of two marks: the failures that either includes.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self(std::array::from_fn(|stage| self.0[stage].max(other.0[stage])))
    }

    /// A stage with failed writes since another mark.
    pub(crate) fn stage_with_failures_since(self, since: Self) -> Option<usize> {
        (0..LOWER_STAGES_MAX).find(|stage| self.0[*stage] > since.0[*stage])
    }
}
