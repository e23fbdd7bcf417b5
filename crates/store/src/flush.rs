//! Flushes, and what each caller of one was told of.

use crate::call::Call;
use crate::catalog::LOWER_STAGES_MAX;
use crate::health::Direction;
use crate::node::{Node, tier_error};
use crate::shedding::Verdict;
use crate::stage::StageError;
use crate::{CallOptions, Store, StoreError};

/// How many blocks each stage had failed to take at some moment. Each of several callers that keeps
/// one is told of every failure since its own last flush, whoever else flushes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FlushMark([u64; LOWER_STAGES_MAX]);

impl FlushMark {
    /// A stage failed to take some more.
    pub(crate) fn count(&mut self, stage: usize, blocks: u64) {
        self.0[stage] += blocks;
    }

    /// The later of two: what was told by either.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self(std::array::from_fn(|stage| self.0[stage].max(other.0[stage])))
    }

    /// A stage that failed to take something since another mark.
    fn newer(self, since: Self) -> Option<usize> {
        (0..LOWER_STAGES_MAX).find(|stage| self.0[*stage] > since.0[*stage])
    }
}

impl Store {
    /// Returns once all that was put is written down the pipeline and would survive a restart.
    /// Fails if a stage did not take some of it since the last flush; what is missing there is in
    /// DRAM for as long as it lasts.
    pub fn flush(&self, options: CallOptions) -> Result<(), StoreError> {
        self.node().flush(options)
    }

    /// As [`Store::flush`] for one of several callers: fails if a stage did not take something
    /// since what this one was told of, which is brought up to date with what this flush tells.
    pub fn flush_since(
        &self,
        told: &mut FlushMark,
        options: CallOptions,
    ) -> Result<(), StoreError> {
        self.node().flush_since(told, self.node().call(options))
    }

    /// Where a caller that comes now begins: it is told of whatever nobody was told of yet, which
    /// may have been its own before it was connected anew.
    pub fn flush_mark(&self) -> FlushMark {
        self.node().lock().told
    }
}

impl Node {
    /// For callers without a mark of their own: they are told what nobody was told of when their
    /// flush began.
    pub(crate) fn flush(&self, options: CallOptions) -> Result<(), StoreError> {
        let mut told = self.lock().told;
        self.flush_since(&mut told, self.call(options))
    }

    fn flush_since(&self, told: &mut FlushMark, call: Call) -> Result<(), StoreError> {
        let mut state = self.lock();
        if state.is_closed {
            return Err(StoreError::Closed);
        }
        let tickets = state.blocks_tickets.map(|tickets| tickets.pushed);
        while (0..self.stages.len()).any(|at| state.blocks_tickets[at].settled < tickets[at]) {
            state = self.wait_in_time(state, "flush", call)?;
        }
        // Blocks that were written have left names to be told.
        let tickets = state.names_tickets.map(|tickets| tickets.pushed);
        drop(self.wait_names(state, tickets, "flush", call)?);
        let shed = self.lock().write_shed;
        let mut flushed = Ok(());
        // One that fails keeps the others from nothing.
        for (at, stage) in self.stages.iter().enumerate().filter(|(at, _)| shed & (1 << at) == 0) {
            let result = stage.flush(call.deadline);
            let verdict = match &result {
                // What is to be brought to stable storage may be much: late says nothing.
                Ok(()) | Err(StageError::Timeout) => Verdict::Nothing,
                Err(error) => Verdict::Failed(error.clone()),
            };
            self.judge(&mut self.lock(), at, Direction::Writes, verdict);
            flushed = flushed.and(result.map_err(|error| tier_error(stage, "flush", error)));
        }
        let mut state = self.lock();
        let lacking = state.unwritten.newer(told.max(state.forgiven));
        if state.is_closed && (flushed.is_err() || lacking.is_some()) {
            // Another thread closed the store meanwhile: the stages are well, but let go.
            return Err(StoreError::Closed);
        }
        flushed?;
        *told = state.unwritten;
        state.told = state.unwritten;
        if let Some(stage) = lacking {
            return Err(self.stage_error(&state, stage, "write some blocks down"));
        }
        match (0..self.stages.len()).find(|stage| shed & (1 << stage) != 0) {
            Some(stage) => Err(self.stage_error(&state, stage, "flush")),
            None => Ok(()),
        }
    }
}
