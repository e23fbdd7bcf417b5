//! Write-through: a put returns only once every tier has its blocks.

use cascade_tier::{Put, PutOutcome, StoreError};

use crate::core::history::Loss;
use crate::shared::StoreCore;
use crate::shared::call::CallContext;

impl StoreCore {
    /// Waits until every stage has the block. A block that is only in DRAM, because an earlier
    /// write failed, is queued once more.
    pub(crate) fn wait_written(
        &self,
        put: &Put<'_>,
        outcome: &PutOutcome,
        call: CallContext,
    ) -> Result<(), StoreError> {
        use PutOutcome::{Deduplicated, Present, Stored};
        if !matches!(outcome, Stored | Deduplicated | Present) {
            return Ok(());
        }
        let mut state = self.lock();
        // A block that was just stored is queued already; only an older one is queued here, once
        // for each stage.
        let is_new = matches!(outcome, Stored);
        for stage in 0..self.stages.len() {
            let mut was_queued = is_new;
            loop {
                if state.is_closed {
                    return Err(StoreError::Closed);
                }
                let Some(key) = state.catalog.find(&put.key) else {
                    // Removed after the put by another caller, which says nothing about the stage.
                    let why = state.history.loss_of(&put.key).map(|(why, _)| why);
                    if matches!(why, Some(Loss::Deleted | Loss::Cleared)) {
                        return Ok(());
                    }
                    return Err(self.stage_error(&state, stage, "write a block"));
                };
                let content = state.catalog.entry(key).content;
                let entry = state.catalog.content(content);
                if entry.bytes as usize != put.bytes.len() {
                    // Removed after the put, and put with other bytes by another caller.
                    return Ok(());
                }
                if entry.dirty & (1 << stage) == 0 {
                    if entry.address(stage).is_some() {
                        break;
                    }
                    if was_queued || entry.slab.is_none() || state.is_write_circuit_open(stage) {
                        return Err(self.stage_error(&state, stage, "write a block"));
                    }
                    was_queued = true;
                    let digest = state.catalog.digest_of(content).copied();
                    state.push_block(stage, self.facts(put, digest), content);
                    self.notify_movers();
                }
                state = self.wait_or_time_out(state, "put", call)?;
            }
        }
        if matches!(outcome, Deduplicated) {
            if let Some(stage) =
                (0..self.stages.len()).find(|stage| state.is_write_circuit_open(*stage))
            {
                return Err(self.stage_error(&state, stage, "record a key"));
            }
            let tickets = state.key_tickets.map(|tickets| tickets.pushed);
            drop(self.wait_for_key_changes(state, tickets, "put", call)?);
        }
        Ok(())
    }
}
