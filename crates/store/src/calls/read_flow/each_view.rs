//! A caller that gets each view as it comes.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use cascade_tier::ViewOutcome;

use super::ReadFlow;
use crate::calls::read_counters::ReadResult;

/// What a caller does with the view of one block.
pub(in crate::calls) type GiveView<'a> = &'a mut dyn FnMut(usize, ViewOutcome);

/// The caller of a read that gets each view as it comes.
pub(in crate::calls) struct EachView<'a> {
    pub(in crate::calls) give: GiveView<'a>,
    /// The place of the first block of this read in the batch of the caller.
    pub(in crate::calls) first: usize,
    /// Blocks with a view that the caller does not have yet.
    pub(in crate::calls) ready: Vec<usize>,
    pub(in crate::calls) is_given: Vec<bool>,
    /// The caller panicked: it gets no more views, and the panic goes on after the read.
    pub(in crate::calls) panic: Option<Box<dyn Any + Send>>,
    /// The results that the caller got.
    pub(in crate::calls) results: Vec<ReadResult>,
}

impl EachView<'_> {
    pub(super) fn note(&mut self, index: usize, outcome: &ViewOutcome) {
        // A failure is not the outcome yet: another tier may have the block.
        if matches!(outcome, ViewOutcome::Hit { .. } | ViewOutcome::Miss) {
            self.ready.push(index);
        }
    }

    pub(in crate::calls) fn give(&mut self, index: usize, outcome: ViewOutcome) {
        self.is_given[index] = true;
        self.results.push(ReadResult::from_view(&outcome));
        if self.panic.is_some() {
            return;
        }
        // Other callers wait for what this call reads: it has to end in order.
        let give = AssertUnwindSafe(|| (self.give)(self.first + index, outcome));
        self.panic = catch_unwind(give).err();
    }
}

impl fmt::Debug for EachView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EachView").field("ready", &self.ready).finish_non_exhaustive()
    }
}

impl ReadFlow<'_, '_> {
    /// Gives the caller the views that are there, if it wants them as they come. Not under the lock
    /// of the store: the caller may do anything.
    pub(in crate::calls) fn give_views(&mut self) {
        let Some(mut each) = self.each.take() else { return };
        for index in std::mem::take(&mut each.ready) {
            if let Some(outcome) = self.outcomes[index].take() {
                each.give(index, outcome);
            }
        }
        self.each = Some(each);
    }
}
