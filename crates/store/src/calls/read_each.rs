//! Views that are given to the caller as they come, while other blocks of the call are being read.

use std::fmt;

use cascade_block::BlockKey;
use cascade_tier::{CallOptions, ViewOutcome};

use crate::Store;
use crate::calls::read_counters::ReadResult;
use crate::calls::read_flow::ReadFlow;
use crate::calls::read_flow::ReadPurpose;

/// What a caller does with the view of one block.
type GiveView<'a> = &'a mut dyn FnMut(usize, ViewOutcome);

/// The caller of a read that gets each view as it comes.
pub(super) struct EachView<'a> {
    give: GiveView<'a>,
    /// The place of the first block of this read in the batch of the caller.
    first: usize,
    /// Blocks with a view that the caller does not have yet.
    ready: Vec<usize>,
    is_given: Vec<bool>,
    /// The results that the caller got.
    results: Vec<ReadResult>,
}

impl EachView<'_> {
    pub(super) fn note(&mut self, index: usize, outcome: &ViewOutcome) {
        // A failure is not the outcome yet: another tier may have the block.
        if matches!(outcome, ViewOutcome::Hit { .. } | ViewOutcome::Miss) {
            self.ready.push(index);
        }
    }

    fn give(&mut self, index: usize, outcome: ViewOutcome) {
        self.is_given[index] = true;
        self.results.push(ReadResult::from_view(&outcome));
        (self.give)(self.first + index, outcome);
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
    pub(super) fn give_views(&mut self) {
        let Some(mut each) = self.each.take() else { return };
        for index in std::mem::take(&mut each.ready) {
            if let Some(outcome) = self.outcomes[index].take() {
                each.give(index, outcome);
            }
        }
        self.each = Some(each);
    }
}

impl Store {
    /// As [`Store::view`], but gives each view with the place of its key as soon as it is there,
    /// in any order: blocks in DRAM first, and blocks of a fast tier while a slow one still reads.
    /// `give` is called exactly once for each block, in this thread, before this returns. It must
    /// not take long, because this thread also reads.
    pub fn view_each(
        &self,
        keys: &[BlockKey],
        options: CallOptions,
        give: &mut dyn FnMut(usize, ViewOutcome),
    ) {
        let core = self.core();
        let call = core.call(options);
        let resident = core.view_resident(keys, ReadPurpose::Use, call);
        let first = resident.len();
        for (index, view) in resident.into_iter().enumerate() {
            give(index, view);
        }
        let rest = &keys[first..];
        if rest.is_empty() {
            return;
        }
        let mut flow = ReadFlow::new(core, rest, call, ReadPurpose::Use);
        let (ready, results) = (Vec::new(), Vec::with_capacity(rest.len()));
        let is_given = vec![false; rest.len()];
        flow.each = Some(Box::new(EachView { give, first, ready, is_given, results }));
        core.run_read(&mut flow);
        flow.give_views();
        let Some(mut each) = flow.each.take() else { return };
        for (index, outcome) in flow.outcomes.into_iter().enumerate() {
            if !each.is_given[index] {
                each.give(index, outcome.unwrap_or(ViewOutcome::Miss));
            }
        }
        core.count_gets(rest.len(), each.results.into_iter());
    }
}
