//! Views that are given to the caller as they come, while other blocks of the call are being read.

use std::panic::resume_unwind;

use cascade_block::BlockKey;
use cascade_tier::{CallOptions, ViewOutcome};

use crate::Store;
use crate::calls::read_counters::count_gets;
use crate::calls::read_flow::{EachView, ReadFlow, ReadPurpose};
use crate::calls::resident_views::{ResidentViews, failed_views};

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
        if let Err(error) = core.check_in_place("view blocks") {
            let failed = failed_views(keys, &error).into_iter().enumerate();
            return failed.for_each(|(index, view)| give(index, view));
        }
        let call = core.call(options);
        let resident = ResidentViews(core).view(keys, ReadPurpose::Use, call);
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
        flow.each = Some(Box::new(EachView { give, first, ready, is_given, panic: None, results }));
        flow.run(core);
        flow.give_views();
        let Some(mut each) = flow.each.take() else { return };
        for (index, outcome) in flow.outcomes.into_iter().enumerate() {
            if !each.is_given[index] {
                each.give(index, outcome.unwrap_or(ViewOutcome::Miss));
            }
        }
        count_gets(core, rest.len(), each.results.into_iter());
        if let Some(panic) = each.panic {
            resume_unwind(panic);
        }
    }
}
