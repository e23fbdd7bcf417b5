//! Write-through: a put that returns only once every tier has its blocks.

use crate::call::Call;
use crate::node::Node;
use crate::outcome::PutOutcome;
use crate::{Put, StoreError};

impl Node {
    /// Write-through: a block counts once every stage has it. One that is in DRAM alone, because
    /// an earlier try failed, is tried again.
    pub(crate) fn wait_written(
        &self,
        put: &Put<'_>,
        outcome: &PutOutcome,
        call: Call,
    ) -> Result<(), StoreError> {
        use PutOutcome::{Deduplicated, Present, Stored};
        if !matches!(outcome, Stored | Deduplicated | Present) {
            return Ok(());
        }
        let mut state = self.lock();
        let may_try_again = !matches!(outcome, Stored);
        for stage in 0..self.stages.len() {
            let mut is_tried = !may_try_again;
            loop {
                if state.is_closed {
                    return Err(StoreError::Closed);
                }
                let Some(key) = state.catalog.find(&put.key) else {
                    return Err(self.stage_error(&state, stage, "write a block"));
                };
                let content = state.catalog.entry(key).content;
                let entry = state.catalog.content(content);
                if entry.dirty & (1 << stage) == 0 {
                    if entry.address(stage).is_some() {
                        break;
                    }
                    if is_tried || entry.slab.is_none() || state.is_write_shed(stage) {
                        return Err(self.stage_error(&state, stage, "write a block"));
                    }
                    is_tried = true;
                    let digest = state.catalog.digest_of(content).copied();
                    state.push_block(stage, self.facts(put, digest), content);
                    self.announce_work();
                }
                state = self.wait_in_time(state, "put", call)?;
            }
        }
        if matches!(outcome, Deduplicated) {
            if let Some(stage) = (0..self.stages.len()).find(|stage| state.is_write_shed(*stage)) {
                return Err(self.stage_error(&state, stage, "learn a name"));
            }
            let tickets = state.names_tickets.map(|tickets| tickets.pushed);
            drop(self.wait_names(state, tickets, "put", call)?);
        }
        Ok(())
    }
}
